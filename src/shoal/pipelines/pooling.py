"""Pool token vectors to one vector per text in numpy, for engines that return token vectors.

The modes are those of sentence-transformers 6, as `models/convert/graphs/head.py` builds them into a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from shoal.errors import ModelFileError
from shoal.types import Array, Vectors

TOKENS = "token_embeddings"
"""Engine output with token vectors, [rows, length, width]. Shoal pools here when it is the TextSpec's `pooled`
output."""

SEPARATOR = "+"
"""Separates the modes in a TextSpec's `pooling`; their vectors are concatenated in that order."""


def _cls(tokens: Vectors, length: int, skip: int) -> Array:
    """The first token that is not skipped; token 0 if all are."""
    first: Array = tokens[skip if skip < length else 0]
    return first


def _last(tokens: Vectors, length: int, skip: int) -> Array:
    last: Array = tokens[length - 1]
    return last


def _max(tokens: Vectors, length: int, skip: int) -> Array:
    highest: Array = tokens[skip:length].max(axis=0)
    return highest


def _mean(tokens: Vectors, length: int, skip: int) -> Array:
    return _sum(tokens[skip:length]) / np.float32(length - skip)


def _mean_sqrt_len(tokens: Vectors, length: int, skip: int) -> Array:
    return _sum(tokens[skip:length]) / np.float32(math.sqrt(length - skip))


def _weighted_mean(tokens: Vectors, length: int, skip: int) -> Array:
    """Mean with weights 1, 2, 3, ... by position; skipped prompt tokens still count as positions."""
    weights = np.arange(skip + 1, length + 1, dtype=np.float32)
    weighted: Array = weights @ tokens[skip:length] / weights.sum()
    return weighted


def _sum(tokens: Vectors) -> Array:
    total: Array = np.add.reduce(tokens, axis=0)
    return total


_MODES: dict[str, Callable[[Vectors, int, int], Array]] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
MODES = tuple(_MODES)


def check_modes(pooling: str) -> tuple[str, ...]:
    """Split a TextSpec's `pooling` into modes. Raises ModelFileError for an unknown mode."""
    modes = tuple(pooling.split(SEPARATOR))
    for mode in modes:
        if mode not in _MODES:
            raise ModelFileError(
                f"unknown pooling {mode!r}; Shoal knows {', '.join(_MODES)}",
                file="1_Pooling/config.json",
                key="pooling_mode",
            )
    return modes


def pool(tokens: Array, lengths: Sequence[int], skips: Sequence[int], mode: str) -> Vectors:
    """Pool each text's token vectors: [rows, length, width] of any float type to float32 [rows, modes * width].

    `lengths` counts each text's tokens; padding after them is never read, so it may hold NaN. `skips` counts the
    leading tokens to exclude. A text with no token left gives zeros (`cls`: its first token). `mode` is one of MODES,
    or several joined by "+". Copies one row at a time, and only if it is not float32.
    """
    modes = mode.split(SEPARATOR)
    width = tokens.shape[2]
    pooled = np.zeros((len(lengths), len(modes) * width), dtype=np.float32)
    for row, (length, skip) in enumerate(zip(lengths, skips, strict=True)):
        own = tokens[row, :length].astype(np.float32, copy=False)
        for part, each in enumerate(modes):
            if skip < length or each == "cls":
                pooled[row, part * width : (part + 1) * width] = _MODES[each](own, length, skip)
    return pooled
