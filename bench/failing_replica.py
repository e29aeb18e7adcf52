"""Two replicas of which one answers at once, and wrongly: how much work it gets, and how many requests fail."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from harness import Server, parser, phase, write
from tei_batching import upstream

from shoal.bench.client import Pool, Target
from shoal.bench.load import run_open_loop
from shoal.bench.stats import summarize_latencies
from shoal.bench.texts import Bodies, Texts

METHOD = """
Two TEI servers (tests/fakes/tei.py, a process each, 20 ms a call) behind one Shoal with default settings. Requests of
one text of 16 tokens, all distinct, open loop at a steady rate that one replica can do. After both are in service one
of them answers every call at once: with status 500, with TEI's 424, with a page of HTML, with no vectors, or with one
too few. `broken_share`: its part of the calls of the whole run; `failed`: requests that were not answered with 200.
"""
RATE = 150.0
WAYS = ("500", "424", "html", "empty", "short")


async def load(server: Server, seconds: float) -> dict[str, Any]:
    texts = Texts(16, seed=random.getrandbits(48))
    bodies = Bodies("openai", server.model, "base64", Target(server.url).name)
    ready = [bodies.request(texts.take(1)) for _ in range(int(RATE * seconds) + 1)]
    pool = Pool(Target(server.url), 500)
    try:
        record = await run_open_loop(pool, ready.pop, rate=RATE, seconds=seconds)
    finally:
        pool.close()
    return {
        "answered": len(record.latency),
        "failed": sum(record.errors.values()),
        **{f"status_{name}": count for name, count in sorted(record.errors.items())},
        "p99_ms": summarize_latencies(record.latency).get("p99"),
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--name", default="failing_replica", help="of the file of results")
    options = made.parse_args()
    results: dict[str, Any] = {"requests_per_s": RATE, "seconds": options.seconds}
    for how in WAYS:
        with upstream() as well, upstream() as broken:
            address = "m=" + ",".join(one.url.replace("http://", "tei+http://") for one in (broken, well))
            with Server(address, access_log="false") as server, phase(how):
                asyncio.run(load(server, 2.0))  # until both are known to serve
                for one in (broken, well):
                    one.forget()
                broken.change(misbehaves=how, delay_ms=0)
                found = asyncio.run(load(server, options.seconds))
                calls = [sum(1 for size in one.report()["sizes"] if size) for one in (broken, well)]
                found = {"broken_share": round(calls[0] / sum(calls), 4), "broken_calls": calls[0], **found}
                print("   ", found)
                results[how] = found
    write(options.name, METHOD, results)


if __name__ == "__main__":
    main()
