"""Reply headers that describe a request's batches. They are the same on every surface that embeds."""

from __future__ import annotations

import time

from shoal.http.request import Headers, Request
from shoal.types import Embedded, Result

HEADER_DOCS = {
    "x-shoal-batch-size": "Items in the largest batch that this request was part of, from all users.",
    "x-shoal-batch-id": "Number of that batch.",
    "x-shoal-batches": "Batches that this request was split into.",
    "x-shoal-flush": "Why that batch was sent: full, idle or age.",
    "x-shoal-queue-ms": "Longest time an item waited for its batch, in milliseconds.",
    "x-shoal-truncated": "Inputs truncated to the model's maximum length.",
    "x-shoal-cached": "Inputs answered from the cache.",
    "x-shoal-space": "Hash of the vector space: only compare vectors with the same hash.",
    "server-timing": "Milliseconds of queue, prepare, infer and total.",
}


def batch_headers(request: Request, result: Result) -> Headers:
    facts = result.facts
    total = (time.monotonic() - request.started) * 1000
    return [
        (b"x-shoal-batch-size", b"%d" % facts.size),
        (b"x-shoal-batch-id", b"%d" % facts.id),
        (b"x-shoal-batches", b"%d" % facts.batches),
        (b"x-shoal-flush", facts.flush.encode()),
        (b"x-shoal-queue-ms", b"%.2f" % facts.queue_ms),
        (b"x-shoal-truncated", b"%d" % result.truncated),
        (b"x-shoal-cached", b"%d" % facts.cached),
        *([(b"x-shoal-space", result.space.encode())] if isinstance(result, Embedded) else []),
        (
            b"server-timing",
            b"queue;dur=%.2f, prepare;dur=%.2f, infer;dur=%.2f, total;dur=%.2f"
            % (facts.queue_ms, facts.prepare_ms, facts.infer_ms, total),
        ),
    ]
