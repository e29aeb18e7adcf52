"""Build a small ONNX graph: operators, constants, and the file they are written to.

Operators that changed between opsets are methods here, so that the same head can end a graph that Shoal builds (opset
20) and one that came with a model (11 or later). Equal input gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

OPSET = 20
IR_VERSION = 10
"""Opset 20 has Gelu and is supported by every engine version that Shoal supports; IR 10 is its contemporary."""

INLINE_BYTES = 2**28
"""Above this, constants go to a separate file, which is written tensor by tensor and mapped by engines. To write one
file of 1.2 GB takes 5.9 GB of memory, to load it 2.4. A protobuf message is limited to 2 GiB."""

FLOAT, INT64 = 1, 7
"""TensorProto's numbers of the two types; literals, so that importing this module does not import onnx."""

Array = npt.NDArray[Any]
ALIGN = 4096
"""Alignment of external tensors, so that engines can map them."""


class Constant(NamedTuple):
    """A constant of the graph. `load` provides the array when the file is written: a big model is never in memory
    twice."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    load: Callable[[], Array]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Graph:
    """Nodes and constants in creation order. Values are named by strings; names start with `prefix`."""

    def __init__(self, opset: int = OPSET, prefix: str = "") -> None:
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, Constant] = {}
        self._prefix = prefix
        self._node_count = 0

    def op(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Append a node with one output; return the output's name."""
        from onnx import helper

        self._node_count += 1
        out = name or f"{self._prefix}{kind}_{self._node_count}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], **attributes))
        return out

    def weight(self, name: str, shape: tuple[int, ...], load: Callable[[], Array]) -> str:
        """Add a float32 constant of the model."""
        name = self._prefix + name
        self.constants[name] = Constant(name, shape, np.dtype(np.float32), load)
        return name

    def integers(self, *values: int) -> str:
        """Add a one-dimensional int64 constant."""
        return self._small("i" + "_".join(map(str, values)), np.array(values, np.int64))

    def integer(self, value: int) -> str:
        """Add an int64 scalar."""
        return self._small(f"i{value}_scalar", np.array(value, np.int64))

    def indices(self, name: str, values: Sequence[int]) -> str:
        """Add a long one-dimensional int64 constant."""
        return self._small(name, np.array(values, np.int64))

    def number(self, value: float) -> str:
        """Add a float32 scalar."""
        return self._small(f"f{value!r}", np.array(value, np.float32))

    def size(self, value: str, axis: int) -> str:
        """Append the size of an axis, as int64 [1]."""
        return self.op("Slice", self.op("Shape", value), self.integers(axis), self.integers(axis + 1))

    def steps(self, value: str) -> str:
        """Append 0, 1, 2, ... for the second axis of [b, l], as int64 [l]."""
        length = self.op("Gather", self.op("Shape", value), self.integer(1))
        return self.op("Range", self.integer(0), length, self.integer(1))

    def cast_float(self, value: str) -> str:
        return self.op("Cast", value, to=FLOAT)

    def cast_int(self, value: str) -> str:
        return self.op("Cast", value, to=INT64)

    def unsqueeze(self, value: str, *axes: int) -> str:
        if self.opset < 13:
            return self.op("Unsqueeze", value, axes=list(axes))
        return self.op("Unsqueeze", value, self.integers(*axes))

    def reduce(self, kind: str, value: str, axis: int, *, keep: bool) -> str:
        if self.opset < (13 if kind == "ReduceSum" else 18):
            return self.op(kind, value, axes=[axis], keepdims=int(keep))
        return self.op(kind, value, self.integers(axis), keepdims=int(keep))

    def largest(self, value: str, count: int) -> tuple[str, str]:
        """Append the largest values of the last axis, in descending order, and their places."""
        from onnx import helper

        self._node_count += 1
        values, places = (f"{self._prefix}TopK_{self._node_count}_{part}" for part in ("values", "places"))
        self.nodes.append(helper.make_node("TopK", [value, self.integers(count)], [values, places], axis=-1))
        return values, places

    def layer_norm(self, value: str, weight: str, bias: str | None, epsilon: float) -> str:
        """Normalize over the last axis, with the biased variance."""
        if self.opset >= 17:
            shift = () if bias is None else (bias,)
            return self.op("LayerNormalization", value, weight, *shift, axis=-1, epsilon=epsilon)
        centred = self.op("Sub", value, self.reduce("ReduceMean", value, -1, keep=True))
        variance = self.reduce("ReduceMean", self.op("Mul", centred, centred), -1, keep=True)
        scaled = self.op("Div", centred, self.op("Sqrt", self.op("Add", variance, self.number(epsilon))))
        scaled = self.op("Mul", scaled, weight)
        return scaled if bias is None else self.op("Add", scaled, bias)

    def rms_norm(self, value: str, weight: str, epsilon: float) -> str:
        """Divide by the root of the mean square over the last axis."""
        mean = self.reduce("ReduceMean", self.op("Pow", value, self.number(2.0)), -1, keep=True)
        length = self.op("Sqrt", self.op("Add", mean, self.number(epsilon)))
        return self.op("Mul", self.op("Mul", value, self.op("Div", self.number(1.0), length)), weight)

    def activate(self, kind: str, value: str) -> str:
        """Append the activation of that name (contract.types.Activation)."""
        if kind == "identity":
            return value
        if kind in _PLAIN:
            return self.op(_PLAIN[kind], value)
        if kind == "silu":
            return self.op("Mul", value, self.op("Sigmoid", value))
        if kind == "quick_gelu":
            return self.op("Mul", value, self.op("Sigmoid", self.op("Mul", value, self.number(1.702))))
        if self.opset >= 20:
            return self.op("Gelu", value, approximate="tanh" if kind == "gelu_tanh" else "none")
        # Only Dense layers of shipped graphs get here, and torch.nn.GELU() is the exact variant.
        inner = self.op("Erf", self.op("Div", value, self.number(float(np.sqrt(2.0)))))
        half = self.op("Mul", value, self.number(0.5))
        return self.op("Mul", half, self.op("Add", inner, self.number(1.0)))

    def parameters(self) -> int:
        """Count the learned numbers of the graph."""
        return sum(c.nbytes // c.dtype.itemsize for c in self.constants.values() if c.shape and c.dtype.kind == "f")

    def _small(self, name: str, value: Array) -> str:
        name = self._prefix + name
        self.constants.setdefault(name, Constant(name, value.shape, value.dtype, lambda: value))
        return name


class BuiltGraph(NamedTuple):
    """A graph that was written. `files` are the names of the graph and of a separate weights file, if any."""

    parameters: int
    files: tuple[str, ...]


_PLAIN = {"tanh": "Tanh", "relu": "Relu", "sigmoid": "Sigmoid"}


def write_graph(
    graph: Graph,
    path: Path,
    *,
    inputs: Sequence[str | tuple[str, Sequence[int | str]]],
    outputs: Sequence[tuple[str, Sequence[int | str]]],
    progress: Callable[[float], None] | None = None,
) -> BuiltGraph:
    """Write the graph to `path`, and its constants to `<name>_data` beside it if they are too large.

    `inputs` are int64 [b, l], or with (name, axes) float32 [b, *axes] as `outputs` are; "l" is the axis of the tokens.
    """
    import onnx
    from onnx import helper

    large = sum(constant.nbytes for constant in graph.constants.values()) > INLINE_BYTES
    external = path.with_name(f"{path.name}_data") if large else None
    proto = helper.make_graph(
        graph.nodes,
        "shoal",
        [
            helper.make_tensor_value_info(tensor, INT64, ["b", "l"]) if isinstance(tensor, str) else _floats(tensor)
            for tensor in inputs
        ],
        [_floats(tensor) for tensor in outputs],
    )
    _store(list(graph.constants.values()), proto.initializer, external, progress)
    model = helper.make_model(
        proto, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="shoal"
    )
    path.write_bytes(model.SerializeToString(deterministic=True))
    onnx.checker.check_model(str(path))
    return BuiltGraph(graph.parameters(), tuple(file.name for file in (path, external) if file is not None))


def _floats(tensor: tuple[str, Sequence[int | str]]) -> ValueInfoProto:
    from onnx import helper

    name, axes = tensor
    return helper.make_tensor_value_info(name, FLOAT, ["b", *axes])


def _store(
    constants: Sequence[Constant], into: Any, external: Path | None, progress: Callable[[float], None] | None
) -> None:
    total, done = sum(constant.nbytes for constant in constants) or 1, 0
    file = external.open("wb") if external else None
    try:
        for constant in constants:
            tensor = into.add()
            describe(constant, tensor)
            data = constant.load()
            if file is not None and constant.nbytes >= ALIGN:
                _append(file, tensor, np.ascontiguousarray(data).data)
            else:
                tensor.raw_data = data.tobytes()
            done += constant.nbytes
            if progress is not None:
                progress(done / total)
    finally:
        if file is not None:
            file.close()


def move_constants(model: ModelProto, external: Path) -> None:
    """Move the contents of a model's large constants to a new file, which lies beside its graph."""
    with external.open("wb") as file:
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) >= ALIGN:
                _append(file, tensor, tensor.raw_data)
                tensor.ClearField("raw_data")


def _append(file: BinaryIO, tensor: TensorProto, data: bytes | memoryview) -> None:
    """Append a tensor's contents to a file of weights."""
    file.write(b"\0" * (-file.tell() % ALIGN))
    begin = file.tell()
    file.write(data)
    _point(tensor, file.name, begin, file.tell() - begin)


def describe(constant: Constant, tensor: TensorProto) -> None:
    """Set name, type and shape; the caller sets the data."""
    from onnx import helper

    tensor.name = constant.name
    tensor.data_type = helper.np_dtype_to_tensor_dtype(constant.dtype)
    tensor.dims.extend(constant.shape)


def _point(tensor: Any, location: str, offset: int, length: int) -> None:
    from onnx import TensorProto

    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", Path(location).name), ("offset", str(offset)), ("length", str(length))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
