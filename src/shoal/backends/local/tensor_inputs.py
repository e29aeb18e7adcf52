"""Describes the inputs of a graph, and converts arrays to match them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.protocols import Tensors
from shoal.errors import InputRejected
from shoal.types import Array


@dataclass(frozen=True, slots=True)
class Port:
    """One input: its name, type and shape. None is an axis of any size; the first axis is the batch."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    @property
    def has_length(self) -> bool:
        return None in self.shape[1:]


def check_inputs(inputs: Tensors, ports: Sequence[Port], max_length: int) -> dict[str, Array]:
    """Return the inputs as the engine takes them: for every port an array of its type, C-contiguous and writable.
    Arrays that already match are not copied.

    All variable axes except the batch are one axis: the length. Engines detect sizes that disagree, but OpenVINO does
    not recover from it: after a failed batch its stream keeps half of the failed shapes. Raises InputRejected, naming
    the input, if it is missing, unknown, empty, of another type or rank, longer than `max_length`, or of other sizes
    than the others.
    """
    names = [port.name for port in ports]
    if unknown := [name for name in inputs if name not in names]:
        raise InputRejected(
            f"the graph has no input {unknown[0]!r}; its inputs are {', '.join(names)}", param=unknown[0]
        )
    feeds: dict[str, Array] = {}
    for port in ports:
        if port.name not in inputs:
            raise InputRejected(f"input {port.name!r} is missing; send an array for it", param=port.name)
        feeds[port.name] = _fit(inputs[port.name], port)
    if len({array.shape[0] for array in feeds.values()}) > 1:
        sizes = ", ".join(f"{name} {array.shape[0]}" for name, array in feeds.items())
        raise InputRejected(f"all inputs of a batch need the same number of rows, not {sizes}")
    lengths = {
        port.name: size
        for port in ports
        for size, fixed in zip(feeds[port.name].shape[1:], port.shape[1:], strict=True)
        if fixed is None
    }
    if len(set(lengths.values())) > 1:
        sizes = ", ".join(f"{name} {size}" for name, size in lengths.items())
        raise InputRejected(f"all inputs of a batch need the same length, not {sizes}")
    if max(lengths.values(), default=0) > max_length:
        raise InputRejected(f"this model accepts at most {max_length} tokens per input; send shorter ones")
    return feeds


def _fit(array: Array, port: Port) -> Array:
    sizes = [actual if size is None else size for size, actual in zip(port.shape, array.shape, strict=False)]
    if array.ndim != len(port.shape) or sizes != list(array.shape):
        raise InputRejected(
            f"{port.name} must have the shape {_format_shape(port.shape)} (got {_format_shape(array.shape)})",
            param=port.name,
        )
    if not array.size:
        raise InputRejected(f"{port.name} is empty; send at least one row of at least one token", param=port.name)
    if not np.can_cast(array.dtype, port.dtype, "same_kind"):
        raise InputRejected(f"{port.name} must be {port.dtype} (got {array.dtype})", param=port.name)
    return np.require(array, port.dtype, ("C_CONTIGUOUS", "WRITEABLE"))


def _format_shape(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"


def make_example(ports: Sequence[Port], size: int, length: int) -> dict[str, Array]:
    """Return inputs of a shape for timing: all ones, which are a valid id, an attended mask and a valid position."""
    return {
        port.name: np.ones(
            (size, *(length if axis is None else axis for axis in port.shape[1:])),
            dtype=port.dtype,
        )
        for port in ports
    }
