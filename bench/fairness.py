"""Interactive users beside a bulk client: what it costs them, and what it keeps."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

from harness import Server, parser, phase, write

from shoal.bench.client import Pool, Target
from shoal.bench.load import run_closed_loop, run_open_loop
from shoal.bench.stats import Record, summarize_latencies
from shoal.bench.texts import Bodies, Texts

METHOD = """
Interactive: single texts of 16 tokens, open loop at a steady rate, latency counted from when each was due. Bulk:
requests of 2,048 distinct texts of 16 tokens, closed loop, base64, built before the clock starts. Each alone, then both
together; `one`: bulk over one connection from its own address; `many`: over 32 connections from its own address;
`proxy`: both kinds take turns on the same 16 keep-alive connections from one address, as behind a reverse proxy that
adds no header. Bulk's rate is what the engine ran in the window less the interactive answers; refused bulk requests
(429, 503) wait as Retry-After says and are sent again, refused interactive ones count as errors. Medians over rounds.
"""
INPUTS = 2048
TOKENS = 16
INTERACTIVE_FROM, BULK_FROM = "127.0.0.2", "127.0.0.3"


def maker(server: Server, count: int) -> Any:
    texts = Texts(TOKENS, seed=random.getrandbits(48))
    bodies = Bodies("openai", server.model, "base64", Target(server.url).name)
    return lambda: bodies.request(texts.take(count))


async def interactive(server: Server, pool: Pool, rate: float, seconds: float) -> Record:
    return await run_open_loop(pool, maker(server, 1), rate=rate, seconds=seconds)


def bulk_bodies(server: Server, clients: int, seconds: float) -> Callable[[], bytes]:
    """Enough for 5,000 texts/s made now, because that takes milliseconds which interactive requests here would feel."""
    make = maker(server, INPUTS)
    ready = [make() for _ in range(clients + int(5000 * seconds / INPUTS))]
    return lambda: ready.pop() if ready else make()


async def bulk(pool: Pool, make: Callable[[], bytes], clients: int, seconds: float) -> Record:
    return await run_closed_loop(pool, make, clients=clients, seconds=seconds, texts=INPUTS)


async def computed(server: Server) -> float:
    """Items that the engine has run so far."""
    return (await asyncio.to_thread(server.batch_counts))[0]


async def windowed(server: Server, work: Awaitable[Record]) -> tuple[Record, float]:
    """Begin `work` when the bulk client is at full speed; what it recorded, and bulk texts a second meanwhile.

    Counted at the engine: answers of 2,048 texts come in lumps that a window of seconds cannot resolve.
    """
    await asyncio.sleep(1.0)
    before, start = await computed(server), time.perf_counter()
    record = await work
    after, end = await computed(server), time.perf_counter()
    return record, (after - before - len(record.latency)) / (end - start)


async def nothing(seconds: float) -> Record:
    await asyncio.sleep(seconds)
    return Record()


async def scenario(server: Server, name: str, rate: float, seconds: float) -> dict[str, Any]:
    """Interactive alone, bulk alone, both: p50/p99 in ms and texts/s."""
    connections = {"one": 1, "many": 32, "proxy": 8}[name]
    if name == "proxy":
        mine = theirs = Pool(Target(server.url), 16)
    else:
        mine = Pool(Target(server.url, INTERACTIVE_FROM), 64)
        theirs = Pool(Target(server.url, BULK_FROM), connections)
    await mine.open()
    await theirs.open()
    try:
        await interactive(server, mine, rate, 1.0)
        alone = summarize_latencies((await interactive(server, mine, rate, seconds)).latency)
        solo, shared = (bulk_bodies(server, connections, seconds + 2) for _ in range(2))
        (_, solo_rate), _ = await asyncio.gather(
            windowed(server, nothing(seconds)), bulk(theirs, solo, connections, seconds + 2)
        )
        (beside, shared_rate), bulk_beside = await asyncio.gather(
            windowed(server, interactive(server, mine, rate, seconds)), bulk(theirs, shared, connections, seconds + 2)
        )
    finally:
        mine.close()
        theirs.close()
    together = summarize_latencies(beside.latency) or dict.fromkeys(alone, math.nan)  # every one refused
    return {
        "alone_p50_ms": alone["p50"],
        "alone_p99_ms": alone["p99"],
        "beside_p50_ms": together["p50"],
        "beside_p99_ms": together["p99"],
        "beside_max_ms": together["max"],
        "p99_rise_ms": round(together["p99"] - alone["p99"], 2),
        "bulk_alone_texts_per_s": round(solo_rate, 1),
        "bulk_beside_texts_per_s": round(shared_rate, 1),
        "bulk_kept": round(shared_rate / solo_rate, 3),
        "interactive_errors": sum(beside.errors.values()),
        "bulk_refused": sum(bulk_beside.errors.values()),
        "errors": {"interactive": dict(beside.errors), "bulk": dict(bulk_beside.errors)},
    }


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(seconds=10.0, rounds=2)
    options.add_argument("--rate", type=float, default=50.0, help="interactive requests a second")
    arguments = options.parse_args()
    results: dict[str, Any] = {"interactive_per_s": arguments.rate}
    with Server(arguments.model) as server:
        with phase("warming"):
            server.settle()
        results["served"] = server.card()
        for name in ("one", "many", "proxy"):
            rounds = []
            for number in range(arguments.rounds):
                with phase(f"{name}: round {number + 1}"):
                    rounds.append(asyncio.run(scenario(server, name, arguments.rate, arguments.seconds)))
            numbers = [key for key, value in rounds[0].items() if not isinstance(value, dict)]
            results[name] = {key: round(median(one[key] for one in rounds), 3) for key in numbers}
            results[name]["rounds"] = rounds
            print(name, json.dumps({key: value for key, value in results[name].items() if key != "rounds"}))
    write("fairness", METHOD, results)


if __name__ == "__main__":
    main()
