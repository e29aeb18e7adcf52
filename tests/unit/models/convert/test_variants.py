"""Graphs with smaller weights: results, exceptions, and refused graphs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shoal.errors import Cancelled, ModelFileError, VerificationFailed
from shoal.models.convert import variants
from shoal.models.convert.variants import (
    Parity,
    Variant,
    compare,
    list_variants,
    make_variant,
    measure_parity,
    parity_key,
    quantize,
    require,
    size_of,
    variant_path,
    write_variant,
)
from shoal.models.convert.verify import Run
from shoal.models.manifest import FileFacts, Manifest
from shoal.models.progress import Stop
from shoal.models.store import Store, StoredModel
from shoal.specs import MultiSpec, ScoreSpec, SparseSpec, TextSpec
from shoal.types import Array
from tests.unit.models.engines import RUNS

IDS = np.array([[3, 0, 2999], [7, 1, 1]], np.int64)
SPEC = TextSpec(tokenizer="t", inputs=("input_ids",), dimension=6, max_tokens=8, pooled="pooled")


def graph(path: Path, *, opset: int = 20, scale: float = 1.0, external: bool = False, products: bool = True) -> Path:
    """A table of 3,000 rows and one of 4, a product with a weight, one with a weight that is also an output, and a
    sum."""
    import onnx
    from onnx import helper as make
    from onnx import numpy_helper

    draw = np.random.default_rng(3)
    tensors = {
        "words": draw.standard_normal((3000 if products else 20, 8)),
        "places": draw.standard_normal((4, 8)),
        "w": draw.standard_normal((8, 6)) * scale,
        "shared": draw.standard_normal((6, 6)),
    }
    tensors["words"][1] = 0.0
    constants = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in tensors.items()]
    constants += [numpy_helper.from_array(np.array([1]), "axis"), numpy_helper.from_array(np.array(2), "two")]
    product = "MatMul" if products else "Identity"
    nodes = [
        make.make_node("Gather", ["words", "input_ids"], ["h"]),
        make.make_node("Gather", ["places", "two"], ["place"]),
        make.make_node("Add", ["h", "place"], ["h2"]),
        make.make_node(product, ["h2", "w"][: 1 + products], ["h3"]),
        make.make_node(product, ["h3", "shared"][: 1 + products], ["h4"]),
        make.make_node("ReduceSum", ["h4", "axis"], ["pooled"], keepdims=0),
        make.make_node("Identity", ["shared"], ["kept"]),
    ]
    value = make.make_tensor_value_info
    inputs = [value("input_ids", onnx.TensorProto.INT64, ["b", "l"])]
    outputs = [value("pooled", onnx.TensorProto.FLOAT, ["b", None]), value("kept", onnx.TensorProto.FLOAT, [6, 6])]
    onnx_graph = make.make_graph(nodes, "g", inputs, outputs, constants)
    model = make.make_model(onnx_graph, opset_imports=[make.make_opsetid("", opset)], ir_version=10)
    onnx.save(model, path, save_as_external_data=external, location="weights_of_it", size_threshold=64)
    return path


def tensors(path: Path) -> dict[str, Array]:
    import onnx
    from onnx import numpy_helper

    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(str(path)).graph.initializer}


def stored(path: Path) -> StoredModel:
    manifest = Manifest(
        id="m", address="hf:m", source="hf:m", revision="1", converter=1, graph=path.name, graph_source="built",
        conversion="", parameters=1, text=SPEC, verification=None, created=1, weights={},
        files={path.name: FileFacts("ab" * 32, 1, 1)},
    )  # fmt: skip
    return StoredModel(path.parent, manifest)


@given(
    values=arrays.arrays(
        np.float32, arrays.array_shapes(min_dims=2, max_dims=2, max_side=8), elements=st.floats(-1e6, 1e6, width=32)
    ),
    axis=st.sampled_from([0, 1]),
)
def test_rounding_is_within_half_a_scale(values: Array, axis: int) -> None:
    """For every value; each scale fits the maximum of its row or column, and no value is -128."""
    numbers, scales = quantize(values, axis=axis)
    wide = np.expand_dims(scales, axis)
    assert numbers.dtype == np.int8
    assert numbers.min(initial=0) >= -127
    assert (scales > 0).all()
    error = np.abs(numbers.astype(np.float64) * wide - values.astype(np.float64))
    assert (error <= 0.5001 * wide.astype(np.float64) + 1e-30).all()


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize(("variant", "error"), [("int8", 0.15), ("fp16", 0.02)])
def test_a_variant_computes_nearly_the_same(
    tmp_path: Path, engine: str, external: bool, variant: Variant, error: float
) -> None:
    """On both engines, with internal or external weights, and in a much smaller file."""
    exact = graph(tmp_path / "model.onnx", external=external)
    write_variant(exact, tmp_path / "small.onnx", variant)
    right, got = (RUNS[engine](path)({"input_ids": IDS}, ("pooled",)) for path in (exact, tmp_path / "small.onnx"))
    assert 0 < np.abs(right["pooled"] - got["pooled"]).max() < error
    assert size_of(tmp_path / "small.onnx") < size_of(exact) + (100_000 if external else 0)


@pytest.mark.parametrize("engine", RUNS)
def test_groups_are_more_exact_than_columns(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of rows has scales of its own; a matrix that groups do not divide keeps one scale per column."""
    exact = graph(tmp_path / "model.onnx")
    weights = tensors(exact)["w"]
    rows = len(weights)
    right = RUNS[engine](exact)({"input_ids": IDS}, ("pooled",))["pooled"]
    errors: dict[int, float] = {}
    for group in (0, 2, rows + 1):
        monkeypatch.setattr(variants, "GROUP_ROWS", group)
        path = tmp_path / f"{group}.onnx"
        write_variant(exact, path, "int8", grouped=group > 0)
        after = tensors(path)
        expected = (rows // 2, 1, 6) if group == 2 else (6,)
        assert after["w/scale"].shape == expected
        got = RUNS[engine](path)({"input_ids": IDS}, ("pooled",))["pooled"]
        assert 0 < np.abs(right - got).max() < 0.15
        errors[group] = np.abs((after["w/int8"] * after["w/scale"]).reshape(weights.shape) - weights).mean()
    assert 0 < errors[2] < errors[0] == errors[rows + 1]


def test_forms_of_int8_are_files_of_their_own(tmp_path: Path) -> None:
    """What was written for one engine is never read by another that needs the other form."""
    entry, store = stored(graph(tmp_path / "model.onnx")), Store(tmp_path / "home")
    paths = [make_variant(entry, "int8", store=store, grouped=grouped) for grouped in (False, True)]
    assert [path.name for path in paths] == ["model.int8.onnx", "model.int8-64.onnx"]
    assert [variant for variant, _, _ in list_variants(entry, store)] == ["int8", "int8"]


def test_only_large_weights_of_one_use_are_made_smaller(tmp_path: Path) -> None:
    """Small tables and shared weights stay unchanged."""
    before = tensors(graph(tmp_path / "model.onnx"))
    write_variant(tmp_path / "model.onnx", tmp_path / "small.onnx", "int8")
    after = tensors(tmp_path / "small.onnx")
    assert {name for name in after if "/" in name} == {"words/int8", "words/scale", "w/int8", "w/scale"}
    assert not {"words", "w"} & set(after)
    for name in ("places", "shared"):
        np.testing.assert_array_equal(after[name], before[name])
    assert after["w/scale"].shape == (6,)
    assert after["words/scale"].shape == (3000, 1)


def test_a_value_too_large_for_fp16_keeps_its_tensor(tmp_path: Path) -> None:
    """It would become infinite."""
    graph(tmp_path / "model.onnx", scale=1e6)
    write_variant(tmp_path / "model.onnx", tmp_path / "small.onnx", "fp16")
    after = tensors(tmp_path / "small.onnx")
    assert after["w"].dtype == np.float32
    assert after["words/fp16"].dtype == np.float16


@pytest.mark.parametrize("variant", variants.VARIANTS)
def test_graphs_that_cannot_be_made_smaller_are_refused(tmp_path: Path, variant: Variant) -> None:
    """Too old, of another format, or with few weights: the error states the alternative."""
    store = Store(tmp_path / "home")
    old = graph(tmp_path / "model.onnx")
    import onnx

    model = onnx.load(str(old))
    model.opset_import[0].version = 12
    onnx.save(model, str(old))
    with pytest.raises(ModelFileError, match=rf"opset 12 does not support {variant}.*use precision auto"):
        make_variant(stored(old), variant, store=store)
    with pytest.raises(ModelFileError, match="has no float32 weights"):
        make_variant(stored(graph(tmp_path / "empty.onnx", products=False)), variant, store=store)
    with pytest.raises(ModelFileError, match="only ONNX"):
        make_variant(stored(tmp_path / "openvino_model.xml"), variant, store=store)
    assert not list(tmp_path.glob(".adding-*"))


def test_a_variant_is_made_once(tmp_path: Path) -> None:
    """It lies next to its graph under its own name; it is reused and survives a copy. Equal input gives equal bytes."""
    entry, store = stored(graph(tmp_path / "model.onnx")), Store(tmp_path / "home")
    variant = make_variant(entry, "int8", store=store)
    assert variant == variant_path(entry, "int8") == tmp_path / "model.int8.onnx"
    first, stamp = variant.read_bytes(), variant.stat()
    make_variant(entry, "int8", store=store)
    os.utime(variant, (1, 1))
    assert make_variant(entry, "int8", store=store).stat().st_ino == stamp.st_ino
    variant.unlink()
    assert make_variant(entry, "int8", store=store).read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "model.int8.onnx", "model.onnx", "notes.json"]


