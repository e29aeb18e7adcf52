"""The facts of a request that was run in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from shoal.types import BatchFacts


def merge_batch_facts(facts: Sequence[BatchFacts], times: Callable[[Iterable[float]], float]) -> BatchFacts:
    """Of all parts: the largest batch's own, with the counts of all. `times` of parts one after another add up (sum);
    of parts side by side the slower one's count (max)."""
    return msgspec.structs.replace(
        max(facts, key=lambda one: one.size),
        batches=sum(one.batches for one in facts),
        cached=sum(one.cached for one in facts),
        queue_ms=times(one.queue_ms for one in facts),
        prepare_ms=times(one.prepare_ms for one in facts),
        infer_ms=times(one.infer_ms for one in facts),
    )
