"""The table that the original published: request, model and processing time by batch size, of texts 'asdf' x 126."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from harness import Server, phase, stored
from triton_kit import Triton

from shoal.backends.triton.naming import triton_name
from shoal.bench.client import Target
from shoal.bench.texts import WORDS, Bodies

SIZES = (8, 16, 32, 64, 128, 256)
ASDF = " asdf" * 126
TOKENS = 256
COUNTED_S = 2.0


def all_different(seed: int) -> Iterator[str]:
    """All different: two words that no other has, in an order of their own."""
    numbers = list(range(len(WORDS) ** 2))
    random.Random(seed).shuffle(numbers)
    for number in numbers:
        yield f"{WORDS[number % len(WORDS)]} {WORDS[number // len(WORDS)]}{ASDF}"


def check_length(tokenizer: Path) -> None:
    from tokenizers import Tokenizer

    reader = Tokenizer.from_file(str(tokenizer))
    reader.no_padding()
    reader.no_truncation()
    texts = all_different(0)
    found = {len(one.ids) for one in reader.encode_batch_fast([next(texts) for _ in range(500)])}
    if found != {TOKENS}:
        raise RuntimeError(f"texts of {TOKENS} tokens have {sorted(found)}")


async def one_request(server: Server, triton: Triton, model: str, texts: list[str]) -> dict[str, float]:
    target = Target(server.url)
    request = Bodies("embedding", server.model, "float", target.name).request(texts)
    connection = await target.connect()
    before = triton.counts(model)
    start = time.perf_counter()
    reply = await connection.ask(request)
    elapsed_ms = (time.perf_counter() - start) * 1000
    connection.close()
    after = triton.counts(model)
    while after[0] - before[0] < len(texts) and time.perf_counter() < start + elapsed_ms / 1000 + COUNTED_S:
        after = triton.counts(model)  # Triton answers before it counts
    if reply.status != 200 or after[0] - before[0] != len(texts):
        raise RuntimeError(f"status {reply.status}, {after[0] - before[0]} texts computed of {len(texts)}")
    computed = (after[2] - before[2]) * 1000
    return {
        "request_ms": elapsed_ms,
        "model_ms": computed,
        "processing_ms": elapsed_ms - computed,
        "executions": after[1] - before[1],
    }


def table(triton: Triton, repository: Path, address: str, rounds: int) -> dict[str, Any]:
    """batch -> request, model and processing in milliseconds, and the card of the model that was asked.

    Raises RuntimeError for a request that failed, or whose texts were not all computed.
    """
    settings = {"backend": "triton", "triton_url": triton.url, "triton_repository": repository}
    with phase("a real model on Triton"), Server(address, **settings) as server:
        server.settle()
        card = server.card()
        entry = stored(card["source"])
        check_length(entry.tokenizer)
        texts = all_different(random.getrandbits(48))
        model = triton_name(server.model)
        found: dict[str, Any] = {}
        for size in (8, *SIZES):  # the first one warms up, and is measured again
            runs = [
                asyncio.run(one_request(server, triton, model, [next(texts) for _ in range(size)]))
                for _ in range(rounds)
            ]
            found[f"batch {size}"] = {key: median(one[key] for one in runs) for key in runs[0]}
        print(json.dumps(found, indent=1))
    return {"served": card, "the original's table": found}
