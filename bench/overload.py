"""More requests than the engine can do: what is answered in time, how late, and what refusing costs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from harness import Server, parser, phase, write

from shoal.bench.client import Pool, Target
from shoal.bench.load import run_closed_loop, run_open_loop
from shoal.bench.stats import Record, percentile
from shoal.bench.texts import Bodies, Texts

METHOD = """
One server with default settings and one client in a process of its own; requests of one text, all distinct, base64,
written before the clock starts. `capacity`: closed loop, 32 callers; `normal_p99_ms`: their latency. Then an open loop
at 1, 2 and 4 times that rate, each with the deadlines 30, 1 and 0.2 s (`x-request-timeout`): latency counts from when
a request was due; `goodput`: answers a second in the window, as a part of the capacity; `p99_ms` of what was answered,
`steady_p99_ms` of what was due after the first three seconds. `recovered_s`: after four times the load it goes back to
half at once; the second after which no request is refused or late any more. `hammer`: one address asks 1,200 times a
second and is mostly refused, another 10 times; p99 of the other one's requests, alone and beside it. `refusal_us`:
processor time of the server for a request that is refused, `accepted_us` for one that is answered by an engine that
takes 1 ms. `waited`: part of the time that the server's event loop was ready and had no core; where it is not small,
the latencies are the machine's. The engine is chosen so that it, and not the two cores that server and client
share, is what is too slow: `fake` sleeps 20 ms a call and 200 us a token; the local one reads long texts.
"""
DEADLINES = (30.0, 1.0, 0.2)
TIMES = (1, 2, 4)
CONNECTIONS = 3000
WINDOW_S = 3.0


def requests(server: Server, tokens: int, count: int, deadline: float) -> Callable[[], bytes]:
    """So many requests with texts that no other has, made now."""
    texts = Texts(tokens, seed=random.getrandbits(48))
    bodies = Bodies("openai", server.model, "base64", Target(server.url).name, f"x-request-timeout: {deadline:g}\r\n")
    return [bodies.request(texts.take(1)) for _ in range(count)].pop


def ms(values: list[float], part: float) -> float:
    return round(1000 * percentile(sorted(values), part), 1)


def summarize(record: Record, rate: float, seconds: float, capacity: float) -> dict[str, Any]:
    due = [at - latency for at, latency in zip(record.finished, record.latency, strict=True)]
    steady = [latency for latency, arrival in zip(record.latency, due, strict=True) if arrival >= WINDOW_S]
    inside = sum(WINDOW_S <= at < seconds for at in record.finished)
    return {
        "offered_per_s": round(rate, 1),
        "goodput": round(inside / (seconds - WINDOW_S) / capacity, 3),
        "p50_ms": ms(record.latency, 0.5),
        "p99_ms": ms(record.latency, 0.99),
        "steady_p99_ms": ms(steady, 0.99),
        "answered": len(record.latency),
        **{f"status_{name}": count for name, count in sorted(record.errors.items())},
    }


async def recovery(server: Server, pool: Pool, tokens: int, rate: float, deadline: float) -> float:
    """Seconds after the load went back to `rate` until nothing was refused or late any more."""
    last = 0.0
    for second in range(8):
        record = await run_open_loop(pool, requests(server, tokens, int(rate) + 1, deadline), rate=rate, seconds=1.0)
        if record.errors:
            last = second + 1.0
    return last


async def drill(server: Server, tokens: int, seconds: float) -> dict[str, Any]:
    pool = Pool(Target(server.url), CONNECTIONS)
    found: dict[str, Any] = {}
    try:
        with phase("capacity"):
            make = requests(server, tokens, int(20_000 * seconds / max(tokens, 16)), 30.0)
            record = await run_closed_loop(pool, make, clients=32, seconds=seconds)
            capacity = found["capacity_per_s"] = round(len(record.latency) / seconds, 1)
            found["normal_p99_ms"] = ms(record.latency, 0.99)
            print("   ", capacity, found["normal_p99_ms"])
        for deadline in DEADLINES:
            for times in TIMES:
                rate = times * capacity
                made = requests(server, tokens, int(rate * seconds) + 1, deadline)
                with phase(f"{times}x, {deadline:g} s"):
                    waited = server.waited_s()
                    record = await run_open_loop(pool, made, rate=rate, seconds=seconds)
                    one = found[f"{times}x {deadline:g} s"] = summarize(record, rate, seconds, capacity)
                    one["waited"] = round((server.waited_s() - waited) / record.seconds, 3)
                    print("   ", one)
            burst = asyncio.create_task(
                run_open_loop(
                    pool, requests(server, tokens, int(4 * capacity * 3) + 1, deadline), rate=rate, seconds=3.0
                )
            )
            await asyncio.sleep(3.0)
            recovered = await recovery(server, pool, tokens, capacity / 2, deadline)
            await burst
            found[f"recovered_s {deadline:g} s"] = recovered
            print("    recovered after", recovered)
    finally:
        pool.close()
    return found


async def hammer(server: Server, tokens: int, seconds: float, rate: float) -> dict[str, Any]:
    """What refusing one client costs another one."""
    one, other = (Pool(Target(server.url, address), 1000) for address in ("127.0.0.2", "127.0.0.3"))
    found: dict[str, Any] = {"hammer_per_s": rate}
    try:
        for name in ("alone", "beside"):
            calls = []
            if name == "beside":
                made = requests(server, tokens, int(rate * (seconds + 3)) + 1, 30.0)
                calls.append(asyncio.create_task(run_open_loop(one, made, rate=rate, seconds=seconds + 3)))
                await asyncio.sleep(3.0)
            before, waited = server.cpu_s(), server.waited_s()
            record = await run_open_loop(
                other, requests(server, tokens, int(10 * seconds) + 1, 30.0), rate=10, seconds=seconds
            )
            found[name] = {
                "p50_ms": ms(record.latency, 0.5),
                "p99_ms": ms(record.latency, 0.99),
                "errors": sum(record.errors.values()),
                "server_cpu": round((server.cpu_s() - before) / seconds, 2),
                "waited": round((server.waited_s() - waited) / seconds, 3),
            }
            for each in await asyncio.gather(*calls):
                found["hammer_status"] = {"200": len(each.latency), **each.errors}
            print("   ", name, found[name])
    finally:
        one.close()
        other.close()
    return found


async def cost_us(server: Server, status: int, waiting: int = 0, calls: int = 6000, callers: int = 16) -> int:
    """Processor time of the server for one of so many requests that are all answered so, while `held` others wait."""
    pool = Pool(Target(server.url), callers + waiting)
    holding = [asyncio.create_task(pool.ask(requests(server, 16, 1, 30.0)())) for _ in range(waiting)]
    await asyncio.sleep(0.5)
    made = requests(server, 16, calls, 30.0)

    async def caller() -> None:
        for _ in range(calls // callers):
            got = (await pool.ask(made())).status
            if got != status:
                raise RuntimeError(f"status {got} in place of {status}: this measures something else")

    before = server.cpu_s()
    await asyncio.gather(*(caller() for _ in range(callers)))
    spent = server.cpu_s() - before
    for task in holding:
        task.cancel()
    await asyncio.gather(*holding, return_exceptions=True)
    pool.close()
    return round(1e6 * spent / (calls // callers * callers))


def costs() -> dict[str, int]:
    found = {}
    with Server("fake:delay_ms=20000", access_log="false", max_queue_items=1) as server:
        found["refusal_us"] = asyncio.run(cost_us(server, 429, waiting=1))
    with Server("fake:delay_ms=1", access_log="false") as server:
        found["accepted_us"] = asyncio.run(cost_us(server, 200))
    print("   ", found)
    return found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--tokens", type=int, default=250, help="length of the local engine's texts")
    made.add_argument("--only", default="", help="fake or local")
    made.add_argument("--name", default="overload", help="of the file of results")
    options = made.parse_args()
    slow = "fake:delay_ms=20:token_us=200"
    results: dict[str, Any] = {}
    for name, address, tokens in (("fake", slow, 16), ("local", options.model, options.tokens)):
        if options.only not in ("", name):
            continue
        with Server(address, access_log="false", max_inputs=2048) as server:
            server.settle()
            print(name, server.model)
            found = asyncio.run(drill(server, tokens, options.seconds))
            found["tokens"] = tokens
            if name == "fake":
                with phase("hammer"):
                    found["hammer"] = asyncio.run(hammer(server, tokens, options.seconds, 1200.0))
            results[name] = found
        if name == "fake":
            found["cost"] = costs()
    write(options.name, METHOD, results)


if __name__ == "__main__":
    main()
