"""Every family: the graph agrees with the forward pass in numpy, on every engine, and a wrong graph does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.errors import ModelFileError
from shoal.models.convert.contract import Contract, Encoder, read_contract
from shoal.models.convert.contract.adapters import open_encoder
from shoal.models.convert.contract.architecture import Buckets, Experts, Relative, Rotary
from shoal.models.convert.contract.families.jina import slopes
from shoal.models.convert.contract.weights import open_weights
from shoal.models.convert.convert import convert
from shoal.models.convert.graphs.text import build_text_graph
from shoal.models.convert.reference import embed
from shoal.models.convert.verify import verify
from shoal.types import Array
from tests.unit.models.engines import RUNS
from tests.unit.models.family_checkpoints import FAMILIES, WORDS, family_checkpoint

Change = Callable[[Encoder], Encoder]


def built(folder: Path, tmp_path: Path) -> Any:
    target = tmp_path / "served"
    target.mkdir()
    return convert(folder, target), target


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_graph_agrees_with_numpy(tmp_path: Path, name: str, engine: str) -> None:
    """Texts of several lengths in one padded batch, one longer than the windows."""
    folder = family_checkpoint(tmp_path / "model", name)
    converted, target = built(folder, tmp_path)
    result = verify(folder, converted.contract, target, converted.spec, RUNS[engine](target / converted.graph))
    assert converted.source == "built"
    assert result.passed, result.text
    assert (result.method, result.min_cosine > 0.99999) == ("reference", True)


def shape(**changes: Any) -> Change:
    return lambda encoder: msgspec.structs.replace(encoder, shape=msgspec.structs.replace(encoder.shape, **changes))


def layers(**changes: Any) -> Change:
    return lambda encoder: msgspec.structs.replace(
        encoder, layers=tuple(msgspec.structs.replace(each, **changes) for each in encoder.layers)
    )


def part(name: str, **changes: Any) -> Change:
    def change(encoder: Encoder) -> Encoder:
        parts = [msgspec.structs.replace(getattr(each, name), **changes) for each in encoder.layers]
        replaced = zip(encoder.layers, parts, strict=True)
        return msgspec.structs.replace(
            encoder, layers=tuple(msgspec.structs.replace(each, **{name: new}) for each, new in replaced)
        )

    return change


def norm_offset(encoder: Encoder) -> Encoder:
    return shape(norm=msgspec.structs.replace(encoder.shape.norm, offset=1 - encoder.shape.norm.offset))(encoder)


def fewer_distances(encoder: Encoder) -> Encoder:
    assert isinstance(encoder.distances, Buckets)
    return msgspec.structs.replace(encoder, distances=msgspec.structs.replace(encoder.distances, maximum=10))


def relative(**changes: Any) -> Change:
    def change(encoder: Encoder) -> Encoder:
        assert isinstance(encoder.distances, Relative)
        return msgspec.structs.replace(encoder, distances=msgspec.structs.replace(encoder.distances, **changes))

    return change


def experts(**changes: Any) -> Change:
    def change(encoder: Encoder) -> Encoder:
        made = [
            msgspec.structs.replace(layer, feed_forward=msgspec.structs.replace(layer.feed_forward, **changes))
            if isinstance(layer.feed_forward, Experts)
            else layer
            for layer in encoder.layers
        ]
        return msgspec.structs.replace(encoder, layers=tuple(made))

    return change


def swapped_experts(encoder: Encoder) -> Encoder:
    parts = encoder.layers[1].feed_forward
    assert isinstance(parts, Experts)
    return experts(up=parts.down, down=parts.up)(encoder)


def plain_rotation(encoder: Encoder) -> Encoder:
    """The rotation without the stretched base."""
    return layers(rotary=Rotary(frequencies=(1.0, 500.0**-0.5)))(encoder)


def unscaled_rotation(encoder: Encoder) -> Encoder:
    rotary = encoder.layers[0].rotary
    assert rotary is not None
    return layers(rotary=msgspec.structs.replace(rotary, factor=1.0))(encoder)


def encoder_field(**changes: Any) -> Change:
    return lambda encoder: msgspec.structs.replace(encoder, **changes)


WRONG: dict[str, tuple[str, Change]] = {
    "no window": ("modernbert", layers(window=None)),
    "a window of one token less": ("mistral", layers(window=5)),
    "a window on both sides": ("gemma3", encoder_field(causal=False)),
    "one rotation for all layers": ("modernbert", lambda e: layers(rotary=e.layers[0].rotary)(e)),
    "no rotation": ("qwen3", layers(rotary=None)),
    "rotation by another base": ("qwen2", layers(rotary=Rotary(frequencies=(1.0, 0.5)))),
    "rotation without its factor": ("llama-yarn", unscaled_rotation),
    "the gate's halves swapped": ("modernbert", part("feed_forward", fused="up gate")),
    "up and gate swapped": ("qwen3", part("feed_forward", up="mlp.gate_proj", gate="mlp.up_proj")),
    "no gate": ("t5-gated", part("feed_forward", gate="")),
    "no norm of queries": ("qwen3", part("attention", query_norm="")),
    "later tokens attended": ("qwen3", encoder_field(causal=False)),
    "later tokens not attended": ("embeddinggemma", encoder_field(causal=True)),
    "weights of norms not offset": ("gemma", norm_offset),
    "another scale of scores": ("gemma3", shape(scale=8**-0.5)),
    "another activation": ("gemma", shape(activation="silu")),
    "no last norm": ("llama3", encoder_field(final_norm="")),
    "no norm of the attention's result": ("gemma3", part("norms", attention="")),
    "other buckets": ("t5", fewer_distances),
    "gate and up of Nomic swapped": ("nomic", part("feed_forward", up="mlp.fc12", gate="mlp.fc11")),
    "another base": ("nomic-of-transformers", layers(rotary=Rotary(frequencies=(1.0, 0.1)))),
    "one expert of two": ("nomic-experts", experts(top=1)),
    "matrices of experts swapped": ("nomic-experts", swapped_experts),
    "the gate of GTE first": ("gte", part("feed_forward", fused="gate up")),
    "no stretched base": ("gte-published", plain_rotation),
    "no norm of the positions": ("deberta", relative(norm="")),
    "no keys that attend to positions": ("deberta", relative(query="")),
    "no queries that attend to positions": ("deberta", relative(key="")),
    "maps of positions swapped": (
        "deberta-own-maps",
        relative(key="attention.self.pos_query_proj", query="attention.self.pos_key_proj"),
    ),
    "each distance its own position": ("deberta", relative(buckets=0)),
    "positions of another range": ("deberta", relative(maximum=20)),
    "scores of positions not counted in the scale": ("deberta", shape(scale=0.5)),
    "no penalties": ("jina-v2", encoder_field(distances=None)),
    "a gate of another activation": ("jina-v2-code", shape(activation="gelu")),
    "the residual once": ("jina-v2-code", part("norms", summed_attention="")),
    "norms of queries left out": ("jina-v2-code", part("attention", query_norm="", key_norm="")),
    "positions not rotated": ("jina-v3", layers(rotary=None)),
    "fewer layers": ("albert", lambda e: encoder_field(layers=e.layers[:-1])(e)),
}
"""A family each, and a mistake in its graph."""


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_graph_is_found(tmp_path: Path, mistake: str) -> None:
    """The verification fails for the graph of a description that differs in one point from the model's."""
    name, change = WRONG[mistake]
    folder = family_checkpoint(tmp_path / "model", name)
    converted, target = built(folder, tmp_path)
    contract: Contract = converted.contract
    assert contract.encoder is not None
    wrong = msgspec.structs.replace(contract, encoder=change(contract.encoder))
    build_text_graph(folder, wrong, target / converted.graph)
    run = RUNS["onnxruntime"](target / converted.graph)
    assert not verify(folder, contract, target, converted.spec, run).passed


