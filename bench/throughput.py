"""Shoal over HTTP against the engine inside it: throughput, a burst, a lone client, and the first minute."""

from __future__ import annotations

import asyncio
import json
import random
import time
from statistics import median
from typing import Any

from harness import Server, check_lengths, medians, parser, phase, stored, write, wrk
from raw import Raw

from shoal.bench.client import Pool, Target
from shoal.bench.load import run_burst, run_closed_loop, run_open_loop
from shoal.bench.stats import summarize_latencies
from shoal.bench.texts import Bodies, Texts

METHOD = """
One server with default settings; the engine alone runs the same ONNX file with the precision, streams and threads
that the server uses, token ids made beforehand, no HTTP, no tokenizer: its best rate over batch sizes at the length
that the server pads these texts to (`engine`) and at their own (`engine, unpadded`).
Both are measured in turn in every round on the same cores, the other one idle; medians over rounds. Load comes from wrk
on the same cores, one thread, float answers, every text distinct and of exact length. `burst`: 1,000 connections send
one text each at the same moment, against the engine's time for 1,000 texts and against one connection sending them one
after the other. `lone`: p50 of one connection, one text at a time, minus the engine's own p50 for one text in the same
stream configuration, and the engine's on one stream with all threads beside it; `lone, one stream`: a server with
streams=1. `first minute`: a fresh server under an open loop of
mixed lengths from the moment it is ready; p99 of that minute against a later window.
"""
CLIENTS = (1, 16, 64)
LENGTHS = (16, 100)
MIXED = (5, 9, 16, 23, 34, 51, 77, 100, 128, 180, 240)
BURST = 1000


def throughput(server: Server, raw: Raw, tokens: int, arguments: Any) -> dict[str, Any]:
    rounds: list[dict[str, float]] = []
    details: dict[str, Any] = {}
    wrk(server, tokens, 64, 1)  # caches, branch predictors, the server's own cost model
    for number in range(arguments.rounds):
        with phase(f"{tokens} tokens: round {number + 1}"):
            engine = raw.best(raw.padded(tokens), arguments.seconds)
            exact = raw.best(tokens, arguments.seconds / 2)
            one: dict[str, float] = {"engine": engine["texts_per_s"], "engine, unpadded": exact["texts_per_s"]}
            for clients in CLIENTS:
                ran = wrk(server, tokens, clients, arguments.seconds)
                one[f"{clients} clients"] = ran["per_s"]
                details[f"{clients} clients, round {number + 1}"] = ran
            one["64 clients / engine"] = one["64 clients"] / one["engine"]
            one["64 clients / engine, unpadded"] = one["64 clients"] / one["engine, unpadded"]
            rounds.append(one)
            details[f"engine, round {number + 1}"] = engine
    return {"padded_to": raw.padded(tokens), "texts_per_s": medians(rounds), "rounds": rounds, "runs": details}


def bodies_for(server: Server) -> Bodies:
    return Bodies("openai", server.model, "base64", Target(server.url).name)


async def concurrent(server: Server, tokens: int) -> float:
    """Seconds for BURST texts that arrive together, each on a connection of its own."""
    texts, bodies = Texts(tokens, seed=random.getrandbits(48)), bodies_for(server)
    pool = Pool(Target(server.url), BURST)
    await pool.open()
    record = await run_burst(pool, [bodies.request([text]) for text in texts.take(BURST)])
    pool.close()
    if record.errors:
        raise RuntimeError(f"requests failed: {dict(record.errors)}")
    return record.seconds


async def in_a_row(server: Server, tokens: int, count: int) -> list[float]:
    """The latency of each of `count` texts, one after the other on one connection."""
    texts, bodies = Texts(tokens, seed=random.getrandbits(48)), bodies_for(server)
    connection = await Target(server.url).connect()
    found = []
    for text in texts.take(count):
        request = bodies.request([text])
        start = time.perf_counter()
        reply = await connection.ask(request)
        found.append(time.perf_counter() - start)
        if reply.status != 200:
            raise RuntimeError(f"a request failed with {reply.status}")
    connection.close()
    return found


def bursts(server: Server, raw: Raw, tokens: int, arguments: Any) -> dict[str, float]:
    rounds = []
    for _ in range(arguments.rounds):
        together = asyncio.run(concurrent(server, tokens))
        engine = BURST / raw.best(raw.padded(tokens), 1.5)["texts_per_s"]
        alone = sum(asyncio.run(in_a_row(server, tokens, BURST)))
        rounds.append(
            {
                "together_s": together,
                "engine_s": engine,
                "in_a_row_s": alone,
                "together / engine": together / engine,
                "in_a_row / together": alone / together,
            }
        )
    return medians(rounds)


