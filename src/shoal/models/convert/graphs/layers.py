"""Build the layers that all transformers share: linear maps, norms, attention and feed-forward.

The attention scale is folded into the query's weights. Attention remains the plain MatMul, Add, Softmax, MatMul that
engines recognize and fuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from shoal.models.convert.contract.types import Activation
from shoal.models.convert.contract.weights import Floats, Weights
from shoal.models.convert.graphs.builder import Graph
from shoal.models.convert.graphs.tensors import add_tensor, append_layer_norm

MASKED = -32768.0
"""Added to the scores of padding: its exp() is zero, and a row of padding only gives numbers, not NaN.

A power of two, exact in float16 and bfloat16, because an engine may compute (1 - mask) * M as M - mask * M and round
only the product: with -1e9 OpenVINO adds 1.8e6 to every score in bfloat16, and float32 then keeps eighths of a score.
"""

QUERY_ORDER = [0, 2, 1, 3]
KEY_ORDER = [0, 2, 3, 1]


class LayerNames(NamedTuple):
    """Names of a layer's parts, under the layer's own prefix."""

    query: str
    key: str
    value: str
    out: str
    attention_norm: str
    up: str
    down: str
    output_norm: str


class Sizes(Protocol):
    """The numbers of a transformer's layers."""

    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def activation(self) -> Activation: ...


class Layers:
    """Appends layers of `sizes` to a graph, over values [b, l, hidden], with weights whose names start with `prefix`.

    Every method returns the name of its result. Raises ModelFileError for tensors that are missing or of another shape.
    """

    def __init__(self, graph: Graph, sizes: Sizes, weights: Weights, prefix: str) -> None:
        self.graph = graph
        self.sizes = sizes
        self.weights = weights
        self.prefix = prefix

    def layer(self, value: str, bias: str | None, prefix: str, names: LayerNames, *, pre_norm: bool = False) -> str:
        """Append attention and feed-forward, each with its residual. `bias` is added to the scores. `pre_norm`: the
        norms come before the two parts, not after the sums."""
        graph = self.graph
        attention_norm, output_norm = prefix + names.attention_norm, prefix + names.output_norm
        read = self.norm(value, attention_norm) if pre_norm else value
        size = self.sizes.hidden // self.sizes.heads
        query = self._heads(read, prefix + names.query, QUERY_ORDER, 1.0 / math.sqrt(size))
        key = self._heads(read, prefix + names.key, KEY_ORDER)
        content = self._heads(read, prefix + names.value, QUERY_ORDER)
        attended = self.attend(query, key, content, bias, prefix + names.out)
        value = graph.op("Add", attended, value)
        if not pre_norm:
            value = self.norm(value, attention_norm)
        read = self.norm(value, output_norm) if pre_norm else value
        value = graph.op("Add", self.feed_forward(read, prefix + names.up, prefix + names.down), value)
        return value if pre_norm else self.norm(value, output_norm)

    def attend(self, query: str, key: str, content: str, bias: str | None, out: str) -> str:
        """Attend, with queries and contents [b, heads, l, size], scaled, and keys [b, heads, size, l]; `out`: the last
        map."""
        graph, hidden = self.graph, self.sizes.hidden
        scores = graph.op("MatMul", query, key)
        if bias is not None:
            scores = graph.op("Add", scores, bias)
        mixed = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), content)
        joined = graph.op("Reshape", graph.op("Transpose", mixed, perm=[0, 2, 1, 3]), graph.integers(0, 0, hidden))
        return self.linear(joined, out, (hidden, hidden))

    def feed_forward(self, value: str, up: str, down: str) -> str:
        hidden, inner = self.sizes.hidden, self.sizes.intermediate
        wide = self.graph.activate(self.sizes.activation, self.linear(value, up, (inner, hidden)))
        return self.linear(wide, down, (hidden, inner))

    def split(self, projected: str, order: list[int]) -> str:
        """Split [b, l, hidden] by heads: [b, l, heads, size], with the axes in `order`."""
        return self.graph.op("Transpose", self.graph.op("Reshape", projected, self._parts()), perm=order)

    def linear(self, value: str, name: str, shape: tuple[int, int], scale: float = 1.0) -> str:
        """Append value @ weight.T + bias, both times `scale`; `shape` is (out, in) as stored."""
        weight, bias = f"{self.prefix}{name}.weight", f"{self.prefix}{name}.bias"
        self.weights.check(weight, shape)
        self.weights.check(bias, shape[:1])
        factor = np.float32(scale)
        return self.affine(
            value,
            name,
            shape,
            lambda: self.weights.get(weight, shape) * factor,
            lambda: self.weights.get(bias, shape[:1]) * factor,
        )

    def affine(
        self,
        value: str,
        name: str,
        shape: tuple[int, int],
        weight: Callable[[], Floats],
        bias: Callable[[], Floats],
    ) -> str:
        """Append value @ weight.T + bias, with a weight of `shape` and a bias created when the file is written."""
        graph = self.graph
        w = graph.weight(f"{name}.weight", shape[::-1], lambda: np.ascontiguousarray(weight().T))
        b = graph.weight(f"{name}.bias", shape[:1], bias)
        return graph.op("Add", graph.op("MatMul", value, w), b)

    def norm(self, value: str, name: str) -> str:
        sizes = self.sizes
        return append_layer_norm(
            self.graph, self.weights, value, self.prefix + name, sizes.hidden, sizes.norm_eps, name
        )

    def constant(self, name: str, shape: tuple[int, ...]) -> str:
        """Add a tensor unchanged."""
        return add_tensor(self.graph, self.weights, self.prefix + name, shape, name)

    def _heads(self, value: str, name: str, order: list[int], scale: float = 1.0) -> str:
        hidden, parts = self.sizes.hidden, self._parts()
        projected = self.linear(value, name, (hidden, hidden), scale)
        return self.graph.op("Transpose", self.graph.op("Reshape", projected, parts), perm=order)

    def _parts(self) -> str:
        heads = self.sizes.heads
        return self.graph.integers(0, 0, heads, self.sizes.hidden // heads)
