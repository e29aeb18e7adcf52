"""Build a feed-forward of experts: each expert computes only the tokens that are sent to it."""

from __future__ import annotations

import numpy as np

from shoal.models.convert.contract.architecture import Experts, Shape
from shoal.models.convert.contract.weights import Weights
from shoal.models.convert.graphs.builder import Graph
from shoal.models.convert.graphs.tensors import add_matrix, add_tensor


def append_experts(
    graph: Graph, weights: Weights, value: str, shape: Shape, parts: Experts, names: tuple[str, str]
) -> str:
    """Append the experts over [b, l, hidden]. `names`: what precedes the names of the stored tensors, and the layer's
    own name. Raises ModelFileError for tensors that are missing or of another shape."""
    return _Builder(graph, weights, shape, parts, names).build(value)


class _Builder:
    def __init__(self, graph: Graph, weights: Weights, shape: Shape, parts: Experts, names: tuple[str, str]) -> None:
        self.graph = graph
        self.weights = weights
        self.shape = shape
        self.parts = parts
        self.prefix, self.stem = names

    def build(self, value: str) -> str:
        """Every token is listed once for each of its experts: item token * top + rank."""
        graph, hidden, top = self.graph, self.shape.hidden, self.parts.top
        rows = graph.op("Reshape", value, graph.integers(-1, hidden))
        scores, experts = self._route(rows)
        sent = graph.op("Reshape", experts, graph.integers(-1))
        items = [self._items(sent, expert) for expert in range(self.parts.count)]
        results = [self._expert(rows, expert, each) for expert, each in enumerate(items)]
        in_order = graph.op("Gather", graph.op("Concat", *results, axis=0), self._places(sent, items))
        by_token = graph.op("Reshape", in_order, graph.integers(-1, top, hidden))
        mixed = graph.op("MatMul", graph.unsqueeze(scores, 1), by_token)
        bias = self._tensor(self.parts.bias, (hidden,))
        return graph.op("Add", graph.op("Reshape", mixed, graph.op("Shape", value)), bias)

    def _route(self, rows: str) -> tuple[str, str]:
        """Return the weights and numbers of each token's experts, [tokens, top]."""
        graph, parts = self.graph, self.parts
        stored = f"{self.prefix}{self.stem}{parts.router}.weight"
        router = add_matrix(graph, self.weights, stored, (parts.count, self.shape.hidden), f"{self.stem}{parts.router}")
        shares = graph.op("Softmax", graph.op("MatMul", rows, router), axis=-1)
        return graph.largest(shares, parts.top)

    def _items(self, sent: str, expert: int) -> str:
        """Return the numbers of the items that are sent to an expert."""
        graph = self.graph
        found = graph.op("NonZero", graph.op("Equal", sent, graph.integer(expert)))
        return graph.op("Reshape", found, graph.integers(-1))

    def _expert(self, rows: str, expert: int, items: str) -> str:
        graph, parts, shape = self.graph, self.parts, self.shape
        tokens = graph.op("Gather", rows, graph.op("Div", items, graph.integer(parts.top)))
        inner = graph.op("MatMul", tokens, self._matrix(parts.up, expert, flip=True))
        return graph.op("MatMul", graph.activate(shape.activation, inner), self._matrix(parts.down, expert, flip=False))

    def _places(self, sent: str, items: list[str]) -> str:
        """Return where the result of each item is among those of all experts in turn."""
        graph = self.graph
        order = graph.op("Concat", *items, axis=0)
        count = graph.op("Squeeze", graph.op("Shape", sent))
        steps = graph.op("Range", graph.integer(0), count, graph.integer(1))
        return graph.op("ScatterElements", order, order, steps, axis=0)

    def _matrix(self, name: str, expert: int, *, flip: bool) -> str:
        """Add an expert's matrix [intermediate, hidden], or with `flip` its transpose."""
        inner, hidden, stored = self.shape.intermediate, self.shape.hidden, f"{self.prefix}{self.stem}{name}"
        whole, rows = (self.parts.count * inner, hidden), slice(expert * inner, (expert + 1) * inner)
        self.weights.check(stored, whole)
        return self.graph.weight(
            f"{self.stem}{name}.{expert}",
            (hidden, inner) if flip else (inner, hidden),
            lambda: np.ascontiguousarray(
                self.weights.get(stored, whole)[rows].T if flip else self.weights.get(stored, whole)[rows]
            ),
        )

    def _tensor(self, name: str, shape: tuple[int, ...]) -> str:
        return add_tensor(self.graph, self.weights, f"{self.prefix}{self.stem}{name}", shape, self.stem + name)
