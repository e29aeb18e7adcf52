"""`shoal serve` with batching off: each text a call to Triton of its own, as many in flight as there are clients.

`max_batch_size = 1` alone would not be that: Shoal keeps no more calls in flight than a model's instances can use,
which is right for batches, and would make texts wait here for something that nobody asked for.
"""

from __future__ import annotations

import msgspec

from shoal.backends.triton import engine
from shoal.backends.triton.schema import Embedder
from shoal.cli import main
from shoal.core.protocols import EngineFacts

CALLS_IN_FLIGHT = 64

_stated = engine.build_facts


def facts_of(name: str, embedder: Embedder) -> EngineFacts:
    return msgspec.structs.replace(
        _stated(name, embedder), slots=CALLS_IN_FLIGHT, parallel=CALLS_IN_FLIGHT, max_batch_size=1
    )


if __name__ == "__main__":
    engine.build_facts = facts_of
    main()
