"""Graphs that end in logits: built for every family, and shipped with the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file, save_file

from shoal.errors import ModelFileError
from shoal.models.convert.contract import read_contract
from shoal.models.convert.graphs.shipped import ShippedGraph, adapt_shipped_graph
from shoal.models.convert.graphs.text import build_text_graph, graph_inputs
from shoal.models.convert.reference import score
from shoal.types import Array
from tests.unit.models.checkpoints import HIDDEN
from tests.unit.models.classifiers import KINDS, classifier, head_names
from tests.unit.models.engines import RUNS, onnxruntime_run

IDS = [np.array([2, 7, 8, 3, 9, 10, 11, 3]), np.array([2, 9, 3, 12, 3]), np.array([2, 3])]
TYPES = [np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.array([0, 0, 0, 1, 1]), np.array([0, 0])]


def padded(rows: Sequence[Array], pad: int = 0) -> Array:
    batch = np.full((len(rows), max(map(len, rows))), pad, np.int64)
    for at, row in enumerate(rows):
        batch[at, : len(row)] = row
    return batch


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_numpy(tmp_path: Path, kind: str, engine: str) -> None:
    """A padded batch of pairs, with segments if the family has them, equals each pair alone."""
    folder = classifier(tmp_path, kind, labels=3)
    contract = read_contract(folder)
    assert contract.encoder is not None
    build_text_graph(folder, contract, folder / "out.onnx")
    inputs = {
        "input_ids": padded(IDS, contract.pad_id),
        "attention_mask": padded([np.ones_like(row) for row in IDS]),
        "token_type_ids": padded(TYPES),
    }
    names = graph_inputs(contract)
    assert ("token_type_ids" in names) == (kind in ("bert", "electra"))
    got = RUNS[engine](folder / "out.onnx")({name: inputs[name] for name in names}, ("logits",))["logits"]
    expected = score(folder, contract, contract.encoder, IDS, TYPES)
    assert got.shape == (3, 3)
    assert np.abs(got - expected).max() < 2e-5
    assert np.ptp(expected) > 0.1


def test_segments_change_the_logits(tmp_path: Path) -> None:
    """A graph that ignored segments would give other logits."""
    folder = classifier(tmp_path)
    contract = read_contract(folder)
    assert contract.encoder is not None
    with_types, without_types = (score(folder, contract, contract.encoder, IDS, types) for types in (TYPES, None))
    assert np.abs(with_types - without_types)[:2].min() > 1e-3
    assert with_types[2] == without_types[2]


def test_an_embedder_has_no_logits(tmp_path: Path) -> None:
    """The reference raises the error."""
    folder = classifier(tmp_path, config={"architectures": ["BertModel"]})
    contract = read_contract(folder)
    assert contract.encoder is not None
    with pytest.raises(ModelFileError, match="without a classifier"):
        score(folder, contract, contract.encoder, IDS)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_head_that_is_not_there_is_refused(tmp_path: Path, kind: str, layer: int, part: str) -> None:
    """The error names file and tensor."""
    folder = classifier(tmp_path, kind)
    name = f"{head_names(kind)[layer]}.{part}"
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=f"model.safetensors: {name}: this tensor is missing"):
        build_text_graph(folder, read_contract(folder), folder / "out.onnx")


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    """The configuration's number of labels differs from that of the weights."""
    folder = classifier(tmp_path, labels=2, config={"id2label": {"0": "a", "1": "b", "2": "c"}})
    with pytest.raises(ModelFileError, match=r"classifier.weight: has shape \[2, 16\]"):
        build_text_graph(folder, read_contract(folder), folder / "out.onnx")


def ship(
    folder: Path, *, outputs: Sequence[str] = ("logits",), axes: Any = ("b", 2), kind: int = TensorProto.FLOAT
) -> None:
    """A graph with [b, 2] outputs: the sums of a row's ids and of its segments."""
    nodes = []
    for name in ("input_ids", "token_type_ids"):
        nodes.append(helper.make_node("Mul", [name, "attention_mask"], [f"{name}_kept"]))
        nodes.append(helper.make_node("ReduceSum", [f"{name}_kept", "one"], [f"{name}_sum"], keepdims=1))
    nodes.append(helper.make_node("Concat", ["input_ids_sum", "token_type_ids_sum"], ["both"], axis=1))
    nodes.extend(helper.make_node("Cast", ["both"], [name], to=kind) for name in outputs)
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["b", "l"])
        for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    values = [helper.make_tensor_value_info(name, kind, axes) for name in outputs]
    graph = helper.make_graph(nodes, "g", inputs, values, [numpy_helper.from_array(np.array([1]), "one")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    (folder / "onnx").mkdir(exist_ok=True)
    onnx.save(model, folder / "onnx" / "model.onnx")


def take(folder: Path) -> tuple[ShippedGraph, Path]:
    (folder / "out").mkdir(exist_ok=True)
    target = folder / "out" / "model.onnx"
    return adapt_shipped_graph(folder, "onnx/model.onnx", read_contract(folder), target), target


@pytest.mark.parametrize("name", ["logits", "scores"])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16])
@pytest.mark.parametrize("axes", [("b", 2), ("b", "labels"), None])
def test_a_shipped_graph_gives_its_logits(tmp_path: Path, name: str, kind: int, axes: Any) -> None:
    """The output gets one name and float32, whatever its original name."""
    folder = classifier(tmp_path, "distilbert", labels=2)
    ship(folder, outputs=(name,), kind=kind, axes=axes)
    taken, target = take(folder)
    assert (taken.kind, taken.tokens) == ("scores", "")
    assert taken.inputs == ("input_ids", "attention_mask", "token_type_ids")
    batch = {"input_ids": padded(IDS), "attention_mask": padded([np.ones_like(r) for r in IDS])}
    got = onnxruntime_run(target)(batch | {"token_type_ids": padded(TYPES)}, ("logits",))["logits"]
    assert got.dtype == np.float32
    assert got.tolist() == [[float(ids.sum()), float(types.sum())] for ids, types in zip(IDS, TYPES, strict=True)]
    assert [port.name for port in onnx.load(target).graph.output] == ["logits"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"outputs": ("last_hidden_state",)}, "returns last_hidden_state, but a classifier must return logits"),
        ({"outputs": ("one_more", "another")}, "returns one_more, another"),
        ({"kind": TensorProto.INT64}, "returns logits, but"),
        ({"axes": ("b", 3)}, r"logits: has the shape \[None, 3\], but the configuration names 2 labels"),
        ({"axes": ("b",)}, "logits: has the shape"),
    ],
)
def test_graphs_without_such_logits_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """The error names file and output."""
    folder = classifier(tmp_path, labels=2)
    ship(folder, **change)
    with pytest.raises(ModelFileError, match=words):
        take(folder)


def test_of_several_outputs_logits_is_taken(tmp_path: Path) -> None:
    """Hidden states next to it are ignored."""
    folder = classifier(tmp_path, labels=2)
    ship(folder, outputs=("other", "logits"))
    _, target = take(folder)
    assert [port.name for port in onnx.load(target).graph.output] == ["logits"]


def test_a_width_that_config_states_is_no_matter(tmp_path: Path) -> None:
    """A shipped classifier of an unknown architecture needs only labels and lengths."""
    changes = {"model_type": "xlnet", "architectures": ["XLNetForSequenceClassification"]}
    folder = classifier(tmp_path, labels=2, config=changes | {"hidden_size": None, "num_attention_heads": HIDDEN})
    ship(folder)
    assert take(folder)[0].kind == "scores"
