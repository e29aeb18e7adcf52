"""Chooses the shapes that batches are padded to, the order in which they are warmed, and their cost. Pure.

The choices rest on these figures (all-MiniLM-L6-v2, OpenVINO, two AVX512-BF16 cores). The first batch of a shape costs
2 ms more than later ones in f32 and 5 ms in bf16, whatever its size, because kernels are compiled for it, per stream.
Time is linear in tokens, without steps, so padding costs as much as other tokens. A warmed shape holds about 0.4 MB
per stream.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shoal.core.protocols import CostModel

SHORTEST = 8
LENGTH_STEP = 4
LONGEST_STEP = 64
SIZE_STEP = 1
PROBE_SIZES = (1, 4, 16)


class Shape(NamedTuple):
    size: int
    length: int

    @property
    def tokens(self) -> int:
        return self.size * self.length


def ladder(first: int, step: int, last: int, parts: int, longest_step: int = sys.maxsize) -> tuple[int, ...]:
    """Return ascending sizes from `first` to exactly `last`. A step is at least `step`, at most `longest_step`, and
    otherwise 1/`parts` of the power of two below. So padding adds at most that fraction (except for the smallest
    sizes), and half of it on average."""
    rungs = []
    rung = min(first, last)
    while rung < last:
        rungs.append(rung)
        rung += min(max(step, (1 << (rung.bit_length() - 1)) // parts), longest_step)
    return (*rungs, last)


def length_buckets(max_length: int) -> tuple[int, ...]:
    """Return the lengths. No step exceeds `LONGEST_STEP`: compiling a kernel takes a hundredth of the time of a long
    text, and padding up to twice its part of the length, because attention is quadratic."""
    return ladder(SHORTEST, LENGTH_STEP, max_length, 8, LONGEST_STEP)


def size_buckets(max_batch_size: int) -> tuple[int, ...]:
    return ladder(1, SIZE_STEP, max_batch_size, 4)


def shapes(lengths: Sequence[int], sizes: Sequence[int], max_tokens: int) -> list[Shape]:
    """Return all shapes of at most `max_tokens`, cheapest first. `lengths` ascend; there may be many more than fit."""
    fitting = [Shape(size, length) for size in sizes for length in lengths[: bisect_right(lengths, max_tokens // size)]]
    return sorted(fitting, key=lambda shape: (shape.tokens, shape))


def is_probe(shape: Shape) -> bool:
    """Return whether a shape is timed as well as warmed: some sizes, at lengths that are powers of two."""
    return shape.size in PROBE_SIZES and shape.length.bit_count() == 1


def fit_cost(samples: Sequence[tuple[float, float]]) -> CostModel:
    """Fit seconds over work by least squares, each sample weighted by 1 / seconds^2, so that small batches count as
    much as large ones. Neither coefficient is negative. Without samples the result is CostModel's default."""
    if not samples:
        return CostModel()
    weights = [1.0 / max(seconds, 1e-9) ** 2 for _, seconds in samples]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, samples, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, samples, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, samples, strict=True))
    joint = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, samples, strict=True))
    slope = joint / spread if spread > 0 else 0.0
    if slope <= 0 or mean_y - slope * mean_x < 0:
        squares = sum(w * x * x for w, (x, _) in zip(weights, samples, strict=True))
        slope = sum(w * x * y for w, (x, y) in zip(weights, samples, strict=True)) / squares
        return CostModel(0.0, slope)
    return CostModel(mean_y - slope * mean_x, slope)


class WarmUp:
    """The order in which shapes are run, and the cost model learned from their times.

    Probes come first: few shapes over the whole range, run often enough to be timed. The others follow, cheapest first,
    because kernel compilation weighs most there. No shape with a predicted time over `limit_s` is run. `attention` is
    the cost model's.
    """

    def __init__(self, plan: Sequence[Shape], limit_s: float, attention: float = 0.0) -> None:
        self.cost = CostModel(attention=attention)
        self.done = 0
        self._limit = limit_s
        self._probes = deque(shape for shape in plan if is_probe(shape))
        self._others = deque(shape for shape in plan if not is_probe(shape))
        self._samples: list[tuple[float, float]] = []

    def next(self) -> Shape | None:
        """Return the shape to run now, or None when all are warm."""
        for waiting in (self._probes, self._others):
            while waiting:
                shape = waiting.popleft()
                if not self._samples or self.cost.seconds(self._work(shape)) <= self._limit:
                    return shape
        return None

    def record(self, shape: Shape, seconds: Sequence[float]) -> None:
        """Record the times of each run of `shape`. The first run compiles its kernels and is ignored."""
        self.done += 1
        if len(seconds) > 1:
            self._samples.append((self._work(shape), min(seconds[1:])))
            self.cost = msgspec.structs.replace(fit_cost(self._samples), attention=self.cost.attention)

    def _work(self, shape: Shape) -> float:
        return self.cost.work(shape.tokens, shape.length)
