"""Prepared texts to the tensors of an encoder: right-padded to the engine's buckets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.core.protocols import EngineFacts, Prepared, round_up
from shoal.errors import ModelFileError
from shoal.specs import TextSpec
from shoal.types import Array

IDS = "input_ids"
TYPES = "token_type_ids"
INPUTS = frozenset({IDS, "attention_mask", TYPES, "position_ids", "pooling_mask"})


def check_inputs(spec: TextSpec, given: frozenset[str] = INPUTS) -> None:
    """Raises ModelFileError for a graph that wants what is not `given`."""
    if unknown := set(spec.inputs) - given:
        raise ModelFileError(f"inputs that no text gives: {', '.join(sorted(unknown))}", file="graph", key="inputs")


def pad_batch(
    batch: Sequence[Prepared],
    facts: EngineFacts,
    spec: TextSpec,
    attended: Sequence[int] | None = None,
    skips: Sequence[int] = (),
) -> dict[str, Array]:
    """int64 [rows, length]; rows past the batch hold one attended token, so that none divides by zero. A bucket is
    never a reason to go past the positions that the model has. No row is shorter than `spec.pad_to`.

    `attended`: how many leading tokens of each item the model sees (None: all); `skips`: how many of those pooling
    leaves out. Segment ids are those that an item has, or zeros.
    """
    rows = round_up(len(batch), facts.size_buckets)
    costs = [item.cost for item in batch]
    longest = max(*costs, spec.pad_to)
    width = max(longest, min(round_up(longest, facts.length_buckets), spec.max_tokens))
    ids = np.full((rows, width), spec.pad_id, dtype=np.int64)
    for place, item in enumerate(batch):
        ids[place, : item.cost] = item.tensors[IDS]
    positions = np.arange(width, dtype=np.int64)
    seen = positions < _column(rows, costs if attended is None else attended, 1)
    tensors: dict[str, Array] = {IDS: ids}
    for name in spec.inputs:
        if name == "attention_mask":
            tensors[name] = seen.astype(np.int64)
        elif name == TYPES:
            tensors[name] = types = np.zeros_like(ids)
            for place, item in enumerate(batch):
                if TYPES in item.tensors:
                    types[place, : item.cost] = item.tensors[TYPES]
        elif name == "position_ids":
            tensors[name] = np.tile(positions, (rows, 1))
        elif name == "pooling_mask":
            tensors[name] = (seen & (positions >= _column(rows, skips, 0))).astype(np.int64)
    return tensors


def _column(rows: int, values: Sequence[int], rest: int) -> Array:
    """[rows, 1]; those past the values hold `rest`."""
    column = np.full((rows, 1), rest, dtype=np.int64)
    column[: len(values), 0] = values
    return column
