"""Which shapes batches are padded up to, which of them to warm and in what order, and what they cost. Pure.

Figures behind the choices (all-MiniLM-L6-v2, OpenVINO, two AVX512-BF16 cores): the first batch of a shape costs 2 ms
more than later ones in f32 and 5 ms in bf16, whatever its size, because kernels are made for it, per stream. Time is
linear in tokens without steps, so padding costs what it adds. A warmed shape holds about 0.4 MB per stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from shoal.core.protocols import CostModel

SHORTEST = 8
LENGTH_STEP = 4
SIZE_STEP = 1
PROBE_SIZES = (1, 4, 16)


class Shape(NamedTuple):
    size: int
    length: int

    @property
    def tokens(self) -> int:
        return self.size * self.length


def ladder(first: int, step: int, last: int, parts: int) -> tuple[int, ...]:
    """Ascending sizes from `first` to exactly `last`, in steps of at least `step` and otherwise one of `parts` of the
    power of two below: padding adds at most that part (but for the smallest), and half of it on average."""
    rungs = []
    rung = min(first, last)
    while rung < last:
        rungs.append(rung)
        rung += max(step, (1 << (rung.bit_length() - 1)) // parts)
    return (*rungs, last)


def length_buckets(max_length: int) -> tuple[int, ...]:
    return ladder(SHORTEST, LENGTH_STEP, max_length, 8)


def size_buckets(max_batch_size: int) -> tuple[int, ...]:
    return ladder(1, SIZE_STEP, max_batch_size, 4)


def shapes(lengths: Sequence[int], sizes: Sequence[int], max_tokens: int) -> list[Shape]:
    """All shapes of at most so many tokens, the cheapest first."""
    every = (Shape(size, length) for size in sizes for length in lengths)
    return sorted((shape for shape in every if shape.tokens <= max_tokens), key=lambda shape: (shape.tokens, shape))


def is_probe(shape: Shape) -> bool:
    """Whether a shape is timed, not only warmed: some sizes at the powers of two among the lengths."""
    return shape.size in PROBE_SIZES and shape.length.bit_count() == 1


def fit_cost(samples: Sequence[tuple[int, float]]) -> CostModel:
    """Least squares of seconds over tokens, each sample weighted by 1 / seconds^2, so that small batches count as much
    as large ones. Neither part is ever negative; without samples it is CostModel's own guess."""
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
    """The order in which to run shapes, and what their times teach.

    Probes come first: few shapes over the whole range, run often enough to be timed. The others follow, cheapest
    first, because there a kernel's making weighs most. Nothing predicted to take over `limit_s` is run.
    """

    def __init__(self, plan: Sequence[Shape], limit_s: float) -> None:
        self.cost = CostModel()
        self.done = 0
        self._limit = limit_s
        self._probes = deque(shape for shape in plan if is_probe(shape))
        self._rest = deque(shape for shape in plan if not is_probe(shape))
        self._samples: list[tuple[int, float]] = []

    def next(self) -> Shape | None:
        """What to run now; None when all is warm."""
        for waiting in (self._probes, self._rest):
            while waiting:
                shape = waiting.popleft()
                if not self._samples or self.cost.seconds(shape.tokens) <= self._limit:
                    return shape
        return None

    def record(self, shape: Shape, seconds: Sequence[float]) -> None:
        """`shape` was run, and took so long each time; the first time makes its kernels and teaches nothing."""
        self.done += 1
        if len(seconds) > 1:
            self._samples.append((shape.tokens, min(seconds[1:])))
            self.cost = fit_cost(self._samples)
