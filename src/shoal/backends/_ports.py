"""The inputs of a graph: what they take, and arrays that fit them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.protocols import Tensors
from shoal.errors import InputRejected
from shoal.specs import Activation, TextSpec
from shoal.types import Array

NOT_FINITE = 1e30
"""Stands for infinity where a number is kept as JSON, which has none."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input: its name, type and shape. None is an axis of any size; the first axis is the batch."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    @property
    def has_length(self) -> bool:
        return None in self.shape[1:]

    def lengths(self, shape: Sequence[int]) -> list[int]:
        """The sizes, in an array's shape, of the axes that may have any beside the batch."""
        return [size for size, fixed in zip(shape[1:], self.shape[1:], strict=True) if fixed is None]


def checked(inputs: Tensors, ports: Sequence[Port], max_length: int) -> dict[str, Array]:
    """The inputs as the engine takes them: every port's array, of its type, C-contiguous and writeable, not copied
    where it already is all that.

    All axes of any size beside the batch are one axis: the length. Engines find out themselves when sizes disagree, but
    OpenVINO does not survive it: after a failed batch its stream keeps half of the failed shapes.

    Raises InputRejected naming the input: missing, unknown, of another kind or rank, empty, longer than `max_length`,
    or of other sizes than its neighbours.
    """
    names = [port.name for port in ports]
    if unknown := [name for name in inputs if name not in names]:
        raise InputRejected(f"the graph has no input {unknown[0]!r}; it takes {', '.join(names)}", param=unknown[0])
    feeds: dict[str, Array] = {}
    for port in ports:
        if port.name not in inputs:
            raise InputRejected(f"input {port.name!r} is missing; send an array for it", param=port.name)
        feeds[port.name] = _fit(inputs[port.name], port)
    if len({array.shape[0] for array in feeds.values()}) > 1:
        sizes = ", ".join(f"{name} {array.shape[0]}" for name, array in feeds.items())
        raise InputRejected(f"all inputs of a batch need the same number of rows, not {sizes}")
    lengths = {port.name: size for port in ports for size in port.lengths(feeds[port.name].shape)}
    if len(set(lengths.values())) > 1:
        sizes = ", ".join(f"{name} {size}" for name, size in lengths.items())
        raise InputRejected(f"all inputs of a batch need the same length, not {sizes}")
    if max(lengths.values(), default=0) > max_length:
        raise InputRejected(f"this model takes at most {max_length} tokens an input; send shorter ones")
    return feeds


def _fit(array: Array, port: Port) -> Array:
    if array.ndim != len(port.shape) or any(
        size not in (None, given) for size, given in zip(port.shape, array.shape, strict=True)
    ):
        raise InputRejected(
            f"{port.name} takes the shape {_shown(port.shape)}, not {_shown(array.shape)}", param=port.name
        )
    if not array.size:
        raise InputRejected(f"{port.name} is empty; a batch needs a row and a row a token", param=port.name)
    if not np.can_cast(array.dtype, port.dtype, "same_kind"):
        raise InputRejected(f"{port.name} takes {port.dtype}, not {array.dtype}", param=port.name)
    return np.require(array, port.dtype, ("C_CONTIGUOUS", "WRITEABLE"))


def _shown(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"


def example(ports: Sequence[Port], size: int, length: int) -> dict[str, Array]:
    """Inputs of a shape, for timing: ones, which are a valid id, an attended mask and a valid position."""
    return {
        port.name: np.ones(
            (size, *(length if given is None else given for given in port.shape[1:])),
            dtype=port.dtype,
        )
        for port in ports
    }


def score_difference(left: Sequence[Array], right: Sequence[Array], activation: Activation) -> float:
    """How far the logits on the right lead away from those on the left: the largest difference of a score, once
    `activation` is over it, or of a logit, as a part of the range that those on the left span (at least 1), whichever
    is larger. NOT_FINITE when any is not finite."""
    a, b = (np.concatenate(rows).astype(np.float64) for rows in (left, right))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return NOT_FINITE
    parts = float(np.abs(a - b).max()) / max(float(a.max() - a.min()), 1.0)
    if activation == "identity":
        return parts
    return max(parts, float(np.abs(_activated(a, activation) - _activated(b, activation)).max()))


def _activated(logits: Array, activation: Activation) -> Array:
    if activation == "sigmoid":
        scores: Array = 0.5 * (1.0 + np.tanh(0.5 * logits))
        return scores
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    scores = powers / powers.sum(axis=-1, keepdims=True)
    return scores


def rows_of(outputs: Mapping[str, Array], feeds: Tensors, spec: TextSpec | None) -> list[Array]:
    """The outputs that two precisions are compared by, as matrices of a row each: those of two axes.

    Token outputs hold numbers of padding and are left out: those of three axes, and the one of two that a spec can
    name. Of a model of late interaction alone they are all there is: then the vectors of the tokens that are no padding
    count.
    """
    sparse = spec.sparse if spec else None
    of_tokens = sparse.output if sparse is not None and sparse.per == "token" else None
    late = spec.multi.output if spec is not None and spec.multi is not None and not spec.dimension else None
    rows: list[Array] = []
    for name, array in outputs.items():
        if name == late:
            rows.append(array[feeds["attention_mask"] > 0])
        elif array.ndim == 2 and name != of_tokens:
            rows.append(array)
    return rows


def least_cosine(left: Sequence[Array], right: Sequence[Array]) -> float:
    """The smallest cosine between rows of like matrices. Two rows of zeros agree, and say nothing; 0.0 when one alone
    is zero, when any is not finite, and when there is nothing to compare."""
    least: float | None = None
    for one, other in zip(left, right, strict=True):
        a, b = one.astype(np.float64), other.astype(np.float64)
        norms = np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1)
        there = (norms[0] != 0) | (norms[1] != 0)  # NaN is
        product = (norms[0] * norms[1])[there]
        if not np.isfinite(product).all() or not product.all():
            return 0.0
        if product.size:
            lowest = float(((a * b).sum(-1)[there] / product).min())
            least = lowest if least is None else min(least, lowest)
    return 0.0 if least is None else least
