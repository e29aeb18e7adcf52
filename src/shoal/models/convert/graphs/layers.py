"""Build the layers that all transformers share: linear maps, norms, attention and feed-forward.

The attention scale is folded into the query's weights. Attention remains the plain MatMul, Add, Softmax, MatMul that
engines recognize and fuse.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shoal.errors import ModelFileError
from shoal.models.convert.contract.architecture import Attention, Experts, FeedForward, Layer, Linear, Rotary, Shape
from shoal.models.convert.contract.weights import Floats, Weights
from shoal.models.convert.graphs.adapters import AdapterMaps
from shoal.models.convert.graphs.builder import Graph
from shoal.models.convert.graphs.experts import append_experts
from shoal.models.convert.graphs.relative import RelativeScores
from shoal.models.convert.graphs.rotary import Rotations
from shoal.models.convert.graphs.tensors import NormWeights, add_tensor, append_norm

MASKED = -32768.0
"""Added to the scores of padding: its exp() is zero, and a row of padding only gives numbers, not NaN.

A power of two, exact in float16 and bfloat16, because an engine may compute (1 - mask) * M as M - mask * M and round
only the product: with -1e9 OpenVINO adds 1.8e6 to every score in bfloat16, and float32 then keeps eighths of a score.
"""

QUERY_ORDER = [0, 2, 1, 3]
KEY_ORDER = [0, 2, 3, 1]


class Layers:
    """Appends layers of `shape` to a graph, over values [b, l, hidden], with weights whose names start with `prefix`.
    `positions`: the longest input in tokens, for rotary embeddings.

    Every method returns the name of its result. Raises ModelFileError for tensors that are missing or of another shape.
    """

    def __init__(self, graph: Graph, shape: Shape, weights: Weights, prefix: str, positions: int = 0) -> None:
        self.graph = graph
        self.shape = shape
        self.weights = weights
        self.prefix = prefix
        self.relative: RelativeScores | None = None
        self.adapters: AdapterMaps | None = None
        self._rotations = Rotations(graph, shape.head_size, positions)

    def layer(self, value: str, layer: Layer, bias: str | None = None) -> str:
        """Append attention and feed-forward, each with its residual. `bias` is added to the scores."""
        graph, norms, stem = self.graph, layer.norms, layer.stem
        read = self._maybe_norm(value, stem, norms.before_attention)
        attended = self._maybe_norm(self._attention(read, layer, bias), stem, norms.attention)
        if norms.summed_attention:
            attended = self.norm(graph.op("Add", attended, value), stem + norms.summed_attention)
        value = self._maybe_norm(graph.op("Add", attended, value), stem, norms.after_attention)
        read = self._maybe_norm(value, stem, norms.before_feed_forward)
        inner = self._maybe_norm(self.feed_forward(read, layer.feed_forward, stem), stem, norms.feed_forward)
        return self._maybe_norm(graph.op("Add", inner, value), stem, norms.after_feed_forward)

    def _maybe_norm(self, value: str, stem: str, name: str) -> str:
        return self.norm(value, stem + name) if name else value

    def _attention(self, value: str, layer: Layer, bias: str | None) -> str:
        attention, shape, stem = layer.attention, self.shape, layer.stem
        query, key, content, out = attention.maps(shape)
        queries = self._heads(value, query, stem, 1.0 if attention.query_norm else shape.scale)
        queries = self._norm_heads(queries, attention, stem + attention.query_norm, shape.scale)
        keys = self._norm_heads(self._heads(value, key, stem), attention, stem + attention.key_norm)
        contents = self._transpose(self._heads(value, content, stem), QUERY_ORDER)
        turned, keys = self._rotate(queries, layer.rotary), self._keys(keys, layer.rotary)
        if self.relative is not None:
            bias = self.relative.add(turned, keys, stem, bias)
        mixed = self._mix(turned, keys, contents, bias)
        return self._map(mixed, out, stem)

    def attend(self, query: str, key: str, content: str, bias: str | None, out: str) -> str:
        """Attend, with queries and contents [b, heads, l, size], scaled, and keys [b, heads, size, l]; `out`: the last
        map."""
        hidden = self.shape.hidden
        return self.linear(self._mix(query, key, content, bias), out, (hidden, hidden))

    def _mix(self, query: str, key: str, content: str, bias: str | None) -> str:
        """Return the contents weighed by the scores, [b, l, heads * size]."""
        graph, width = self.graph, self.shape.heads * self.shape.head_size
        scores = graph.op("MatMul", query, self._repeat(key))
        if bias is not None:
            scores = graph.op("Add", scores, bias)
        mixed = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), self._repeat(content))
        return graph.op("Reshape", self._transpose(mixed, QUERY_ORDER), graph.integers(0, 0, width))

    def _repeat(self, value: str) -> str:
        """Repeat each head of [b, kv_heads, m, n] for the query heads that share it: [b, heads, m, n]."""
        graph, shape = self.graph, self.shape
        shared = shape.heads // shape.kv_heads
        if shared == 1:
            return value
        sizes = graph.op("Shape", value)
        start, end = (graph.op("Slice", sizes, graph.integers(i), graph.integers(i + 2)) for i in (0, 2))
        repeated = graph.op("Concat", start, graph.integers(shared), end, axis=0)
        wide = graph.op("Expand", graph.unsqueeze(value, 2), repeated)
        batch = graph.op("Slice", sizes, graph.integers(0), graph.integers(1))
        return graph.op("Reshape", wide, graph.op("Concat", batch, graph.integers(shape.heads), end, axis=0))

    def _heads(self, value: str, linear: Linear, stem: str, scale: float = 1.0) -> str:
        """Map to [b, l, heads, size]."""
        return self._by_head(self._map(value, linear, stem, scale), linear.out)

    def _by_head(self, value: str, width: int) -> str:
        size = self.shape.head_size
        return self.graph.op("Reshape", value, self.graph.integers(0, 0, width // size, size))

    def _norm_heads(self, value: str, attention: Attention, name: str, scale: float = 1.0) -> str:
        """Normalize [b, l, heads, size] if the attention has norms, with the result times `scale`."""
        if not attention.query_norm:
            return value
        if not attention.norm_whole:
            return self.norm(value, name, self.shape.head_size, scale)
        width = self.shape.heads * self.shape.head_size
        whole = self.graph.op("Reshape", value, self.graph.integers(0, 0, width))
        return self._by_head(self.norm(whole, name, width, scale), width)

    def _rotate(self, value: str, rotary: Rotary | None) -> str:
        """Return [b, heads, l, size], rotated by position."""
        value = self._transpose(value, QUERY_ORDER)
        return value if rotary is None else self._rotations.rotate(value, rotary)

    def _keys(self, value: str, rotary: Rotary | None) -> str:
        """Return [b, heads, size, l], rotated by position."""
        if rotary is None:
            return self._transpose(value, KEY_ORDER)
        return self._transpose(self._rotate(value, rotary), [0, 1, 3, 2])

    def _transpose(self, value: str, order: list[int]) -> str:
        return self.graph.op("Transpose", value, perm=order)

    def feed_forward(self, value: str, parts: FeedForward | Experts, stem: str = "") -> str:
        if isinstance(parts, Experts):
            return append_experts(self.graph, self.weights, value, self.shape, parts, (self.prefix, stem))
        activation = self.shape.activation
        up, gate, down = parts.maps(self.shape)
        if gate is None:
            return self._map(self.graph.activate(activation, self._map(value, up, stem)), down, stem)
        opened = self.graph.activate(activation, self._map(value, gate, stem))
        return self._map(self.graph.op("Mul", opened, self._map(value, up, stem)), down, stem)

    def split(self, projected: str, order: list[int]) -> str:
        """Split [b, l, hidden] by heads: [b, l, heads, size], with the axes in `order`."""
        return self._transpose(self._by_head(projected, self.shape.hidden), order)

    def linear(self, value: str, name: str, shape: tuple[int, int], *, bias: bool = True) -> str:
        """Append value @ weight.T + bias; `shape` is (out, in) as stored."""
        return self._map(value, Linear(name, *shape, bias), "")

    def _map(self, value: str, linear: Linear, stem: str, scale: float = 1.0) -> str:
        """Append a map, times `scale`."""
        weights, stored, rows, factor = self.weights, linear.stored, linear.rows, np.float32(scale)
        weight, bias = (f"{self.prefix}{stem}{linear.name}.{part}" for part in ("weight", "bias"))
        weights.check(weight, stored)
        if linear.bias:
            weights.check(bias, stored[:1])
        elif bias in weights:
            raise ModelFileError(
                "is stored, but the configuration says that there is none", file=weights.where, key=bias
            )
        made = self.affine(
            value,
            stem + linear.label,
            (linear.out, linear.into),
            lambda: weights.get(weight, stored)[rows] * factor,
            (lambda: weights.get(bias, stored[:1])[rows] * factor) if linear.bias else None,
        )
        return made if self.adapters is None else self.adapters.add(made, value, linear, stem, scale)

    def affine(
        self,
        value: str,
        name: str,
        shape: tuple[int, int],
        weight: Callable[[], Floats],
        bias: Callable[[], Floats] | None,
    ) -> str:
        """Append value @ weight.T + bias, with a weight of `shape` and a bias created when the file is written."""
        graph = self.graph
        w = graph.weight(f"{name}.weight", shape[::-1], lambda: np.ascontiguousarray(weight().T))
        product = graph.op("MatMul", value, w)
        return product if bias is None else graph.op("Add", product, graph.weight(f"{name}.bias", shape[:1], bias))

    def norm(self, value: str, name: str, width: int = 0, scale: float = 1.0) -> str:
        """Append the norm over the last axis, of `width` (0: the hidden size), times `scale`."""
        place = NormWeights(self.prefix + name, width or self.shape.hidden, name, scale)
        return append_norm(self.graph, self.weights, value, self.shape.norm, place)

    def constant(self, name: str, shape: tuple[int, ...]) -> str:
        """Add a tensor unchanged."""
        return add_tensor(self.graph, self.weights, self.prefix + name, shape, name)
