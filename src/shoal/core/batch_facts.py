"""Merge the batch facts of a request that ran in several parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from shoal.types import BatchFacts


def merge_batch_facts(facts: Sequence[BatchFacts], times: Callable[[Iterable[float]], float]) -> BatchFacts:
    """Return the facts of the part with the largest batch, with the counts of all parts summed.

    `times` combines the durations: `sum` for parts that ran one after another, `max` for parts that ran concurrently.
    """
    return msgspec.structs.replace(
        max(facts, key=lambda one: one.size),
        batches=sum(one.batches for one in facts),
        cached=sum(one.cached for one in facts),
        queue_ms=times(one.queue_ms for one in facts),
        prepare_ms=times(one.prepare_ms for one in facts),
        infer_ms=times(one.infer_ms for one in facts),
    )