@pytest.mark.parametrize("name", ["qwen3", "modernbert", "albert"])
def test_names_may_have_the_prefix_of_a_model_with_a_head(tmp_path: Path, name: str) -> None:
    folder = family_checkpoint(tmp_path / "model", name, prefix={"albert": "albert."}.get(name, "model."))
    converted, target = built(folder, tmp_path)
    run = RUNS["onnxruntime"](target / converted.graph)
    assert verify(folder, converted.contract, target, converted.spec, run).passed


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"n_positions": 40, "max_trained_positions": 20}, 40),
        ({"n_positions": 40, "max_trained_positions": 20, "rotary_scaling_factor": 2}, 20),
        ({"max_position_embeddings": 20, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0}}, 20),
    ],
)
def test_inputs_end_where_positions_depend_on_the_batch(tmp_path: Path, changes: dict[str, Any], tokens: int) -> None:
    assert read_contract(family_checkpoint(tmp_path, "nomic", **changes)).max_tokens == tokens


@pytest.mark.parametrize("engine", RUNS)
def test_experts_without_a_token(tmp_path: Path, engine: str) -> None:
    """A single token leaves three of five experts idle."""
    folder = family_checkpoint(tmp_path / "model", "nomic-experts")
    converted, target = built(folder, tmp_path)
    assert converted.contract.encoder is not None
    run, token = RUNS[engine](target / converted.graph), np.array([[7]])
    got = run({"input_ids": token, "attention_mask": np.ones_like(token)}, converted.spec.outputs)
    expected = embed(folder, converted.contract, converted.contract.encoder, [token[0]])
    assert np.allclose(got["sentence_embedding"], expected.sentence, atol=1e-5)


