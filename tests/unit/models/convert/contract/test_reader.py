"""The loader contract: settings of each file are read, and unknown ones are refused by file and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ModelFileError
from shoal.models.convert.contract import Dense, LayerNorm, Normalize, Pooling, read_contract, shipped_graph
from tests.unit.models.checkpoints import (
    HIDDEN,
    KINDS,
    MEAN,
    POSITIONS,
    ST,
    checkpoint,
    dense,
    layer_norm,
    write_json,
)

WIDTH: dict[str, Any] = {"word_embedding_dimension": HIDDEN}


def test_a_whole_model_is_read(tmp_path: Path) -> None:
    """Encoder, pooling, modules and lengths come from their files."""
    contract = read_contract(checkpoint(tmp_path))
    assert contract.encoder is not None and contract.encoder.family == "bert"
    assert contract.pooling == Pooling(modes=("mean",))
    assert contract.modules == (Normalize(),)
    assert (contract.dimension, contract.max_tokens, contract.ends_normalized) == (HIDDEN, 32, True)
    assert not contract.lower_case


@pytest.mark.parametrize(
    ("kind", "family", "offset", "pad"),
    [
        ("bert", "bert", 0, 0),
        ("roberta", "roberta", 2, 1),
        ("xlm-roberta", "roberta", 2, 1),
        ("camembert", "roberta", 2, 1),
        ("mpnet", "mpnet", 2, 1),
        ("distilbert", "distilbert", 0, 0),
    ],
)
def test_families(tmp_path: Path, kind: str, family: str, offset: int, pad: int) -> None:
    """Each model_type has its layout, padding id and first position."""
    encoder = read_contract(checkpoint(tmp_path, kind)).encoder
    assert encoder is not None
    assert (encoder.family, encoder.position_offset, encoder.pad_id) == (family, offset, pad)


def test_without_modules_json_it_is_a_transformer_with_mean_pooling(tmp_path: Path) -> None:
    """sentence-transformers' default for a plain checkpoint; vectors are not normalized."""
    contract = read_contract(checkpoint(tmp_path, pooling=None))
    assert contract.pooling.modes == ("mean",)
    assert contract.modules == ()
    assert not contract.ends_normalized


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_length_is_the_smaller_of_tokenizer_and_positions(tmp_path: Path, kind: str) -> None:
    """Rows of the position table for padding hold no tokens."""
    contract = read_contract(checkpoint(tmp_path, kind, sentence={"do_lower_case": False}))
    offset = 0 if kind in ("bert", "distilbert") else 2
    assert contract.max_tokens == POSITIONS - offset
    write_json(tmp_path / "tokenizer_config.json", {"model_max_length": 12})
    assert read_contract(tmp_path).max_tokens == 12


def test_an_endless_tokenizer_states_no_length(tmp_path: Path) -> None:
    """transformers writes 1e30 for a tokenizer without a limit."""
    checkpoint(tmp_path, sentence={"max_seq_length": None})
    write_json(tmp_path / "tokenizer_config.json", {"model_max_length": 1000000000000000019884624838656})
    assert read_contract(tmp_path).max_tokens == POSITIONS


def test_max_seq_length_never_exceeds_the_positions(tmp_path: Path) -> None:
    """A length beyond the table would fail on the first long text."""
    contract = read_contract(checkpoint(tmp_path, "roberta", sentence={"max_seq_length": 9999}))
    assert contract.max_tokens == POSITIONS - 2


def test_model_max_length_of_the_tokenizer_arguments_wins(tmp_path: Path) -> None:
    """tokenizer_args of sentence_bert_config.json override max_seq_length, as in the reference."""
    sentence = {"max_seq_length": 20, "tokenizer_args": {"model_max_length": 10}}
    assert read_contract(checkpoint(tmp_path, sentence=sentence)).max_tokens == 10


def test_legacy_names_of_the_sentence_config(tmp_path: Path) -> None:
    """Old models name the file after their family."""
    checkpoint(tmp_path, "roberta")
    (tmp_path / "sentence_bert_config.json").rename(tmp_path / "sentence_roberta_config.json")
    write_json(tmp_path / "sentence_roberta_config.json", {"max_seq_length": 21, "do_lower_case": True})
    contract = read_contract(tmp_path)
    assert (contract.max_tokens, contract.lower_case) == (21, True)


