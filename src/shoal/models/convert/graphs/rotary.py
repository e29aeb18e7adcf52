"""Append rotary position embeddings: each pair of a head's numbers is rotated by an angle that grows with the position.

Sines and cosines are constants. An engine that runs in bfloat16 cannot tell position 257 from 258, and so cannot
compute them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shoal.models.convert.contract.architecture import Rotary
from shoal.models.convert.contract.weights import Floats
from shoal.models.convert.graphs.builder import Graph


class Rotations:
    """Rotates heads of `size` numbers in a graph, over at most `positions` tokens. Each rotation's tables are added
    once."""

    def __init__(self, graph: Graph, size: int, positions: int) -> None:
        self._graph = graph
        self._size = size
        self._positions = positions
        self._tables: dict[Rotary, tuple[str, str]] = {}

    def rotate(self, value: str, rotary: Rotary) -> str:
        """Rotate [b, heads, l, size]."""
        width = 2 * len(rotary.frequencies)
        if width == self._size:
            return self._turn(value, rotary)
        front = self._turn(self._cut(value, 0, width), rotary)
        return self._graph.op("Concat", front, self._cut(value, width, self._size), axis=-1)

    def _turn(self, value: str, rotary: Rotary) -> str:
        """Append value * cos + (-second half, first half) * sin, a form that engines recognize."""
        graph, half = self._graph, len(rotary.frequencies)
        if rotary not in self._tables:
            self._tables[rotary] = self._rows("cosines", rotary, np.cos), self._rows("sines", rotary, np.sin)
        cosines, sines = self._tables[rotary]
        second = graph.op("Neg", self._cut(value, half, 2 * half))
        turned = graph.op("Concat", second, self._cut(value, 0, half), axis=-1)
        return graph.op("Add", graph.op("Mul", value, cosines), graph.op("Mul", turned, sines))

    def _cut(self, value: str, start: int, end: int) -> str:
        graph = self._graph
        return graph.op("Slice", value, graph.integers(start), graph.integers(end), graph.integers(-1))

    def _rows(self, name: str, rotary: Rotary, function: Callable[[Floats], Floats]) -> str:
        """Append the function's values at the input's positions, [1, 1, l, 2 n]."""
        graph, positions = self._graph, self._positions
        shape = (1, 1, positions, 2 * len(rotary.frequencies))
        table = graph.weight(f"rotary.{len(self._tables)}.{name}", shape, lambda: _compute(rotary, positions, function))
        length = graph.size("input_ids", 1)
        return graph.op("Slice", table, graph.integers(0), length, graph.integers(2))


def _compute(rotary: Rotary, positions: int, function: Callable[[Floats], Floats]) -> Floats:
    """Compute angles in float32, as transformers does: at position 8,000 half a unit in the last place of a frequency
    is 0.0002 radians."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * np.array(rotary.frequencies, np.float32)
    table: Floats = np.tile(function(angles) * np.float32(rotary.factor), 2)[None, None]
    return table
