"""What callers of the Python API may give, checked before it is among the inputs of others."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast, get_args

import numpy as np

from shoal.errors import InvalidValue, WrongType
from shoal.python.images import read_image_file, to_image
from shoal.types import BatchTask, Direction, Image, TextItem, TextPair, VectorKind

T = TypeVar("T")

_OPTIONS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "prompt_name": (str, NoneType),
    "input_type": (str, NoneType),
    "truncate": (bool, NoneType),
    "truncation_direction": (str,),
    "normalize": (bool,),
    "raw_scores": (bool,),
    "instruction": (str, NoneType),
}
"""What an option of a task may be."""


def each_of(value: Iterable[Any], name: str, checked: Callable[[Any, str], T]) -> list[T]:
    """Checked here, and not in a pipeline, where a wrong one would be among the inputs of others. Raises WrongType and
    InvalidValue."""
    if isinstance(value, str | bytes):
        raise WrongType(f"{name} must be a list: put a single text into [...]", param=name)
    if not isinstance(value, Iterable):
        raise WrongType(f"{name} must be a list, not {type(value).__name__}", param=name)
    return [checked(item, f"{name}[{place}]") for place, item in enumerate(value)]


def text_of(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise WrongType(f"{name} must be a string, not {type(value).__name__}", param=name)
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError:
        raise InvalidValue(
            f"{name} contains half of a surrogate pair, which is not valid text: decode it with errors='replace'",
            param=name,
        ) from None
    return value


async def read_all(value: Sequence[T | Path]) -> list[T | Image]:
    """Files in a thread: a disk may be slow."""
    if not any(isinstance(each, Path) for each in value):
        return cast(list[T | Image], [*value])
    return await asyncio.to_thread(
        lambda: [read_image_file(each) if isinstance(each, Path) else each for each in value],
    )


def text_ids_or_image(value: Any, name: str) -> TextItem | Image | Path:
    if isinstance(value, str):
        return text_of(value, name)
    if (image := to_image(value)) is not None:
        return image
    if not isinstance(value, Sequence | np.ndarray):
        raise WrongType(
            f"{name} must be a text, a list of token ids or an image, not {type(value).__name__}", param=name
        )
    ids = list(value)
    if all(type(token) is int and -(2**63) <= token < 2**63 for token in ids):
        return ids
    return [index_of(token, f"{name}[{place}]") for place, token in enumerate(ids)]


def text_pair_or_image(value: Any, name: str) -> str | TextPair | Image | Path:
    if isinstance(value, list | tuple):
        if len(value) != 2:
            raise WrongType(f"{name} has {len(value)} texts: pass one text, or a pair of texts", param=name)
        return text_of(value[0], f"{name}[0]"), text_of(value[1], f"{name}[1]")
    image = to_image(value)
    return text_of(value, name) if image is None else image


def index_of(value: Any, name: str) -> int:
    """Whatever Python counts with, of at most 64 bits."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise WrongType(f"{name} must be an integer, not {type(value).__name__}", param=name)
    if not -(2**63) <= number < 2**63:
        raise InvalidValue(f"{name} is out of range: pass a number of at most 64 bits", param=name)
    return number


def kinds_of(outputs: Sequence[VectorKind] | None) -> tuple[VectorKind, ...]:
    if outputs is None:
        return ("dense",)
    known = ", ".join(get_args(VectorKind))
    if isinstance(outputs, str) or not isinstance(outputs, Iterable):
        raise WrongType(f"outputs must be a list of vector kinds, from: {known}", param="outputs")
    kinds = tuple(outputs)
    if not kinds or any(kind not in get_args(VectorKind) for kind in kinds):
        raise InvalidValue(f"outputs is {list(kinds)}: name one or more vector kinds, from: {known}", param="outputs")
    return kinds


def check_options(task: BatchTask) -> None:
    """Raises WrongType or InvalidValue for an option that its type does not allow."""
    for name in task.__struct_fields__:
        if name not in _OPTIONS:
            continue
        value = getattr(task, name)
        if not isinstance(value, _OPTIONS[name]):
            names = " or ".join("None" if one is NoneType else one.__name__ for one in _OPTIONS[name])
            raise WrongType(f"{name} must be {names}, not {type(value).__name__}", param=name)
    if task.truncation_direction not in get_args(Direction):
        raise InvalidValue(
            f"truncation_direction is {task.truncation_direction!r}: pass one of {', '.join(get_args(Direction))}",
            param="truncation_direction",
        )
