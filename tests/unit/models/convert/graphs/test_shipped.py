"""Graphs that come with the model: classified by their outputs, completed, never pooled twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from shoal.errors import ModelFileError
from shoal.models.convert.contract import Contract, read_contract
from shoal.models.convert.graphs import builder
from shoal.models.convert.graphs.shipped import ShippedGraph, adapt_shipped_graph
from shoal.types import Array
from tests.unit.models.checkpoints import HIDDEN, MEAN, checkpoint, dense, layer_norm, vocabulary
from tests.unit.models.engines import RUNS, onnxruntime_run
from tests.unit.models.head_checkpoints import edit

NAME = "onnx/model.onnx"
TABLE = np.random.default_rng(3).standard_normal((len(vocabulary("bert")), HIDDEN)).astype(np.float32)
IDS = np.array([[2, 7, 8, 3, 0, 0], [2, 9, 10, 11, 12, 3]])
MASK = (IDS > 0).astype(np.int64)
DYNAMIC = ("b", "l")


def ship(
    folder: Path,
    *,
    inputs: Sequence[tuple[str, int, Sequence[str | int]]] = (
        ("input_ids", TensorProto.INT64, DYNAMIC),
        ("attention_mask", TensorProto.INT64, DYNAMIC),
    ),
    outputs: Sequence[str] = ("last_hidden_state",),
    opset: int = 14,
    half: bool = False,
    external: bool = False,
) -> None:
    """A graph that looks each token up; `sentence_embedding` is the normalized mean, whatever the modules."""
    kind = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    table = TABLE.astype(np.float16 if half else np.float32)
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["tokens"])]
    for name, _, _ in inputs[2:]:  # a graph that reads its further inputs: each adds its own value to all tokens
        nodes.append(helper.make_node("Cast", [name], [f"{name}_f"], to=kind))
        nodes.append(helper.make_node("Unsqueeze", [f"{name}_f", "minus_one"], [f"{name}_u"]))
        nodes.append(helper.make_node("Add", [nodes_output(nodes, "tokens"), f"{name}_u"], [f"tokens_{name}"]))
    last = nodes_output(nodes, "tokens")
    values = []
    for name in outputs:
        if name in ("last_hidden_state", "token_embeddings", "other"):
            nodes.append(helper.make_node("Identity", [last], [name]))
            values.append(helper.make_tensor_value_info(name, kind, ["b", "l", HIDDEN]))
        else:
            nodes.append(helper.make_node("Cast", ["attention_mask"], [f"{name}_m"], to=kind))
            nodes.append(helper.make_node("Unsqueeze", [f"{name}_m", "minus_one"], [f"{name}_mask"]))
            nodes.append(helper.make_node("Mul", [last, f"{name}_mask"], [f"{name}_kept"]))
            nodes.append(helper.make_node("ReduceSum", [f"{name}_kept", "one"], [f"{name}_sum"], keepdims=0))
            nodes.append(helper.make_node("LpNormalization", [f"{name}_sum"], [name], axis=-1, p=2))
            values.append(helper.make_tensor_value_info(name, kind, ["b", HIDDEN]))
    constants = [
        numpy_helper.from_array(table, "table"),
        numpy_helper.from_array(np.array([-1]), "minus_one"),
        numpy_helper.from_array(np.array([1]), "one"),
    ]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info(*port) for port in inputs], values, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    (folder / "onnx").mkdir(exist_ok=True)
    if external:
        onnx.save(model, folder / NAME, save_as_external_data=True, location="model.onnx_data", size_threshold=100)
    else:
        onnx.save(model, folder / NAME)


def nodes_output(nodes: list[Any], stem: str) -> str:
    return str(next(node.output[0] for node in reversed(nodes) if node.output[0].startswith(stem)))


def take(folder: Path) -> tuple[Contract, ShippedGraph, Path]:
    contract = read_contract(folder)
    (folder / "out").mkdir(exist_ok=True)
    target = folder / "out" / "model.onnx"
    return contract, adapt_shipped_graph(folder, NAME, contract, target), target


def mean(ids: Array, mask: Array) -> Array:
    weights = mask[..., None].astype(np.float32)
    pooled: Array = (TABLE[ids] * weights).sum(1) / weights.sum(1)
    return pooled


def unit(rows: Array) -> Array:
    scaled: Array = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return scaled


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("opset", [12, 13, 14, 17, 18, 20])
def test_token_vectors_are_pooled(tmp_path: Path, opset: int, engine: str) -> None:
    """A token-level graph of any opset gets the model's pooling and Normalize; the source file stays unchanged."""
    folder = checkpoint(tmp_path)
    ship(folder, opset=opset)
    before = (folder / NAME).read_bytes()
    _, taken, target = take(folder)
    inputs, outputs = ("input_ids", "attention_mask"), ("sentence_embedding", "pooled", "token_embeddings")
    assert taken == ShippedGraph(inputs, "pooled", "token_embeddings", "token-level", TABLE.size, ())
    got = RUNS[engine](target)({"input_ids": IDS, "attention_mask": MASK}, outputs)
    assert np.array_equal(got["token_embeddings"], TABLE[IDS])
    assert np.abs(got["pooled"] - mean(IDS, MASK)).max() < 1e-5
    assert np.abs(got["sentence_embedding"] - unit(mean(IDS, MASK))).max() < 1e-6
    assert (folder / NAME).read_bytes() == before


