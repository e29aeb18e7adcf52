"""How graphs are changed before OpenVINO compiles them, and what compiled ones keep in memory."""

from __future__ import annotations

import mmap
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.backends.local.compile import (
    PLAIN_PRODUCTS,
    import_openvino,
    keep_half_tables,
    release_pages,
    separate_activations,
)
from shoal.types import Array

RANDOM = np.random.default_rng(5)
X = RANDOM.standard_normal((2, 3, 8)).astype(np.float32)


def numbers(*shape: int) -> Array:
    found: Array = RANDOM.standard_normal(shape).astype(np.float32)
    return found


def model(end: Callable[[Any, Any], Any], *, weights: str = "f32", bias: str = "after") -> Any:
    """Return a product of the input with a matrix, a bias added, and what `end` makes of it."""
    openvino = import_openvino()
    from openvino import opset13 as ops

    kind = np.float16 if weights == "half" else np.float32
    parameter = ops.parameter([-1, -1, 8], kind)
    matrix = ops.constant(numbers(8, 16).astype(np.float16 if weights == "f16" else kind))
    if weights == "f16":
        matrix = ops.convert(matrix, "f32")
    elif weights == "scaled":
        matrix = ops.multiply(matrix, ops.constant(numbers(16)))
    product = ops.matmul(parameter, matrix, False, False)
    if bias:
        shift = ops.constant(numbers(16).astype(kind))
        product = ops.add(product, shift) if bias == "after" else ops.add(shift, product)
    return openvino.Model([end(ops, product)], [parameter])


def zeros_added(changed: Any) -> int:
    """Return how many values have a zero added that is not a constant."""
    sums = [each for each in changed.get_ordered_ops() if each.get_type_name() == "Add"]
    return sum(each.input_value(1).get_node().get_type_name() == "Convert" for each in sums)


def spelled_gelu(ops: Any, x: Any) -> Any:
    inner = ops.erf(ops.divide(x, ops.constant(np.float32(2**0.5))))
    return ops.multiply(ops.multiply(x, ops.constant(np.float32(0.5))), ops.add(inner, ops.constant(np.float32(1))))


ENDS: dict[str, Callable[[Any, Any], Any]] = {
    "relu": lambda ops, x: ops.relu(x),
    "gelu": lambda ops, x: ops.gelu(x, "erf"),
    "spelled gelu": spelled_gelu,
    "silu": lambda ops, x: ops.multiply(x, ops.sigmoid(x)),
    "quick gelu": lambda ops, x: ops.multiply(x, ops.sigmoid(ops.multiply(x, ops.constant(np.float32(1.702))))),
}


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor whose graphs are changed."""
    monkeypatch.setattr(platform, "machine", lambda: PLAIN_PRODUCTS[0])


def run(graph: Any, x: Array = X) -> Array:
    compiled = import_openvino().Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found: Array = compiled.create_infer_request().infer([x])[0].copy()
    return found


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("bias", ["after", "before", ""])
def test_activations_are_apart_and_change_nothing(end: str, bias: str) -> None:
    """The products of a graph in f32 take the kernel without an activation, and the results stay the same."""
    graph = model(ENDS[end], bias=bias)
    expected = run(graph.clone())
    changed = separate_activations(graph)
    assert zeros_added(changed) == 1
    assert np.abs(run(changed) - expected).max() < 1e-5


def test_compiled_products_have_no_activation() -> None:
    """OpenVINO does not see through the zero: its own list of nodes has the activation beside the product."""
    openvino, names = import_openvino(), []
    for graph in (model(ENDS["relu"]), separate_activations(model(ENDS["relu"]))):
        compiled = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "PERF_COUNT": True})
        request = compiled.create_infer_request()
        request.infer([X])
        names.append([each.node_type for each in request.profiling_info if each.status == each.Status.EXECUTED])
    assert "Add" not in names[0]
    assert "Add" in names[1]


def test_half_weights_count_and_others_do_not() -> None:
    """Half-precision weights are widened when a graph is compiled; quantized ones have kernels of their own."""
    assert zeros_added(separate_activations(model(ENDS["gelu"], weights="f16"))) == 1
    assert zeros_added(separate_activations(model(ENDS["gelu"], weights="scaled"))) == 0


def test_graphs_that_compute_in_half_precision() -> None:
    """Published ones do; OpenVINO computes them in f32."""
    graph = model(ENDS["gelu"], weights="half")
    expected = run(graph.clone(), X.astype(np.float16))
    changed = separate_activations(graph)
    assert zeros_added(changed) == 1
    assert np.abs(run(changed, X.astype(np.float16)) - expected).max() < 1e-2


def test_products_without_an_activation_stay() -> None:
    """Nothing is added where nothing would be fused, nor on other processors."""
    assert zeros_added(separate_activations(model(lambda ops, x: ops.softmax(x, -1)))) == 0


def test_other_processors_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the kernels of x86 were measured."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert zeros_added(separate_activations(model(ENDS["gelu"]))) == 0


@pytest.mark.parametrize("widened", [True, False])
def test_half_tables_stay(widened: bool) -> None:
    """A compiled table keeps its type if the graph widens its rows, and is widened whole if the graph computes in half
    precision; rows are the same."""
    openvino = import_openvino()
    from openvino import opset13 as ops

    table = numbers(9, 4).astype(np.float16)
    parameter = ops.parameter([-1], np.int64)
    rows = ops.gather(ops.constant(table), parameter, ops.constant(np.int64(0)))
    rows = ops.convert(rows, "f32") if widened else ops.convert(ops.multiply(rows, rows), "f32")
    graph = keep_half_tables(openvino.Model([rows], [parameter]))
    compiled = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = compiled.create_infer_request().infer([np.array([3, 8])])[0]
    expected = table[[3, 8]].astype(np.float32)
    assert np.allclose(found, expected if widened else expected**2, rtol=1e-3)
    nodes = compiled.get_runtime_model().get_ordered_ops()
    (read,) = (each for each in nodes if str(each.get_rt_info()["layerType"].astype(str)) == "Gather")
    assert read.input_value(0).get_element_type().get_type_name() == ("f16" if widened else "f32")


def resident_kb(file: Path) -> int:
    """Return the memory of this process that is this file's."""
    part = Path("/proc/self/smaps").read_text().partition(str(file))[2]
    return int(re.findall(r"Rss:\s+(\d+) kB", part)[0])


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="only Linux tells")
class TestPages:
    def test_weights_leave_memory_and_come_back(self, tmp_path: Path) -> None:
        """The pages of a mapped file are dropped; what is read afterwards is still the file's content."""
        file = tmp_path / "model.onnx_data"
        content = RANDOM.bytes(1 << 20)
        file.write_bytes(content)
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert mapped[:] == content
            assert resident_kb(file) == 1024
            release_pages(file)
            assert resident_kb(file) == 0
            assert mapped[:] == content

    def test_changes_are_kept(self, tmp_path: Path) -> None:
        """A private mapping that may have been written to is left alone."""
        file = tmp_path / "model.onnx_data"
        file.write_bytes(bytes(1 << 16))
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            mapped[:3] = b"new"
            release_pages(file)
            assert mapped[:3] == b"new"

    def test_a_graph_without_such_a_file(self, tmp_path: Path) -> None:
        """Small graphs hold their weights themselves."""
        release_pages(tmp_path / "model.onnx_data")
