"""Build the scores of queries and keys with relative positions (DeBERTa): a matrix product with one vector for each
distance, then a shift of each row by its own place, so that the score of query i and key j is in column j."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from shoal.models.convert.contract.architecture import Relative, Shape
from shoal.models.convert.contract.weights import Floats, Weights
from shoal.models.convert.graphs.builder import Graph
from shoal.models.convert.graphs.tensors import norm_names

Rows = np.ndarray[tuple[int], np.dtype[np.int64]]


class RelativeWeights(NamedTuple):
    """The vectors of relative positions. Names of stored tensors begin with `prefix`. Raises ModelFileError for tensors
    that are missing or of another shape."""

    weights: Weights
    prefix: str
    shape: Shape
    relative: Relative

    @property
    def width(self) -> int:
        return self.shape.heads * self.shape.head_size

    def check(self, name: str) -> None:
        """Check what `mapped` reads."""
        hidden = self.shape.hidden
        self.weights.check(f"{self.prefix}{self.relative.tensor}.weight", (self.relative.rows, hidden))
        self.weights.check(f"{self.prefix}{name}.weight", (self.width, hidden))
        self.weights.check(f"{self.prefix}{name}.bias", (self.width,))
        if self.relative.norm:
            for each in norm_names(self.weights, self.prefix + self.relative.norm):
                self.weights.check(each, (hidden,))

    def mapped(self, name: str, scale: float) -> Floats:
        """Return the vectors after a layer's map, times `scale`, [rows, heads * size]."""
        get, prefix, hidden = self.weights.get, self.prefix, self.shape.hidden
        table = get(f"{prefix}{self.relative.tensor}.weight", (self.relative.rows, hidden))
        if self.relative.norm:
            weight, bias = norm_names(self.weights, prefix + self.relative.norm)
            spread = np.sqrt(table.var(axis=-1, keepdims=True) + np.float32(self.shape.norm.eps))
            table = (table - table.mean(axis=-1, keepdims=True)) / spread * get(weight, (hidden,)) + get(
                bias, (hidden,)
            )
        weight, bias = f"{prefix}{name}.weight", f"{prefix}{name}.bias"
        product: Floats = table @ get(weight, (self.width, hidden)).T + get(bias, (self.width,))
        return product * np.float32(scale)


class RelativeScores:
    """Appends scores to a graph, over at most `positions` tokens. The vectors do not depend on the input: they are
    mapped when the graph is written."""

    def __init__(self, graph: Graph, source: RelativeWeights, positions: int) -> None:
        self._graph = graph
        self._source = source
        self._positions = positions
        self._rows: dict[int, str] = {}

    def add(self, queries: str, keys: str, stem: str, bias: str | None) -> str | None:
        """Add the scores to `bias`. `queries` [b, heads, l, size] are scaled, `keys` [b, heads, size, l] are not."""
        graph, relative, shape = self._graph, self._source.relative, self._source.shape
        if relative.key:
            vectors = self._vectors(stem + relative.key, 1.0, sign=-1)
            bias = self._plus(bias, self._shift(graph.op("MatMul", queries, vectors)))
        if relative.query:
            vectors = self._vectors(stem + relative.query, shape.scale, sign=1)
            rows = graph.op("Transpose", keys, perm=[0, 1, 3, 2])
            scores = self._shift(graph.op("MatMul", rows, vectors))
            bias = self._plus(bias, graph.op("Transpose", scores, perm=[0, 1, 3, 2]))
        return bias

    def _plus(self, bias: str | None, scores: str) -> str:
        return scores if bias is None else self._graph.op("Add", scores, bias)

    def _vectors(self, name: str, scale: float, sign: int) -> str:
        """Return a vector for each of the 2 l distances from -(l - 1) on, [heads, size, 2 l]. `sign`: 1 if they are
        query - key, -1 if key - query."""
        graph, source = self._graph, self._source
        source.check(name)
        table = graph.weight(
            f"{name}.positions", (source.relative.rows, source.width), lambda: source.mapped(name, scale)
        )
        picked = graph.op("Gather", table, self._picked(sign))
        heads = graph.op("Reshape", picked, graph.integers(-1, source.shape.heads, source.shape.head_size))
        return graph.op("Transpose", heads, perm=[1, 2, 0])

    def _picked(self, sign: int) -> str:
        """Return the rows for the 2 l distances, of the constant that has them for all inputs."""
        if sign not in self._rows:
            graph, most = self._graph, self._positions
            every = graph.indices(f"relative_rows.{sign}", relative_rows(most, self._source.relative, sign))
            length = graph.size("input_ids", 1)
            start, end = (graph.op(kind, graph.integers(most), length) for kind in ("Sub", "Add"))
            self._rows[sign] = graph.op("Slice", every, start, end, graph.integers(0))
        return self._rows[sign]

    def _shift(self, scores: str) -> str:
        """Turn [b, heads, l, 2 l], by row and distance from -(l - 1) on, into [b, heads, l, l], by row and column: the
        distance is column - row.

        In one flat row of numbers, the wanted ones of each row begin 2 l - 1 after those of the row before.
        """
        graph, heads = self._graph, self._source.shape.heads
        length = graph.size("input_ids", 1)
        start = graph.op("Sub", length, graph.integers(1))
        stride = graph.op("Add", length, start)
        flat = graph.op("Reshape", scores, graph.integers(0, heads, -1))
        end = graph.op("Add", start, graph.op("Mul", length, stride))
        cut = graph.op("Slice", flat, start, end, graph.integers(2))
        rows = graph.op("Reshape", cut, graph.op("Concat", graph.integers(0, heads), length, stride, axis=0))
        return graph.op("Slice", rows, graph.integers(0), length, graph.integers(3))


def relative_rows(most: int, relative: Relative, sign: int) -> list[int]:
    """Return the rows for the distances from -(most - 1) to `most`, times `sign`. Computed in float32, as the models
    were trained."""
    distances = sign * np.arange(1 - most, most + 1)
    places = distances
    if relative.buckets:
        middle = relative.buckets // 2
        far: Floats = np.maximum(np.abs(distances), middle).astype(np.float32) / np.float32(middle)
        share = np.log(far) / np.float32(math.log((relative.maximum - 1) / middle)) * np.float32(middle - 1)
        bent = np.sign(distances) * (np.ceil(share).astype(np.int64) + middle)
        places = np.where(np.abs(distances) <= middle, distances, bent)
    rows: list[int] = np.clip(places + relative.rows // 2, 0, relative.rows - 1).tolist()
    return rows