@pytest.mark.parametrize("opset", [12, 14, 17, 20])
def test_modules_are_appended_in_any_opset(tmp_path: Path, opset: int) -> None:
    """Pooling modes, GELU and layer norm have other forms in old opsets but equal results."""
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode": ["max", "cls", "lasttoken", "weightedmean"]}
    folder = checkpoint(tmp_path, pooling=pooling, after=("Dense", "LayerNorm"))
    dense(folder, "2_Dense", 4 * HIDDEN, 8, activation="GELU")
    layer_norm(folder, "3_LayerNorm", 8)
    ship(folder, opset=20)
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    expected = onnxruntime_run(take(folder)[2])(inputs, ("pooled",))["pooled"]
    ship(folder, opset=opset)
    got = onnxruntime_run(take(folder)[2])(inputs, ("pooled",))["pooled"]
    assert got.shape == (2, 8)
    assert np.abs(got - expected).max() < 1e-5


def test_a_pooled_graph_is_not_pooled_again(tmp_path: Path) -> None:
    """Its sentence_embedding is used; it has only normalized vectors."""
    folder = checkpoint(tmp_path)
    ship(folder, outputs=("sentence_embedding",))
    _, taken, target = take(folder)
    assert (taken.kind, taken.pooled, taken.tokens) == ("pooled", "sentence_embedding", "")
    got = onnxruntime_run(target)({"input_ids": IDS, "attention_mask": MASK}, ("sentence_embedding",))
    assert np.abs(got["sentence_embedding"] - unit(mean(IDS, MASK))).max() < 1e-6


def test_a_pooled_graph_with_token_vectors_also_gives_raw_vectors(tmp_path: Path) -> None:
    """The vector before Normalize is computed from the token vectors, next to the graph's own pooling."""
    folder = checkpoint(tmp_path)
    ship(folder, outputs=("token_embeddings", "sentence_embedding"))
    _, taken, target = take(folder)
    assert (taken.kind, taken.pooled, taken.tokens) == ("pooled", "pooled", "token_embeddings")
    got = onnxruntime_run(target)({"input_ids": IDS, "attention_mask": MASK}, ("sentence_embedding", "pooled"))
    assert np.abs(got["pooled"] - mean(IDS, MASK)).max() < 1e-5
    assert np.abs(got["sentence_embedding"] - unit(mean(IDS, MASK))).max() < 1e-6
    names = ["sentence_embedding", "pooled", "token_embeddings"]
    assert [port.name for port in onnx.load(target).graph.output] == names


def test_a_pooled_graph_of_a_model_without_normalize(tmp_path: Path) -> None:
    """Both outputs are the same."""
    folder = checkpoint(tmp_path, after=())
    ship(folder, outputs=("token_embeddings", "sentence_embedding"))
    taken = take(folder)[1]
    assert (taken.pooled, taken.tokens) == ("sentence_embedding", "token_embeddings")


def test_the_only_output_with_two_axes_is_the_embedding(tmp_path: Path) -> None:
    """Whatever its name."""
    folder = checkpoint(tmp_path)
    ship(folder, outputs=("embedding",))
    got = onnxruntime_run(take(folder)[2])({"input_ids": IDS, "attention_mask": MASK}, ("sentence_embedding",))
    assert np.abs(got["sentence_embedding"] - unit(mean(IDS, MASK))).max() < 1e-6


@pytest.mark.parametrize("outputs", [("last_hidden_state",), ("sentence_embedding",)])
def test_half_precision_outputs_become_float32(tmp_path: Path, outputs: tuple[str, ...]) -> None:
    """Vectors leave every graph as float32."""
    folder = checkpoint(tmp_path)
    ship(folder, outputs=outputs, half=True)
    got = onnxruntime_run(take(folder)[2])({"input_ids": IDS, "attention_mask": MASK}, ("sentence_embedding",))
    assert got["sentence_embedding"].dtype == np.float32
    assert np.abs(got["sentence_embedding"] - unit(mean(IDS, MASK))).max() < 2e-3