def lone(server: Server, raw: Raw, tokens: int, arguments: Any) -> dict[str, float]:
    """Milliseconds: the engine's p50 in the server's streams and on one stream, a lone client's, what it adds."""
    rounds = []
    for _ in range(arguments.rounds):
        engine = raw.lone_ms(raw.padded(tokens), min(2.0, arguments.seconds))
        one_stream = raw.lone_ms(raw.padded(tokens), min(2.0, arguments.seconds), one_stream=True)
        client = median(asyncio.run(in_a_row(server, tokens, 400))) * 1000
        rounds.append(
            {
                "engine_p50_ms": engine,
                "engine_one_stream_p50_ms": one_stream,
                "client_p50_ms": client,
                "added_ms": client - engine,
                "added_to_one_stream_ms": client - one_stream,
            }
        )
    return medians(rounds)


async def first_minute(server: Server, arguments: Any) -> dict[str, Any]:
    generators = [Texts(tokens, seed=random.getrandbits(48)) for tokens in MIXED]
    bodies = bodies_for(server)
    pool = Pool(Target(server.url), 256)

    def make() -> bytes:
        return bodies.request(random.choice(generators).take(1))

    early = await run_open_loop(pool, make, rate=arguments.rate, seconds=arguments.early)
    later = await run_open_loop(pool, make, rate=arguments.rate, seconds=arguments.later)
    pool.close()
    slices: dict[str, float] = {}
    step = max(5.0, arguments.early / 12)
    for start in range(0, int(arguments.early), int(step)):
        part = [
            latency for latency, end in zip(early.latency, early.finished, strict=True) if start <= end < start + step
        ]
        slices[f"{start}-{start + int(step)} s"] = summarize_latencies(part).get("p99", 0.0)
    return {
        "rate_per_s": arguments.rate,
        "early_s": arguments.early,
        "early_ms": summarize_latencies(early.latency),
        "later_ms": summarize_latencies(later.latency),
        "early_p99_by_time_ms": slices,
        "errors": sum(early.errors.values()) + sum(later.errors.values()),
    }


async def warm_up(server: Server) -> None:
    """A second of load on the paths that are timed one by one."""
    texts, bodies = Texts(16, seed=random.getrandbits(48)), bodies_for(server)
    pool = Pool(Target(server.url), 4)
    await run_closed_loop(pool, lambda: bodies.request(texts.take(1)), clients=4, seconds=1.0)
    pool.close()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--early", type=float, default=60.0, help="seconds of the first window (0: leave it out)")
    options.add_argument("--later", type=float, default=20.0, help="seconds of the later window")
    options.add_argument("--rate", type=float, default=40.0, help="mixed texts a second in both windows")
    arguments = options.parse_args()
    results: dict[str, Any] = {}
    with Server(arguments.model) as server:
        if arguments.early:
            with phase("first minute"):
                results["first minute"] = asyncio.run(first_minute(server, arguments))
            print(json.dumps(results["first minute"]))
        server.settle()
        results["served"] = server.card()
        entry = stored(arguments.model)
        results["tokens_checked"] = check_lengths(entry.tokenizer, {*LENGTHS, *MIXED})
        raw = Raw(entry, server.card()["precision"])
        results["engine"] = raw.facts
        for tokens in LENGTHS:
            found = throughput(server, raw, tokens, arguments)
            results[f"{tokens} tokens"] = found
            print(json.dumps(found["texts_per_s"]))
        asyncio.run(warm_up(server))
        with phase("burst and lone client"):
            results["burst"] = {f"{tokens} tokens": bursts(server, raw, tokens, arguments) for tokens in LENGTHS}
            results["lone"] = {f"{tokens} tokens": lone(server, raw, tokens, arguments) for tokens in LENGTHS}
        print(json.dumps({name: results[name] for name in ("burst", "lone")}))
    with phase("lone client, one stream"), Server(arguments.model, streams=1) as server:
        server.settle()
        raw = Raw(entry, server.card()["precision"], streams=1)
        asyncio.run(warm_up(server))
        results["lone, one stream"] = {f"{tokens} tokens": lone(server, raw, tokens, arguments) for tokens in LENGTHS}
    print(json.dumps(results["lone, one stream"]))
    write("throughput", METHOD, results)


if __name__ == "__main__":
    main()