def test_penalties_of_heads_that_are_not_a_power_of_two() -> None:
    """Four heads have 2^-2 to 2^-8, eight 2^-1 to 2^-8: six have those of four, and the first and third of eight."""
    assert slopes(6) == pytest.approx([2.0**-n for n in (2, 4, 6, 8, 1, 3)])
    assert slopes(8) == pytest.approx([2.0**-n for n in range(1, 9)])


@pytest.mark.parametrize(("name", "accepted"), [("jina-v3", True), ("nomic", False)])
def test_the_transformer_that_comes_with_jina_v3_is_a_plain_one(tmp_path: Path, name: str, accepted: bool) -> None:
    folder = family_checkpoint(tmp_path, name)
    listed = msgspec.json.decode((folder / "modules.json").read_bytes())
    listed[0] |= {"type": "custom_st.Transformer", "kwargs": ["task"]}
    (folder / "modules.json").write_bytes(msgspec.json.encode(listed))
    if accepted:
        assert read_contract(folder).dimension == 16
        return
    with pytest.raises(ModelFileError, match=r"^modules.json: \[0\].type: 'custom_st.Transformer' is custom code"):
        read_contract(folder)


def with_task(folder: Path, task: str) -> Path:
    arguments = {"max_seq_length": 48, "do_lower_case": False, "model_args": {"default_task": task}}
    (folder / "sentence_bert_config.json").write_bytes(msgspec.json.encode(arguments))
    return folder


def test_a_task_changes_every_matrix(tmp_path: Path) -> None:
    """By the product of its two, times alpha / rank."""
    folder = with_task(family_checkpoint(tmp_path, "jina-v3"), "text-matching")
    stored, opened = open_weights(folder), open_encoder(folder, "", read_contract(folder).encoder)
    for name, shape, letters in (
        ("embeddings.word_embeddings", (WORDS, 16), "AB"),
        ("embeddings.token_type_embeddings", (1, 16), "AB"),
        ("encoder.layers.1.mixer.Wqkv", (48, 16), "BA"),
    ):
        place = f"{name}.parametrizations.weight"
        sizes = (2, shape[0], 2), (2, 2, shape[1])
        tall, wide = (stored.get(f"{place}.0.lora_{part}", size)[1] for part, size in zip(letters, sizes, strict=True))
        expected = stored.get(f"{place}.original", shape) + 1.5 * tall @ wide
        assert np.allclose(opened.get(f"{name}.weight", shape), expected, atol=1e-5)
        assert np.allclose(opened.rows(f"{name}.weight", shape, np.array([0])), expected[:1], atol=1e-5)