@pytest.mark.parametrize("name", ["token_type_ids", "input_type"])
def test_segment_inputs_have_one_name(tmp_path: Path, name: str) -> None:
    """Both spellings become token_type_ids."""
    folder = checkpoint(tmp_path)
    ports = [(port, TensorProto.INT64, DYNAMIC) for port in ("input_ids", "attention_mask", name)]
    ship(folder, inputs=ports)
    _, taken, target = take(folder)
    assert taken.inputs == ("input_ids", "attention_mask", "token_type_ids")
    inputs = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": np.ones_like(IDS)}
    got = onnxruntime_run(target)(inputs, ("pooled",))["pooled"]
    assert np.abs(got - mean(IDS, MASK) - 1).max() < 1e-5


def test_int32_inputs_are_fed_int64(tmp_path: Path) -> None:
    """A Cast converts them to the graph's integer type."""
    folder = checkpoint(tmp_path)
    ship(folder, inputs=[(name, TensorProto.INT32, DYNAMIC) for name in ("input_ids", "attention_mask")])
    got = onnxruntime_run(take(folder)[2])({"input_ids": IDS, "attention_mask": MASK}, ("pooled",))["pooled"]
    assert np.abs(got - mean(IDS, MASK)).max() < 1e-5


def test_weights_in_a_file_of_their_own_are_copied(tmp_path: Path) -> None:
    """model.onnx_data travels with its graph."""
    folder = checkpoint(tmp_path)
    ship(folder, external=True)
    _, taken, target = take(folder)
    assert taken.data == ("model.onnx_data",)
    got = onnxruntime_run(target)({"input_ids": IDS, "attention_mask": MASK}, ("pooled",))["pooled"]
    assert np.abs(got - mean(IDS, MASK)).max() < 1e-5


def test_large_weights_move_to_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that engines map them; small constants stay in the graph."""
    folder = checkpoint(tmp_path)
    ship(folder)
    expected = take(folder)[1]
    monkeypatch.setattr(builder, "INLINE_BYTES", 100)
    monkeypatch.setattr(builder, "ALIGN", 64)
    _, taken, target = take(folder)
    assert taken == expected._replace(data=("model.onnx_data",))
    assert target.with_name("model.onnx_data").stat().st_size == TABLE.nbytes
    got = onnxruntime_run(target)({"input_ids": IDS, "attention_mask": MASK}, ("pooled",))["pooled"]
    assert np.abs(got - mean(IDS, MASK)).max() < 1e-5


@pytest.mark.parametrize("location", ["../other", "deeper/other", "tokenizer.json", "gone"])
def test_weights_elsewhere_or_missing_are_refused(tmp_path: Path, location: str) -> None:
    """A graph may name files next to it, except files that belong to another part of the served model."""
    folder = checkpoint(tmp_path)
    ship(folder, external=True)
    model = onnx.load(folder / NAME, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = location
    (folder / NAME).write_bytes(model.SerializeToString())
    with pytest.raises(ModelFileError) as caught:
        take(folder)
    assert caught.value.file == NAME


def test_prompts_left_out_need_token_vectors(tmp_path: Path) -> None:
    """If include_prompt is false, the graph's own pooling is replaced or the graph is refused."""
    folder = checkpoint(tmp_path, pooling=MEAN | {"include_prompt": False})
    ship(folder, outputs=("token_embeddings", "sentence_embedding"))
    _, taken, target = take(folder)
    assert (taken.kind, taken.inputs[-1]) == ("token-level", "pooling_mask")
    mask = MASK * np.array([[0, 0, 1, 1, 1, 1]])
    inputs = {"input_ids": IDS, "attention_mask": MASK, "pooling_mask": mask}
    got = onnxruntime_run(target)(inputs, ("sentence_embedding",))["sentence_embedding"]
    assert np.abs(got - unit(mean(IDS, mask))).max() < 1e-6
    ship(folder, outputs=("sentence_embedding",))
    with pytest.raises(ModelFileError, match="cannot exclude prompts"):
        take(folder)