def test_a_transformer_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """Old models keep the encoder in 0_Transformer."""
    checkpoint(tmp_path)
    inner = tmp_path / "0_Transformer"
    inner.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "sentence_bert_config.json"):
        (tmp_path / name).rename(inner / name)
    modules = [
        {"idx": 0, "name": "0", "path": "0_Transformer", "type": f"{ST}Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{ST}Pooling"},
    ]
    write_json(tmp_path / "modules.json", modules)
    contract = read_contract(tmp_path)
    assert contract.encoder_path == "0_Transformer"
    assert contract.file("config.json") == "0_Transformer/config.json"


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        (WIDTH, ("mean",)),
        (WIDTH | {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        (WIDTH | {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        (WIDTH | {"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True}, ("max", "lasttoken")),
        (WIDTH | {"pooling_mode_weightedmean_tokens": True}, ("weightedmean",)),
        (WIDTH | {"pooling_mode_mean_sqrt_len_tokens": True}, ("mean_sqrt_len_tokens",)),
        ({"embedding_dimension": HIDDEN, "pooling_mode": "lasttoken"}, ("lasttoken",)),
        ({"embedding_dimension": HIDDEN, "pooling_mode": ["mean", "cls"]}, ("mean", "cls")),
    ],
)
def test_pooling_modes(tmp_path: Path, config: dict[str, Any], modes: tuple[str, ...]) -> None:
    """Flags are concatenated in the reference's fixed order, named modes in the given order."""
    contract = read_contract(checkpoint(tmp_path, pooling=config, after=()))
    assert contract.pooling.modes == modes
    assert contract.dimension == HIDDEN * len(modes)


def test_include_prompt(tmp_path: Path) -> None:
    """False excludes a prompt's tokens from pooling."""
    assert not read_contract(checkpoint(tmp_path, pooling=MEAN | {"include_prompt": False})).pooling.include_prompt


def test_modules_after_the_pooling_keep_their_order(tmp_path: Path) -> None:
    """Two Dense, a LayerNorm and a Normalize; Dropout does nothing; a Dense without activation has Tanh."""
    checkpoint(tmp_path, after=("Dense", "Dropout", "Dense", "LayerNorm", "Normalize"))
    dense(tmp_path, "2_Dense", HIDDEN, 20, activation="Identity", bias=False)
    dense(tmp_path, "4_Dense", 20, 12, activation=None)
    layer_norm(tmp_path, "5_LayerNorm", 12)
    contract = read_contract(tmp_path)
    assert contract.modules == (
        Dense(path="2_Dense", in_features=HIDDEN, out_features=20, bias=False, activation="identity"),
        Dense(path="4_Dense", in_features=20, out_features=12, bias=True, activation="tanh"),
        LayerNorm(path="5_LayerNorm", dimension=12),
        Normalize(),
    )
    assert contract.dimension == 12


def test_newer_class_paths(tmp_path: Path) -> None:
    """sentence-transformers 6 moved its modules but kept the class names."""
    checkpoint(tmp_path, after=())
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        },
    ]
    write_json(tmp_path / "modules.json", modules)
    write_json(
        tmp_path / "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            "module_output_name": "token_embeddings",
        },
    )
    assert read_contract(tmp_path).max_tokens == POSITIONS


def test_prompts(tmp_path: Path) -> None:
    """Prompts, the default prompt's name and the similarity; a null prompt is ignored."""
    config = {
        "prompts": {"query": "query: ", "document": "", "unset": None},
        "default_prompt_name": "query",
        "similarity_fn_name": "dot",
    }
    write_json(checkpoint(tmp_path) / "config_sentence_transformers.json", config)
    contract = read_contract(tmp_path)
    assert contract.prompts == {"query": "query: ", "document": ""}
    assert (contract.default_prompt_name, contract.similarity) == ("query", "dot")


REFUSED_CONFIG = [
    ({"model_type": "xlnet"}, "model_type"),
    ({"model_type": None}, "model_type"),
    ({"hidden_act": "mish"}, "hidden_act"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ({"architectures": ["JinaBertModel"]}, "architectures"),
    ({"auto_map": {"AutoModel": "modeling.Model"}}, "auto_map"),
    ({"is_decoder": True}, "is_decoder"),
    ({"add_cross_attention": True}, "add_cross_attention"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"num_attention_heads": 3}, "num_attention_heads"),
    ({"hidden_size": "16"}, "hidden_size"),
    ({"num_hidden_layers": None}, "num_hidden_layers"),
    ({"layer_norm_eps": 0}, "layer_norm_eps"),
    ({"pad_token_id": 100000}, "pad_token_id"),
]


@pytest.mark.parametrize(("config", "key"), REFUSED_CONFIG, ids=[key for _, key in REFUSED_CONFIG])
def test_encoders_that_are_refused(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    """An unsupported value in config.json that changes the vectors."""
    with pytest.raises(ModelFileError) as caught:
        read_contract(checkpoint(tmp_path, config=config))
    assert (caught.value.file, caught.value.key) == ("config.json", key)


@pytest.mark.parametrize(
    ("kind", "config", "key"),
    [
        ("mpnet", {"pad_token_id": 0}, "pad_token_id"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets"),
        ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings"),
        ("distilbert", {"activation": "mish"}, "activation"),
        ("distilbert", {"n_heads": 3}, "n_heads"),
    ],
)
def test_family_rules(tmp_path: Path, kind: str, config: dict[str, Any], key: str) -> None:
    """Settings that only one family reads."""
    with pytest.raises(ModelFileError) as caught:
        read_contract(checkpoint(tmp_path, kind, config=config))
    assert caught.value.key == key


def module(kind: str, path: str = "1_Pooling", **more: Any) -> dict[str, Any]:
    return {"idx": 0, "name": "0", "path": path, "type": kind, **more}


FIRST = module(f"{ST}Transformer", "")
SECOND = module(f"{ST}Pooling")
REFUSED_MODULES: list[tuple[Any, str | None]] = [
    ({}, None),
    ([], None),
    ([SECOND], "[0].type"),
    ([FIRST], "[1].type"),
    ([FIRST, SECOND, module(f"{ST}CNN", "2_CNN")], "[2].type"),
    ([FIRST, SECOND, module(f"{ST}Pooling", "2_Pooling")], "[2].type"),
    ([FIRST, module("custom.Pooling")], "[1].type"),
    ([FIRST, module(f"{ST}Pooling", "../1_Pooling")], "[1].path"),
    ([FIRST, module(f"{ST}Pooling", "/1_Pooling")], "[1].path"),
    ([FIRST, module(f"{ST}Pooling", kwargs=["task"])], "[1].kwargs"),
    ([FIRST, {"type": f"{ST}Pooling"}], "[1]"),
]


@pytest.mark.parametrize(("modules", "key"), REFUSED_MODULES)
def test_module_lists_that_are_refused(tmp_path: Path, modules: Any, key: str | None) -> None:
    """Unknown modules, invalid orders, custom code, and paths outside the folder."""
    write_json(checkpoint(tmp_path, after=()) / "modules.json", modules)
    with pytest.raises(ModelFileError) as caught:
        read_contract(tmp_path)
    assert caught.value.file == "modules.json"
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("pooling", "key"),
    [
        (WIDTH | {"pooling_mode": "median"}, "pooling_mode"),
        (WIDTH | {"pooling_mode": []}, "pooling_mode"),
        (WIDTH | {"pooling_mode_median_tokens": True}, "pooling_mode_median_tokens"),
        (WIDTH | {"pooling_mode_cls_token": "yes"}, "pooling_mode_cls_token"),
        ({"word_embedding_dimension": 17}, "word_embedding_dimension"),
        ({"embedding_dimension": 17}, "embedding_dimension"),
        ({}, "word_embedding_dimension"),
    ],
)
def test_poolings_that_are_refused(tmp_path: Path, pooling: dict[str, Any], key: str) -> None:
    """Unknown modes, and a width other than the encoder's."""
    with pytest.raises(ModelFileError) as caught:
        read_contract(checkpoint(tmp_path, pooling=pooling))
    assert (caught.value.file, caught.value.key) == ("1_Pooling/config.json", key)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"activation_function": "torch.nn.modules.activation.Mish"}, "activation_function"),
        ({"activation_function": "own.Activation"}, "activation_function"),
        ({"in_features": 17}, "in_features"),
        ({"use_residual": "yes"}, "use_residual"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
        ({"rank": 4}, "rank"),
    ],
)
def test_dense_modules_that_are_refused(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    """Unknown activations, mismatched sizes, and unsupported options."""
    checkpoint(tmp_path, after=("Dense",))
    config = {"in_features": HIDDEN, "out_features": 8} | change
    write_json(tmp_path / "2_Dense" / "config.json", config)
    with pytest.raises(ModelFileError) as caught:
        read_contract(tmp_path)
    assert (caught.value.file, caught.value.key) == ("2_Dense/config.json", key)


@pytest.mark.parametrize(
    ("sentence", "key"),
    [
        ({"max_seq_length": 0}, "max_seq_length"),
        ({"max_seq_length": "many"}, "max_seq_length"),
        ({"do_lower_case": "no"}, "do_lower_case"),
        ({"transformer_task": "fill-mask"}, "transformer_task"),
        ({"query_expansion": {"length": 32}}, "query_expansion"),
        ({"config_args": {"num_hidden_layers": 1}}, "config_args.num_hidden_layers"),
        ({"tokenizer_name_or_path": "other"}, "tokenizer_name_or_path"),
        ({"novelty": 1}, "novelty"),
    ],
)
def test_sentence_configs_that_are_refused(tmp_path: Path, sentence: dict[str, Any], key: str) -> None:
    """Settings of the Transformer module that change the vectors."""
    with pytest.raises(ModelFileError) as caught:
        read_contract(checkpoint(tmp_path, sentence=sentence))
    assert (caught.value.file, caught.value.key) == ("sentence_bert_config.json", key)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"prompts": {"query": 1}}, "prompts.query"),
        ({"prompts": []}, "prompts"),
        ({"prompts": {"query": "q"}, "default_prompt_name": "passage"}, "default_prompt_name"),
        ({"similarity_fn_name": "hamming"}, "similarity_fn_name"),
        ({"model_type": "SparseEncoder"}, "model_type"),
    ],
)
def test_prompt_files_that_are_refused(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    """A missing default prompt, and models of another kind."""
    write_json(checkpoint(tmp_path) / "config_sentence_transformers.json", config)
    with pytest.raises(ModelFileError) as caught:
        read_contract(tmp_path)
    assert (caught.value.file, caught.value.key) == ("config_sentence_transformers.json", key)


@pytest.mark.parametrize("name", ["config.json", "1_Pooling/config.json"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    """For an incomplete folder."""
    (checkpoint(tmp_path) / name).unlink()
    with pytest.raises(ModelFileError, match="is missing") as caught:
        read_contract(tmp_path)
    assert caught.value.file == name


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_broken_json_is_named(tmp_path: Path, content: str) -> None:
    """For a file that is not a JSON object."""
    (checkpoint(tmp_path) / "config.json").write_text(content)
    with pytest.raises(ModelFileError) as caught:
        read_contract(tmp_path)
    assert caught.value.file == "config.json"


def test_an_unknown_architecture_may_ship_its_graph(tmp_path: Path) -> None:
    """No encoder is built; everything else is read as usual."""
    checkpoint(tmp_path, config={"model_type": "xlnet"})
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx").write_bytes(b"")
    contract = read_contract(tmp_path)
    assert contract.encoder is None
    assert (contract.dimension, contract.max_tokens) == (HIDDEN, 32)
    assert contract.vocab_size > 0
    assert shipped_graph(tmp_path) == "onnx/model.onnx"


def test_an_unknown_architecture_without_any_length_is_refused(tmp_path: Path) -> None:
    """The maximum input length is not guessed."""
    checkpoint(
        tmp_path, config={"model_type": "new", "max_position_embeddings": None}, sentence={"do_lower_case": False}
    )
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(ModelFileError) as caught:
        read_contract(tmp_path)
    assert caught.value.key == "max_position_embeddings"


def test_a_normalize_of_other_vectors_is_refused(tmp_path: Path) -> None:
    """Version 6 can normalize token vectors too, which no Shoal graph does."""
    checkpoint(tmp_path)
    write_json(tmp_path / "2_Normalize" / "config.json", {"module_input_name": "sentence_embedding"})
    assert read_contract(tmp_path).ends_normalized
    write_json(tmp_path / "2_Normalize" / "config.json", {"module_input_name": "token_embeddings"})
    with pytest.raises(ModelFileError) as caught:
        read_contract(tmp_path)
    assert (caught.value.file, caught.value.key) == ("2_Normalize/config.json", "module_input_name")


def test_a_model_that_runs_elsewhere_may_be_of_any_kind(tmp_path: Path) -> None:
    """Shoal does not build its graph: unknown architectures pass, and missing values stay open."""
    checkpoint(tmp_path)
    write_json(tmp_path / "config.json", {"model_type": "novel", "auto_map": {"AutoModel": "code.py"}})
    with pytest.raises(ModelFileError, match="novel"):
        read_contract(tmp_path)
    contract = read_contract(tmp_path, elsewhere=True)
    assert contract.encoder is None
    assert (contract.dimension, contract.max_tokens) == (HIDDEN, 32)
    for name in ("config.json", "modules.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    contract = read_contract(tmp_path, elsewhere=True)
    assert (contract.dimension, contract.max_tokens, contract.pooling.modes) == (0, 0, ("mean",))


def test_a_remote_models_files_must_still_agree(tmp_path: Path) -> None:
    """A Dense whose input does not match the pooling is refused."""
    checkpoint(tmp_path, after=("Dense",))
    dense(tmp_path, "2_Dense", HIDDEN + 1, 4)
    with pytest.raises(ModelFileError, match="2_Dense/config"):
        read_contract(tmp_path, elsewhere=True)
