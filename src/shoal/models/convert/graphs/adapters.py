"""Build adapters of low rank (LoRA, Hu et al. 2022) beside the maps that they change, so that each row of a batch has
its own task: x W + ((x A) * chosen) B.

A and B hold the factors of all tasks side by side, and `chosen` is zero for all but the row's own. One set of weights
serves every task; the factors are 2 % of it for Jina's five.
"""

from __future__ import annotations

import numpy as np

from shoal.models.convert.contract.adapters import has_factors, read_factors
from shoal.models.convert.contract.architecture import Adapters, Linear
from shoal.models.convert.contract.spec import ADAPTERS
from shoal.models.convert.contract.weights import Floats, Weights
from shoal.models.convert.graphs.builder import Graph


class AdapterMaps:
    """Appends the changes of adapters to a graph, for matrices whose names in `weights` start with `prefix`.

    Raises ModelFileError for factors that are missing or of another shape.
    """

    def __init__(self, graph: Graph, weights: Weights, prefix: str, adapters: Adapters) -> None:
        self._graph = graph
        self._weights = weights
        self._prefix = prefix
        self._adapters = adapters
        self._width = len(adapters.tasks) * adapters.rank
        self._chosen = self._choose()
        self._narrowed: dict[tuple[str, str], str] = {}

    def _choose(self) -> str:
        """The factors that count, as ones, [b, 1, tasks * rank]."""
        graph, tasks, rank = self._graph, len(self._adapters.tasks), self._adapters.rank
        table = np.vstack([np.zeros((1, self._width)), np.eye(tasks).repeat(rank, axis=1)]).astype(np.float32)
        first = graph.op("Slice", ADAPTERS, graph.integers(0), graph.integers(1), graph.integers(1))
        return graph.op("Gather", graph.weight("adapters/chosen", table.shape, lambda: table), first)

    def add(self, product: str, value: str, linear: Linear, stem: str, scale: float) -> str:
        """Add the change of a map of `value` to its `product`, both times `scale`."""
        name = f"{stem}{linear.name}"
        stored = f"{self._prefix}{name}.weight"
        if not has_factors(self._weights, stored):
            return product

        def load() -> Floats:
            tall = self._read(stored, linear.stored)[0][:, linear.rows] * np.float32(scale)
            return np.ascontiguousarray(tall.transpose(0, 2, 1).reshape(self._width, linear.out))

        up = self._graph.weight(f"{stem}{linear.label}.adapters.up", (self._width, linear.out), load)
        return self._graph.op("Add", product, self._graph.op("MatMul", self._narrow(value, name, linear), up))

    def _narrow(self, value: str, name: str, linear: Linear) -> str:
        """The chosen of x A, which queries, keys and values of one matrix share."""
        stored = f"{self._prefix}{name}.weight"

        def load() -> Floats:
            wide = self._read(stored, linear.stored)[1]
            return np.ascontiguousarray(wide.reshape(self._width, linear.into).T)

        if (value, name) not in self._narrowed:
            down = self._graph.weight(f"{name}.adapters.down", (linear.into, self._width), load)
            inner = self._graph.op("MatMul", value, down)
            self._narrowed[value, name] = self._graph.op("Mul", inner, self._chosen)
        return self._narrowed[value, name]

    def add_rows(self, rows: str, table: str, shape: tuple[int, int], ids: str) -> str:
        """Add to `rows` [b, l, width] the changes of the rows `ids` of a table of this shape."""
        graph, stored = self._graph, f"{self._prefix}{table}.weight"
        if not has_factors(self._weights, stored):
            return rows

        def load() -> Floats:
            tall = self._read(stored, shape)[0]
            return np.ascontiguousarray(tall.transpose(1, 0, 2).reshape(shape[0], self._width))

        down = graph.weight(f"{table}.adapters.down", (shape[0], self._width), load)
        up = graph.weight(
            f"{table}.adapters.up",
            (self._width, shape[1]),
            lambda: self._read(stored, shape)[1].reshape(self._width, shape[1]),
        )
        inner = graph.op("Mul", graph.op("Gather", down, ids), self._chosen)
        return graph.op("Add", rows, graph.op("MatMul", inner, up))

    def _read(self, stored: str, shape: tuple[int, int]) -> tuple[Floats, Floats]:
        return read_factors(self._weights, self._adapters, stored, shape)