@pytest.mark.parametrize("engine", RUNS)
def test_each_row_has_a_task_of_its_own(tmp_path: Path, engine: str) -> None:
    """A batch with all tasks and none equals the forward pass with each task's weights; wrong ones are noticed."""
    folder = with_task(family_checkpoint(tmp_path / "model", "jina-v3"), "text-matching")
    converted, target = built(folder, tmp_path)
    run, spec, contract = RUNS[engine](target / converted.graph), converted.spec, converted.contract
    assert (spec.embedding_tasks, spec.default_embedding_task) == (
        ("retrieval.query", "text-matching"),
        "text-matching",
    )
    assert spec.prompts == {"retrieval.query": "", "text-matching": ""}
    assert verify(folder, contract, target, spec, run).passed

    def other_task(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        return run(inputs | {"adapter_ids": np.maximum(inputs["adapter_ids"], 1)}, outputs)

    assert not verify(folder, contract, target, spec, other_task).passed
    assert contract.encoder is not None
    assert contract.encoder.adapters is not None
    adapters = msgspec.structs.replace(contract.encoder.adapters, scale=1.0)
    scaled = msgspec.structs.replace(contract, encoder=msgspec.structs.replace(contract.encoder, adapters=adapters))
    assert not verify(folder, scaled, target, spec, run).passed


def test_tasks_have_the_prompts_of_the_files(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, "jina-v3")
    prompts = {"retrieval.query": "Find: ", "other": "Say: "}
    (folder / "config_sentence_transformers.json").write_bytes(msgspec.json.encode({"prompts": prompts}))
    assert read_contract(folder).prompts == {**prompts, "text-matching": ""}


@pytest.mark.parametrize("name", ["jina-v3", "nomic"])
def test_an_unknown_task_is_refused(tmp_path: Path, name: str) -> None:
    folder = with_task(family_checkpoint(tmp_path, name), "cooking")
    with pytest.raises(ModelFileError, match=r"^sentence_bert_config.json: model_args.default_task: unknown task"):
        read_contract(folder)


def test_no_more_positions_than_the_model_reads(tmp_path: Path) -> None:
    """Tables of rotations end at max_seq_length: a language model states 131,072 positions."""
    contract = read_contract(family_checkpoint(tmp_path, "qwen3", max_position_embeddings=131_072))
    assert contract.encoder is not None
    assert (contract.max_tokens, contract.encoder.max_positions) == (48, 48)


@pytest.mark.parametrize("architecture", ["NomicVisionModel", "JinaVLForRanking", "JinaForRanking"])
def test_relatives_that_are_not_built_are_refused_with_another_model(tmp_path: Path, architecture: str) -> None:
    folder = family_checkpoint(tmp_path, "nomic", auto_map={"AutoModel": f"modeling.{architecture}"})
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    (folder / "config.json").write_bytes(msgspec.json.encode(config | {"architectures": [architecture]}))
    with pytest.raises(ModelFileError, match=rf"^config.json: architectures: '{architecture}' .* does not build; use "):
        read_contract(folder)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2", {"auto_map": {"AutoModel": "modeling.Model"}}, "is_causal"),
    ("qwen3", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("qwen3", {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type"),
    ("qwen3-windows", {"layer_types": ["full_attention"]}, "layer_types"),
    ("llama-yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "rope_scaling.mscale"),
    ("modernbert", {"auto_map": {}}, "auto_map"),
    ("modernbert", {"hidden_activation": "swoosh"}, "hidden_activation"),
    ("modernbert", {"num_attention_heads": 3}, "num_attention_heads"),
    ("modernbert", {"layer_types": ["near"] * 3}, "layer_types"),
    ("t5", {"feed_forward_proj": "gated-swoosh"}, "feed_forward_proj"),
    ("t5", {"quantization_config": {}}, "quantization_config"),
    ("albert", {"num_hidden_groups": 9}, "num_hidden_groups"),
    ("albert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ("nomic", {"prenorm": True}, "prenorm"),
    ("nomic", {"rotary_emb_interleaved": True}, "rotary_emb_interleaved"),
    ("nomic", {"rotary_emb_fraction": 0.0}, "rotary_emb_fraction"),
    ("nomic", {"n_head": 3}, "n_head"),
    ("nomic", {"activation_function": "swoosh"}, "activation_function"),
    ("nomic-experts", {"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights"),
    ("nomic-experts", {"num_shared_experts": 1}, "num_shared_experts"),
    ("nomic-experts", {"moe_top_k": 6}, "moe_top_k"),
    ("nomic-experts", {"activation_function": "swiglu"}, "activation_function"),
    ("gte", {"logn_attention_scale": True}, "logn_attention_scale"),
    ("gte", {"position_embedding_type": "absolute"}, "position_embedding_type"),
    ("gte", {"layer_norm_type": "rms_norm"}, "layer_norm_type"),
    ("gte-published", {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}, "rope_scaling.mixed_b"),
    ("deberta", {"conv_kernel_size": 3}, "conv_kernel_size"),
    ("deberta", {"relative_attention": False}, "relative_attention"),
    ("deberta", {"pos_att_type": "p2c|p2p"}, "pos_att_type"),
    ("deberta", {"attention_head_size": 8}, "attention_head_size"),
    ("deberta", {"auto_map": {}}, "auto_map"),
    ("jina-v2", {"feed_forward_type": "original"}, "feed_forward_type"),
    ("jina-v2", {"architectures": ["BertModel"]}, "architectures"),
    ("jina-v3", {"emb_pooler": "cls"}, "emb_pooler"),
    ("gemma", {"pad_token_id": 100_000}, "pad_token_id"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("llama3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("llama3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("qwen3", {"rope_theta": 10**400}, "rope_theta"),
    ("qwen3", {"rope_theta": 1.0}, "rope_scaling.rope_theta"),
    ("qwen3", {"head_dim": 2**50}, "head_dim"),
    ("qwen3", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("albert", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("albert", {"inner_group_num": 10**9}, "inner_group_num"),
    ("jina-v2", {"num_attention_heads": 10**9, "hidden_size": 10**9}, "num_attention_heads"),
    ("deberta", {"position_buckets": 1}, "position_buckets"),
    ("t5", {"relative_attention_max_distance": 1}, "relative_attention_max_distance"),
    ("nomic", {"parallel_block": True}, "parallel_block"),
]


@pytest.mark.parametrize(("name", "changes", "key"), REFUSED)
def test_what_is_not_built_is_refused_by_key(tmp_path: Path, name: str, changes: dict[str, Any], key: str) -> None:
    folder = family_checkpoint(tmp_path, name)
    config = FAMILIES[name] | changes
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    with pytest.raises(ModelFileError, match=rf"^config.json: {key.replace('.', '[.]')}: "):
        read_contract(folder)


def test_a_bias_that_the_configuration_denies(tmp_path: Path) -> None:
    """Its weights would be left out, in the graph and in numpy alike."""
    folder = family_checkpoint(tmp_path / "model", "llama3", mlp_bias=True)
    converted, target = built(folder, tmp_path)
    run = RUNS["onnxruntime"](target / converted.graph)
    assert verify(folder, converted.contract, target, converted.spec, run).passed
    (folder / "config.json").write_bytes(msgspec.json.encode(FAMILIES["llama3"]))
    with pytest.raises(ModelFileError, match="the configuration says that there is none"):
        build_text_graph(folder, read_contract(folder), tmp_path / "model.onnx")


def test_tables_are_bounded(tmp_path: Path) -> None:
    """They grow with the longest input, not with the weights."""
    folder = family_checkpoint(tmp_path, "t5", n_positions=2**36)
    encoder = read_contract(folder).encoder
    assert encoder is not None
    wide = msgspec.structs.replace(encoder, max_positions=2**36)
    contract = msgspec.structs.replace(read_contract(folder), encoder=wide)
    with pytest.raises(ModelFileError, match="need tables"):
        build_text_graph(folder, contract, tmp_path / "model.onnx")


@pytest.mark.parametrize(("changes", "windows"), [({"sliding_window": None}, {None}), ({}, {6})])
def test_windows_of_mistral(tmp_path: Path, changes: dict[str, Any], windows: set[int | None]) -> None:
    """One for all layers, or none; other keys do not matter."""
    folder = family_checkpoint(tmp_path, "mistral", max_window_layers=2, **changes)
    encoder = read_contract(folder).encoder
    assert encoder is not None
    assert {layer.window for layer in encoder.layers} == windows
