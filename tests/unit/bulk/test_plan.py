"""Steps over shards, and which recipes may continue a folder."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.bulk.plan import Input, Manifest, Recipe, Shard, find_differences, plan_steps

RECIPE = Recipe(
    task="embed",
    model={"space": "abc", "precision": "f32"},
    options={"column": "text", "dimensions": None},
    format="npy",
    shard_rows=10,
    inputs=[Input("a.jsonl", 5, 7, "ff"), Input("b.jsonl", 5, 7, "ff")],
)


@given(st.integers(1, 30), st.integers(1, 30), st.sets(st.integers(0, 5)))
def test_steps_cover_every_row_once_and_no_block_crosses_shards(size: int, block: int, done: set[int]) -> None:
    """Rows of a shard are the same whichever shards are skipped."""
    row = 0
    for step in takewhile(lambda step: step.shard < 6, plan_steps(size, block, done)):
        assert step.shard == row // size == (row + step.rows - 1) // size
        assert step.is_finished == (step.shard in done)
        assert step.rows == size if step.is_finished else step.rows <= block
        row += step.rows
    assert row == 6 * size


def test_the_same_recipe_continues() -> None:
    """A recipe that came from a manifest equals the one that was written there."""
    data = msgspec.json.encode(Manifest(recipe=RECIPE))
    assert find_differences(msgspec.json.decode(data, type=Manifest).recipe, RECIPE) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "rerank"}, "the task was embed and is rerank"),
        ({"format": "parquet"}, "--format was npy and is parquet"),
        ({"shard_rows": 9}, "--shard-rows was 10 and is 9"),
        ({"model": {"space": "xyz", "precision": "f32"}}, "the model's space was abc and is xyz"),
        ({"options": {"column": "text", "dimensions": 8}}, "dimensions was not set and is 8"),
        ({"inputs": [RECIPE.inputs[0]]}, "the inputs were a.jsonl, b.jsonl and are a.jsonl"),
        ({"inputs": [Input("a.jsonl", 6, 8, "ff"), RECIPE.inputs[1]]}, "a.jsonl has changed (size, mtime_ns)"),
    ],
)
def test_a_difference_is_named(change: dict[str, Any], message: str) -> None:
    """The user learns which part of the command or of the inputs to change back."""
    assert find_differences(RECIPE, msgspec.structs.replace(RECIPE, **change)) == [message]


def test_shards_are_listed_by_number() -> None:
    """A shard that is computed again takes its place among the later ones."""
    manifest = Manifest(recipe=RECIPE)
    for number in (2, 0, 1):
        manifest = manifest.with_shard(Shard(number=number, rows=1, written=1, errors=0, files={}))
    assert [shard.number for shard in manifest.shards] == [0, 1, 2]
