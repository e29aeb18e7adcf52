"""Pad prepared texts on the right to the engine's buckets, as tensors of an encoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.core.protocols import EngineFacts, Prepared, round_up
from shoal.errors import ModelFileError
from shoal.specs import TextSpec
from shoal.types import Array

IDS = "input_ids"
TYPES = "token_type_ids"
ADAPTERS = "adapter_ids"
INPUTS = frozenset({IDS, "attention_mask", TYPES, "position_ids", "pooling_mask", ADAPTERS})


def check_inputs(spec: TextSpec, known: frozenset[str] = INPUTS) -> None:
    """Raises ModelFileError if the graph has inputs other than those in `known`, or chooses among adapters that the
    files do not name."""
    if unknown := set(spec.inputs) - known:
        raise ModelFileError(f"inputs that texts do not have: {', '.join(sorted(unknown))}", file="graph", key="inputs")
    if ADAPTERS in spec.inputs and not spec.embedding_tasks:
        raise ModelFileError(
            f"{ADAPTERS} needs a model whose config.json names its tasks (lora_adaptations, Jina's v3)",
            file="graph",
            key="inputs",
        )


def pad_batch(
    batch: Sequence[Prepared],
    facts: EngineFacts,
    spec: TextSpec,
    attended: Sequence[int] | None = None,
    skips: Sequence[int] = (),
    adapters: Sequence[int] = (),
) -> dict[str, Array]:
    """Pad a batch to int64 [rows, length].

    Rows past the batch attend to one token, so that nothing divides by zero. Buckets never extend a row past the
    model's positions, and no row is shorter than `spec.pad_to`. `attended`: leading tokens of each item that the model
    sees (None: all). `skips`: how many of those to exclude from pooling. `adapters`: the number of each item's
    adapter. Segment ids are the item's own, or zeros.
    """
    count = len(batch)
    rows = round_up(count, facts.size_buckets)
    costs = [item.cost for item in batch]
    longest = max(*costs, spec.pad_to)
    width = max(longest, min(round_up(longest, facts.length_buckets), spec.max_tokens))
    ids = np.full((rows, width), spec.pad_id, dtype=np.int64)
    for place, item in enumerate(batch):
        ids[place, : item.cost] = item.tensors[IDS]
    positions = np.arange(width, dtype=np.int64)
    lengths = np.ones((rows, 1), dtype=np.int64)
    lengths[:count, 0] = costs if attended is None else attended
    seen = positions < lengths
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
            starts = np.zeros((rows, 1), dtype=np.int64)
            starts[: len(skips), 0] = skips
            tensors[name] = (seen & (positions >= starts)).astype(np.int64)
        elif name == ADAPTERS:
            numbers = np.zeros((rows, 1), dtype=np.int64)
            numbers[: len(adapters), 0] = adapters
            tensors[name] = np.tile(numbers, (1, width))
    return tensors