@pytest.mark.parametrize("harm", ["empty", "cut", "changed", "unknown"])
def test_a_variant_that_is_not_as_it_was_written_is_made_again(tmp_path: Path, harm: str) -> None:
    """A full disk or a power cut can leave a partial file, which engines could never load."""
    entry, store = stored(graph(tmp_path / "model.onnx")), Store(tmp_path / "home")
    variant = make_variant(entry, "int8", store=store)
    first = variant.read_bytes()
    left = {"empty": b"", "cut": first[:100], "changed": first[:-1] + b"!"}
    variant.write_bytes(left.get(harm, b"of an older Shoal"))
    if harm == "unknown":
        store.note(entry, "variant_int8_files", None)
    assert make_variant(entry, "int8", store=store).read_bytes() == first
    assert RUNS["onnxruntime"](variant)({"input_ids": IDS}, ("pooled",))["pooled"].shape == (2, 6)


def test_leftovers_of_dead_processes_are_removed(tmp_path: Path) -> None:
    entry, store = stored(graph(tmp_path / "model.onnx")), Store(tmp_path / "home")
    for name in (".adding-dead", ".variant-dead"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.int8.onnx").write_bytes(b"half")
    make_variant(entry, "int8", store=store)
    assert not list(tmp_path.glob(".*"))


def test_only_one_makes_it(tmp_path: Path) -> None:
    """Other workers wait and reuse it."""
    entry, store = stored(graph(tmp_path / "model.onnx")), Store(tmp_path / "home")
    with ThreadPoolExecutor(4) as pool:
        variant = list(pool.map(lambda _: make_variant(entry, "int8", store=store).stat().st_ino, range(4)))
    assert len(set(variant)) == 1


def odd(
    path: Path, nodes: Sequence[Any], weights: dict[str, Array], *, listed: Sequence[str] = (), ir: int = 8
) -> Path:
    """A graph of `nodes` from "ids" to "out", with its weights, some `listed` as inputs."""
    from onnx import TensorProto, numpy_helper
    from onnx import helper as make

    value = make.make_tensor_value_info
    inputs = [value("ids", TensorProto.INT64, ["b", "l"])]
    inputs += [value(name, TensorProto.FLOAT, weights[name].shape) for name in listed]
    initializers = [numpy_helper.from_array(each, name) for name, each in weights.items()]
    body = make.make_graph(nodes, "g", inputs, [value("out", TensorProto.FLOAT, ["b", "l", "w"])], initializers)
    path.write_bytes(
        make.make_model(body, opset_imports=[make.make_opsetid("", 17)], ir_version=ir).SerializeToString()
    )
    return path


def table() -> Array:
    weights: Array = np.random.default_rng(1).standard_normal((3000, 8)).astype(np.float32)
    return weights


@pytest.mark.parametrize("variant", variants.VARIANTS)
def test_a_table_that_a_branch_reads_stays(tmp_path: Path, variant: Variant) -> None:
    """Names of the outer graph are visible inside If and Loop."""
    from onnx import TensorProto
    from onnx import helper as make

    def branch(name: str) -> Any:
        out = make.make_tensor_value_info(name, TensorProto.FLOAT, ["b", "l", "w"])
        return make.make_graph([make.make_node("Gather", ["words", "ids"], [name])], name, [], [out])

    nodes = [
        make.make_node("Gather", ["words", "ids"], ["x"]),
        make.make_node("If", ["yes"], ["y"], then_branch=branch("one"), else_branch=branch("two")),
        make.make_node("Add", ["x", "y"], ["z"]),
        make.make_node("MatMul", ["z", "w"], ["out"]),
    ]
    weights = {"words": table(), "w": table()[:8], "yes": np.array(True)}
    source = odd(tmp_path / "odd.onnx", nodes, weights)
    write_variant(source, tmp_path / "small.onnx", variant)
    assert "words" in tensors(tmp_path / "small.onnx")
    right, got = (RUNS["onnxruntime"](one)({"ids": IDS}, ("out",))["out"] for one in (source, tmp_path / "small.onnx"))
    assert 0 < np.abs(right - got).max() < 0.5


@pytest.mark.parametrize("variant", variants.VARIANTS)
def test_weights_that_are_listed_as_inputs(tmp_path: Path, variant: Variant) -> None:
    """As in the oldest version of the format."""
    from onnx import helper as make

    nodes = [make.make_node("Gather", ["words", "ids"], ["x"]), make.make_node("MatMul", ["x", "w"], ["out"])]
    weights = {"words": table(), "w": table()[:8]}
    source = odd(tmp_path / "odd.onnx", nodes, weights, listed=["words", "w"], ir=3)
    write_variant(source, tmp_path / "small.onnx", variant)
    assert not {"words", "w"} & set(tensors(tmp_path / "small.onnx"))
    assert RUNS["onnxruntime"](tmp_path / "small.onnx")({"ids": IDS}, ("out",))["out"].shape == (2, 3, 8)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("variant", variants.VARIANTS)
def test_empty_weights_and_those_beyond_numbers_stay(tmp_path: Path, variant: Variant, value: float) -> None:
    from onnx import helper as make

    nodes = [
        make.make_node("Gather", ["words", "ids"], ["x"]),
        make.make_node("MatMul", ["x", "w"], ["y"]),
        make.make_node("MatMul", ["y", "none"], ["out"]),
    ]
    weights = {"words": table(), "w": table()[:8].copy(), "none": np.zeros((8, 0), np.float32)}
    weights["w"][0, 0] = value
    write_variant(odd(tmp_path / "odd.onnx", nodes, weights), tmp_path / "small.onnx", variant)
    after = tensors(tmp_path / "small.onnx")
    assert after["none"].shape == (8, 0)
    if variant == "int8":
        np.testing.assert_array_equal(after["w"], weights["w"])


@pytest.mark.parametrize("data", [b"\xff" * 100, b"{}", b"\x08\x08"])
def test_a_file_that_is_no_graph_is_reported(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(data)
    with pytest.raises(ModelFileError, match=r"model\.onnx: .*use precision auto"):
        write_variant(tmp_path / "model.onnx", tmp_path / "small.onnx", "int8")


def test_weights_too_large_for_one_file_lie_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a graph over 2 GiB; both files are written and counted."""
    monkeypatch.setattr(variants, "INLINE_BYTES", 1000)
    entry = stored(graph(tmp_path / "model.onnx"))
    variant = make_variant(entry, "int8", store=Store(tmp_path / "home"))
    assert (tmp_path / "model.int8.onnx_data").stat().st_size > 24_000
    assert size_of(variant) > 24_000
    assert RUNS["onnxruntime"](variant)({"input_ids": IDS}, ("pooled",))["pooled"].shape == (2, 6)


def test_making_one_can_be_stopped(tmp_path: Path) -> None:
    """It stops between tensors and leaves no file."""
    stop = Stop()
    stop.set()
    with pytest.raises(Cancelled):
        make_variant(stored(graph(tmp_path / "model.onnx")), "int8", store=Store(tmp_path / "home"), stop=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "model.onnx"]


class Scripted:
    """A graph that returns the given outputs after the given seconds; `now` is the clock."""

    def __init__(self, rows: Sequence[Sequence[float]], seconds: float, clock: list[float]) -> None:
        self.rows = np.array(rows, np.float32)
        self.seconds = seconds
        self.clock = clock

    def __call__(self, inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        self.clock[0] += self.seconds
        return dict.fromkeys(outputs, self.rows)


def compared(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]], spec: TextSpec = SPEC) -> Parity:
    now = [0.0]
    samples = [{"input_ids": np.ones((2, 4), np.int64)}, {"input_ids": np.ones((1, 32), np.int64)}]
    return compare(Scripted(left, 0.3, now), Scripted(right, 0.1, now), samples, spec, key="k", clock=lambda: now[0])


def test_parity_of_vectors_is_their_cosines() -> None:
    """Minimum and mean over all rows, and the time of the shortest and the longest batch."""
    parity = compared([[1, 0], [0, 2]], [[1, 0], [2, 2]])
    assert parity.min_cosine == pytest.approx(0.7071, abs=1e-4)
    assert parity.mean_cosine == pytest.approx((1 + 0.7071) / 2, abs=1e-4)
    assert (parity.max_difference, parity.speed, parity.key) == (None, {"2x4": 3.0, "1x32": 3.0}, "k")


def test_rows_of_nothing_do_not_count_and_nan_does() -> None:
    assert compared([[0, 0], [0, 2]], [[0, 0], [0, 1]]).min_cosine == pytest.approx(1.0)
    assert compared([[1, 0], [0, 2]], [[np.nan, 0], [0, 1]]).min_cosine == -1.0
    with pytest.raises(VerificationFailed, match="no sample has a vector"):
        compared([[0, 0]], [[0, 0]])


def test_parity_of_scores_is_their_difference() -> None:
    """Relative to the range of the logits, which is at least 1."""
    spec = TextSpec(
        tokenizer="t", inputs=("input_ids",), dimension=0, max_tokens=8,
        score=ScoreSpec(labels=("a",), activation="sigmoid"),
    )  # fmt: skip
    assert compared([[0], [4]], [[0], [3]], spec).max_difference == pytest.approx(0.25)
    assert compared([[0.5], [0.5]], [[0.5], [0.4]], spec).max_difference == pytest.approx(0.1)


M3 = TextSpec(
    tokenizer="t",
    inputs=("input_ids", "attention_mask"),
    dimension=2,
    max_tokens=8,
    sparse=SparseSpec(output="weights", per="token"),
    multi=MultiSpec(dimension=2, output="late"),
    tokens="tokens",
)


def outputs_of(**changes: Array) -> Run:
    """A model with every kind of vector for two texts; the second has one padding token."""
    right = {
        "pooled": np.array([[1.0, 0.0], [0.0, 1.0]]),
        "weights": np.array([[0.5, 0.1], [0.2, 0.0]]),
        "late": np.array([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]]]),
        "tokens": np.array([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]]]),
    } | changes
    return lambda inputs, outputs: {name: right[name] for name in outputs}


def of_every_kind(spec: TextSpec = M3, **changes: Array) -> Parity:
    samples = [{"input_ids": IDS[:, :2], "attention_mask": np.array([[1, 1], [1, 0]])}]
    return compare(outputs_of(), outputs_of(**changes), samples, spec)


def test_every_kind_of_vector_is_compared() -> None:
    """The worst kind counts, and padding never does."""
    assert of_every_kind().mean_cosine == pytest.approx(1.0)
    weights = of_every_kind(weights=np.array([[0.1, 0.5], [0.2, 9.0]]))
    assert weights.min_cosine == pytest.approx(0.1 / 0.26, rel=1e-6)
    late = of_every_kind(late=np.array([[[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [7.0, 7.0]]]))
    assert late.mean_cosine == pytest.approx(2 / 3)
    assert late.means == {"pooled": pytest.approx(1.0), "weights": pytest.approx(1.0), "late": pytest.approx(2 / 3),
                          "tokens": pytest.approx(1.0)}  # fmt: skip
    with pytest.raises(VerificationFailed):
        require(late, "int8")


def test_pooled_token_vectors_are_reported_and_not_judged() -> None:
    parity = of_every_kind(tokens=np.array([[[0.0, 1.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]]]))
    assert parity.mean_cosine == pytest.approx(1.0)
    assert parity.means["tokens"] == pytest.approx(2 / 3)


def test_models_without_dense_vectors_are_compared_by_their_own_kinds() -> None:
    """Sparse weights, or late-interaction vectors."""
    more: dict[str, Any] = {"tokenizer": "t", "inputs": ("input_ids",), "dimension": 0, "max_tokens": 8}
    assert compared([[1]], [[1]], TextSpec(**more, sparse=SparseSpec())).min_cosine == pytest.approx(1.0)
    late = TextSpec(**more, multi=MultiSpec(dimension=2, output="late"))
    swapped = np.array([[[0.0, 1.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]]])
    assert of_every_kind(late, late=swapped).mean_cosine == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("parity", "variant"),
    [
        (Parity(key="", mean_cosine=0.98, min_cosine=0.9), "int8"),
        (Parity(key="", mean_cosine=float("nan")), "int8"),
        (Parity(key="", mean_cosine=0.9998), "fp16"),
        (Parity(key="", max_difference=0.02), "int8"),
    ],
)
def test_a_model_that_does_not_survive_is_not_served(parity: Parity, variant: Variant) -> None:
    with pytest.raises(VerificationFailed, match=r"loses too much accuracy.*use precision auto"):
        require(parity, variant)


def test_a_model_that_survives_is() -> None:
    for one in (Parity(key="", mean_cosine=0.9988, min_cosine=0.97), Parity(key="", max_difference=0.005)):
        assert require(one, "int8") is one


def test_the_key_changes_with_engine_and_samples(tmp_path: Path) -> None:
    entry = stored(tmp_path / "model.onnx")
    samples = [{"input_ids": IDS}]
    keys = {
        parity_key("openvino 1", entry, samples),
        parity_key("openvino 2", entry, samples),
        parity_key("openvino 1", entry, [{"input_ids": IDS + 1}]),
    }
    assert len(keys) == 3
    assert parity_key("openvino 1", entry, samples) in keys


def test_parity_is_measured_once_on_a_machine(tmp_path: Path) -> None:
    """It is stored per engine with the file sizes; stored values are checked as well."""
    entry, store = stored(graph(tmp_path / "model.onnx")), Store(tmp_path)
    make_variant(entry, "int8", store=store)
    engine_calls: list[tuple[str, str]] = []

    def open_graph(path: Path, precision: str) -> Run:
        engine_calls.append((path.name, precision))
        return RUNS["onnxruntime"](path)

    def ask(engine: str) -> Parity:
        samples = [{"input_ids": IDS}]
        return measure_parity(entry, "int8", store=store, engine=engine, samples=samples, open_graph=open_graph)

    parity = ask("one")
    assert engine_calls == [("model.onnx", "f32"), ("model.int8.onnx", "int8")]
    assert parity.mean_cosine is not None
    assert 0.999 < parity.mean_cosine < 1.0
    assert parity.bytes == (tmp_path / "model.int8.onnx").stat().st_size
    assert ask("one") == parity
    assert len(engine_calls) == 2
    ask("two")
    assert len(engine_calls) == 4
    note = store.notes(entry)["variant_int8"]
    store.note(entry, "variant_int8", note | {"mean_cosine": 0.5})
    with pytest.raises(VerificationFailed):
        ask("two")
    store.note(entry, "variant_int8", "broken")
    assert ask("two").mean_cosine == parity.mean_cosine
