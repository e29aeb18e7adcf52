"""SPLADE models and bge-m3's heads, as described by their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from shoal.errors import ModelFileError
from shoal.models.convert.contract import read_contract
from shoal.models.convert.contract.types import Splade
from shoal.specs import MultiSpec, SparseSpec
from tests.unit.models.checkpoints import HIDDEN, ST, checkpoint, vocabulary, write_json
from tests.unit.models.head_checkpoints import WIDTH, edit, m3, masked, modules, normal, splade

SIZE = len(vocabulary("bert"))


def refused(folder: Path) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        read_contract(folder)
    return caught.value


def test_a_sparse_encoder(tmp_path: Path) -> None:
    """It has no dense vector, and its default similarity is the dot product."""
    contract = read_contract(splade(tmp_path))
    assert contract.splade == Splade(strategy="max", activation="relu", tied=True)
    assert contract.sparse == SparseSpec()
    assert (contract.dimension, contract.max_tokens, contract.similarity) == (0, 30, "dot")
    assert contract.prompts == {"query": ""}


def test_its_pooling(tmp_path: Path) -> None:
    """Sum, double logarithm, and a separate last layer."""
    settings = {"pooling_strategy": "sum", "activation_function": "log1p_relu", "embedding_dimension": SIZE}
    folder = splade(tmp_path, pooling=settings | {"chunk_size": 4})
    edit(folder / "config.json", tie_word_embeddings=False)
    assert read_contract(folder).splade == Splade(strategy="sum", activation="log1p_relu", tied=False)


def test_a_transformer_for_fill_mask(tmp_path: Path) -> None:
    """As saved by sentence-transformers 6; without the task it has no logits to pool."""
    folder = splade(tmp_path)
    modules(folder, (f"{ST}Transformer", ""), (f"{ST}SpladePooling", "1_SpladePooling"))
    error = refused(folder)
    assert (error.file, error.key) == ("sentence_bert_config.json", "transformer_task")
    task = {"text": {"method": "forward", "method_output_name": "logits"}}
    edit(folder / "sentence_bert_config.json", transformer_task="fill-mask", modality_config=task)
    assert read_contract(folder).splade is not None


@pytest.mark.parametrize(
    ("name", "change", "key"),
    [
        ("1_SpladePooling/config.json", {"pooling_strategy": "mean"}, "pooling_strategy"),
        ("1_SpladePooling/config.json", {"activation_function": "gelu"}, "activation_function"),
        ("1_SpladePooling/config.json", {"word_embedding_dimension": 5}, "word_embedding_dimension"),
        ("1_SpladePooling/config.json", {"novelty": 5}, "novelty"),
        ("config_sentence_transformers.json", {"max_active_dims": 64}, "max_active_dims"),
        ("config_sentence_transformers.json", {"model_type": "CrossEncoders"}, "model_type"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "maxsim"}, "similarity_fn_name"),
        ("sentence_bert_config.json", {"transformer_task": "feature-extraction"}, "transformer_task"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, name: str, change: dict[str, Any], key: str) -> None:
    """Settings that change the weights, by file and key."""
    folder = splade(tmp_path)
    edit(folder / name, **change)
    error = refused(folder)
    assert (error.file, error.key) == (name, key)


@pytest.mark.parametrize(
    ("kinds", "key"),
    [
        (("MLMTransformer",), "[1].type"),
        (("MLMTransformer", "Pooling"), "[1].type"),
        (("MLMTransformer", "SpladePooling", "Normalize"), "[2].type"),
        (("SpladePooling",), "[0].type"),
    ],
)
def test_module_lists_that_are_refused(tmp_path: Path, kinds: tuple[str, ...], key: str) -> None:
    """Only a masked language model and its pooling are supported."""
    folder = splade(tmp_path)
    modules(folder, *((ST + kind, "1_SpladePooling" if i else "") for i, kind in enumerate(kinds)))
    error = refused(folder)
    assert (error.file, error.key) == ("modules.json", key)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("config.json", {"_name_or_path": "naver/splade-v3"}),
        ("tokenizer_config.json", {"name_or_path": "prithivida/Splade_PP_en_v1"}),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}),
    ],
)
def test_a_plain_masked_model_that_is_called_splade(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    """Without modules.json, only its files show that it is not a plain encoder."""
    folder = masked(tmp_path)
    assert read_contract(folder).dimension == HIDDEN
    if (folder / name).is_file():
        edit(folder / name, **fields)
    else:
        write_json(folder / name, fields)
    assert read_contract(folder).splade == Splade()


def test_an_encoder_of_that_name_is_none(tmp_path: Path) -> None:
    """A plain encoder has no logits, whatever its name."""
    folder = checkpoint(tmp_path, pooling=None, config={"_name_or_path": "splade", "architectures": ["BertModel"]})
    assert read_contract(folder).splade is None


def test_bge_m3(tmp_path: Path) -> None:
    """Both heads next to the dense vector; special tokens have no weight, the first token no vector."""
    folder = m3(tmp_path)
    write_json(folder / "special_tokens_map.json", {"cls_token": "<s>", "pad_token": {"content": "<pad>"}})
    contract = read_contract(folder)
    words = vocabulary("xlm-roberta")
    assert contract.dimension == HIDDEN
    assert contract.sparse == SparseSpec(
        output="token_weights", per="token", skipped=tuple(sorted((words["<s>"], words["<pad>"])))
    )
    assert contract.late is not None
    assert contract.late.spec == MultiSpec(dimension=WIDTH, drop_first=True)


def test_bge_m3_without_a_word_on_its_special_tokens(tmp_path: Path) -> None:
    """The defaults are those of XLM-R."""
    head = read_contract(m3(tmp_path, multi=False)).token_weights
    words = vocabulary("xlm-roberta")
    assert head is not None
    assert head.skipped == tuple(sorted(words[token] for token in ("<s>", "</s>", "<pad>", "<unk>")))


@pytest.mark.parametrize(("sparse", "multi"), [(True, False), (False, True), (False, False)])
def test_each_head_is_there_or_not(tmp_path: Path, sparse: bool, multi: bool) -> None:
    """The heads are independent."""
    contract = read_contract(m3(tmp_path, sparse=sparse, multi=multi))
    assert (contract.token_weights is not None, contract.late is not None) == (sparse, multi)


@pytest.mark.parametrize(
    ("name", "shape", "key"),
    [
        ("sparse_linear.safetensors", (2, HIDDEN), "weight"),
        ("sparse_linear.safetensors", (1, HIDDEN + 1), "weight"),
        ("colbert_linear.safetensors", (WIDTH, HIDDEN + 1), "weight"),
        ("colbert_linear.safetensors", (HIDDEN,), "weight"),
    ],
)
def test_heads_that_do_not_fit(tmp_path: Path, name: str, shape: tuple[int, ...], key: str) -> None:
    """The error names file and tensor."""
    folder = m3(tmp_path)
    save_file({"weight": normal(*shape)}, folder / name)
    error = refused(folder)
    assert (error.file, error.key) == (name, key)


def test_elsewhere_heads_are_not_read(tmp_path: Path) -> None:
    """The outputs of a remote graph are fixed."""
    contract = read_contract(m3(tmp_path), elsewhere=True)
    assert contract.token_weights is None and contract.late is None