IDS_PORT = ("input_ids", TensorProto.INT64, DYNAMIC)
MASK_PORT = ("attention_mask", TensorProto.INT64, DYNAMIC)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"inputs": [IDS_PORT, MASK_PORT, ("pixel_values", TensorProto.FLOAT, DYNAMIC)]}, "pixel_values"),
        ({"inputs": [IDS_PORT, ("attention_mask", TensorProto.FLOAT, DYNAMIC)]}, "attention_mask"),
        ({"inputs": [("input_ids", TensorProto.INT64, (1, 128)), MASK_PORT]}, "input_ids"),
        ({"inputs": [IDS_PORT]}, "attention_mask"),
        ({"outputs": ("other",)}, "outputs"),
        ({"outputs": ("logits",)}, "outputs"),
        ({"outputs": ("embedding", "pooler_output")}, "outputs"),
        ({"opset": 11}, None),
    ],
)
def test_graphs_that_are_refused(tmp_path: Path, change: dict[str, Any], key: str | None) -> None:
    """Inputs and outputs that no text embedding model has, fixed shapes, and very old opsets."""
    folder = checkpoint(tmp_path)
    ship(folder, **change)
    with pytest.raises(ModelFileError) as caught:
        take(folder)
    assert (caught.value.file, caught.value.key) == (NAME, key)


POSITIONS_PORT = ("position_ids", TensorProto.INT64, DYNAMIC)


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize(("kind", "first"), [("bert", 0), ("roberta", 2)])
def test_positions_start_where_the_family_starts(tmp_path: Path, kind: str, first: int, engine: str) -> None:
    """Pipelines feed 0, 1, 2; RoBERTa's positions start after the padding id. This graph adds them to its vectors."""
    folder = checkpoint(tmp_path, kind, after=())
    ship(folder, inputs=[IDS_PORT, MASK_PORT, POSITIONS_PORT])
    _, taken, target = take(folder)
    assert taken.inputs[-1] == "position_ids"
    positions = np.broadcast_to(np.arange(6), IDS.shape)
    feeds = {"input_ids": IDS, "attention_mask": MASK, "position_ids": positions}
    got = RUNS[engine](target)(feeds, ("token_embeddings",))["token_embeddings"]
    assert np.abs(got - (TABLE[IDS] + positions[..., None] + first)).max() < 1e-5


def test_positions_of_unknown_architectures(tmp_path: Path) -> None:
    """Rotary positions are relative; others may start anywhere."""
    folder = decoder(tmp_path)
    assert "position_ids" in take(folder)[1].inputs
    edit(folder / "config.json", rope_theta=None)
    edit(folder / "config.json", rope_parameters={"rope_theta": 1e6})
    assert "position_ids" in take(folder)[1].inputs
    (folder / "config.json").write_text('{"model_type": "novel", "hidden_size": 16, "max_position_embeddings": 40}')
    with pytest.raises(ModelFileError, match="may not start at 0; use a graph without this input") as caught:
        take(folder)
    assert caught.value.key == "position_ids"


