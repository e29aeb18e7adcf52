"""Which rows belong to which shard, and whether a folder may be continued. Pure: no files, no clock."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import count
from typing import Any, NamedTuple

import msgspec

VERSION = 1
"""Of the manifest. A folder of another version is not continued."""


class Input(msgspec.Struct, frozen=True):
    """An input file: its path as named, bytes, modification time in nanoseconds, and the SHA-256 of its first MB."""

    path: str
    size: int
    mtime_ns: int
    head: str


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides the content of the shards. `model` holds the facts that tell one model from another."""

    task: str
    model: dict[str, str]
    options: dict[str, Any]
    format: str
    shard_rows: int
    inputs: list[Input]


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A finished shard: rows read, rows written, rows set aside, and the SHA-256 of each file by name."""

    number: int
    rows: int
    written: int
    errors: int
    files: dict[str, str]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of manifest.json. `shards` is in order of their numbers; `rows` is None until all are finished."""

    recipe: Recipe
    version: int = VERSION
    shards: list[Shard] = []
    rows: int | None = None

    def with_shard(self, shard: Shard) -> Manifest:
        shards = sorted([*self.shards, shard], key=lambda each: each.number)
        return msgspec.structs.replace(self, shards=shards)


class Step(NamedTuple):
    """The next `rows` rows, which belong to `shard`: a block to compute, or a whole finished shard to skip."""

    shard: int
    rows: int
    is_finished: bool


def plan_steps(shard_rows: int, block_rows: int, finished: Collection[int]) -> Iterator[Step]:
    """Yield steps without end; the reader stops at the step for which too few rows are left. No block crosses shards,
    so a block holds the same rows whether or not shards before it are skipped."""
    for shard in count():
        if shard in finished:
            yield Step(shard, shard_rows, True)
            continue
        for start in range(0, shard_rows, block_rows):
            yield Step(shard, min(block_rows, shard_rows - start), False)


def find_differences(old: Recipe, new: Recipe) -> list[str]:
    """Return what differs, one text each; empty if a run of `new` may continue what `old` began."""
    found = [
        f"{name} was {_show(before)} and is {_show(after)}"
        for name, before, after in (
            ("the task", old.task, new.task),
            ("--format", old.format, new.format),
            ("--shard-rows", old.shard_rows, new.shard_rows),
        )
        if before != after
    ]
    found += _compare("the model's ", old.model, new.model)
    found += _compare("", old.options, new.options)
    return found + _compare_inputs(old.inputs, new.inputs)


def _compare(prefix: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [
        f"{prefix}{name} was {_show(old.get(name))} and is {_show(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _compare_inputs(old: list[Input], new: list[Input]) -> list[str]:
    if [each.path for each in old] != [each.path for each in new]:
        return [f"the inputs were {_list_paths(old)} and are {_list_paths(new)}"]
    return [
        f"{before.path} has changed ({', '.join(parts)})"
        for before, after in zip(old, new, strict=True)
        if (parts := [name for name in ("size", "mtime_ns", "head") if getattr(before, name) != getattr(after, name)])
    ]


def _list_paths(inputs: list[Input]) -> str:
    more = f" and {len(inputs) - 3} more" if len(inputs) > 3 else ""
    return ", ".join(each.path for each in inputs[:3]) + more


def _show(value: object) -> str:
    return "not set" if value is None or value == "" else str(value)