def decoder(
    folder: Path, *, cache: Sequence[str | int] = ("b", 2, "past", 4), half: bool = False, branch: bool = False
) -> Path:
    """A decoder's graph as optimum exports it: positions, a cache in and out. It adds the cache's length, which is
    nothing, and the sum of its first keys to every token."""
    checkpoint(folder, after=())
    (folder / "config.json").write_text(
        '{"model_type": "novel", "hidden_size": 16, "max_position_embeddings": 40, "rope_theta": 1000000.0}'
    )
    ship(folder, inputs=[IDS_PORT, MASK_PORT, POSITIONS_PORT], half=half)
    model = onnx.load(folder / NAME)
    kind, body = TensorProto.FLOAT16 if half else TensorProto.FLOAT, model.graph
    for name in ("past_key_values.0.key", "past_key_values.0.value"):
        body.input.append(helper.make_tensor_value_info(name, kind, cache))
        body.output.append(helper.make_tensor_value_info(name.replace("past_key_values", "present"), kind, cache))
        zeros = helper.make_tensor("", kind, [1], [1.0])
        body.node.extend(
            [
                helper.make_node("Shape", ["input_ids"], [f"{name}_s"]),
                helper.make_node("Gather", [f"{name}_s", "zero"], [f"{name}_b"], axis=0),
                helper.make_node("Concat", [f"{name}_b", "sizes"], [f"{name}_n"], axis=0),
                helper.make_node("ConstantOfShape", [f"{name}_n"], [f"{name}_new"], value=zeros),
                helper.make_node("Concat", [name, f"{name}_new"], [name.replace("past_key_values", "present")], axis=2),
            ]
        )
    body.initializer.append(numpy_helper.from_array(np.array([0]), "zero"))
    body.initializer.append(numpy_helper.from_array(np.array([2, 1, 4]), "sizes"))
    last = next(node for node in body.node if node.output[0] == "last_hidden_state")
    source = last.input[0]
    body.node.remove(last)
    body.node.extend(
        [
            helper.make_node("ReduceSum", ["present.0.key", "axes"], ["seen"], keepdims=0),
            helper.make_node("Unsqueeze", ["seen", "axes_12"], ["seen_3"]),
            helper.make_node("Add", [source, "seen_3"], ["last_hidden_state"]),
        ]
    )
    body.initializer.append(numpy_helper.from_array(np.array([1, 2, 3]), "axes"))
    body.initializer.append(numpy_helper.from_array(np.array([1, 2]), "axes_12"))
    if branch:
        body.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))
    onnx.save(model, folder / NAME)
    return folder


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("half", [False, True])
def test_a_decoders_cache_is_empty(tmp_path: Path, half: bool, engine: str) -> None:
    """Its inputs are fed nothing of the batch's size, and its outputs dropped."""
    folder = decoder(tmp_path, half=half, branch=True)
    _, taken, target = take(folder)
    assert taken.inputs == ("input_ids", "attention_mask", "position_ids")
    model = onnx.load(target)
    assert [value.name for value in model.graph.input] == list(taken.inputs)
    assert not [value.name for value in model.graph.output if "present" in value.name]
    positions = np.broadcast_to(np.arange(6), IDS.shape)
    feeds = {"input_ids": IDS, "attention_mask": MASK, "position_ids": positions}
    got = RUNS[engine](target)(feeds, ("token_embeddings",))["token_embeddings"]
    # Keys of this call alone: 2 heads of 4 ones.
    assert np.abs(got - (TABLE[IDS] + positions[..., None] + 8)).max() < (0.02 if half else 1e-5)


@pytest.mark.parametrize("cache", [("b", "heads", "past", 4), ("b", 2, "past"), ("b", 2, "past", "width")])
def test_a_cache_of_unknown_size_is_refused(tmp_path: Path, cache: Sequence[str | int]) -> None:
    with pytest.raises(ModelFileError, match="export the graph without a cache") as caught:
        take(decoder(tmp_path, cache=cache))
    assert caught.value.key == "past_key_values.0.key"


def test_a_decoder_without_token_vectors_is_refused(tmp_path: Path) -> None:
    """A graph for generation ends in logits; the error names what it has, without the cache."""
    folder = decoder(tmp_path)
    model = onnx.load(folder / NAME)
    for value in [*model.graph.output]:
        value.name = "logits" if value.name == "last_hidden_state" else value.name
    for node in model.graph.node:
        node.output[:] = ["logits" if name == "last_hidden_state" else name for name in node.output]
    onnx.save(model, folder / NAME)
    with pytest.raises(ModelFileError, match="returns logits, but neither"):
        take(folder)


def test_another_dimension_is_refused(tmp_path: Path) -> None:
    """A pooled output must have the dimension that the model's files state."""
    folder = checkpoint(tmp_path, after=("Dense",))
    dense(folder, "2_Dense", HIDDEN, 8)
    ship(folder, outputs=("sentence_embedding",))
    with pytest.raises(ModelFileError, match="16 dimensions, but the model's files say 8"):
        take(folder)


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    """An interrupted download, or another file with that name."""
    folder = checkpoint(tmp_path)
    (folder / "onnx").mkdir()
    (folder / NAME).write_bytes(b"\xff" * 32)
    with pytest.raises(ModelFileError, match="not a readable ONNX file"):
        take(folder)


def test_an_output_with_the_wrong_axes_is_refused(tmp_path: Path) -> None:
    """A sentence_embedding per token is invalid."""
    folder = checkpoint(tmp_path)
    ship(folder)
    model = onnx.load(folder / NAME)
    for node in model.graph.node:
        node.output[:] = ["sentence_embedding" if name == "last_hidden_state" else name for name in node.output]
    model.graph.output[0].name = "sentence_embedding"
    onnx.save(model, folder / NAME)
    with pytest.raises(ModelFileError, match="must have 2 axes, not 3"):
        take(folder)


def test_a_graph_that_breaks_onnx_rules_is_refused(tmp_path: Path) -> None:
    """The message has the checker's first line."""
    folder = checkpoint(tmp_path)
    ship(folder)
    model = onnx.load(folder / NAME)
    model.graph.node[0].input[0] = "nowhere"
    onnx.save(model, folder / NAME)
    with pytest.raises(ModelFileError, match="cannot be completed"):
        take(folder)
