"""Single texts of a thousand users, joined into calls of a text-embeddings-inference server, against one call each."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from harness import HERE, Server, cpu_s, free_port, medians, parser, phase, write

from shoal.bench.client import Pool, Target
from shoal.bench.load import run_burst
from shoal.bench.texts import Bodies, Texts

METHOD = """
The server is tests/fakes/tei.py in a process of its own: 20 ms a call whatever it holds, at most 32 inputs in one, 512
permits, 384 dimensions in JSON. Load, Shoal and server share the machine. `one_each`: so many distinct texts of 16
tokens, a call each, straight to the server over as many connections as `upstream_calls` says, the next one sent as soon
as one is answered. `shoal`: the same number of other texts, one request each, all sent at once over connections of
their own that are open already, to POST /embed of a `shoal serve` with `streams` set to `upstream_calls`; the time runs
from the first request to the last answer. `ideal_s`: the calls that are needed at least, side by side, at 20 ms. Where
the rest goes: `cpu_s` is processor time of the three processes meanwhile; `start_s`: from the first request to the
first call at the server; `gaps_s`: what calls waited for each other beyond that. `poisoned`: one of the texts makes the
server fail its whole call. `lone`: single requests one after the other to an idle Shoal and, taking turns, straight to
the server and through bench/bare_proxy.py, which does nothing but pass a request on, with the same libraries: what it
adds is the machine's price of one more process in the way, which is mostly that of memory: a process that slept for 20
ms on a machine with other guests finds their data in its caches. Medians over rounds, and the least and the most that
was added in one of them.
"""
TOKENS = 16
DELAY_S = 0.02
MOST = 32
POISON = "poison-item"
SETTLE_S = 0.3
"""After connections were opened: the other side accepts them meanwhile."""


class Upstream:
    """The server of the test, a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def report(self) -> Any:
        with urllib.request.urlopen(f"{self.url}/control", timeout=10) as reply:
            return json.loads(reply.read())

    def forget(self) -> None:
        self.change(forget=True)

    def change(self, **fields: Any) -> None:
        request = urllib.request.Request(
            f"{self.url}/control", data=json.dumps(fields).encode(), headers={"content-type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=10).close()


@contextmanager
def upstream() -> Iterator[Upstream]:
    settings = ["--delay-ms", str(DELAY_S * 1000), "--max-client-batch-size", str(MOST), "--model-id", "bench/model"]
    with listening("-m", "tests.fakes.tei", "--dimension", "384", *settings) as (process, port):
        yield Upstream(process, port)


@contextmanager
def listening(*command: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A Python process that takes `--port`, once it listens there."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, *command, "--port", str(port)], cwd=HERE.parent, stdout=subprocess.DEVNULL
    )
    try:
        for _ in range(500):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield process, port
    finally:
        process.terminate()
        process.wait()


def requests(url: str, count: int, *, poisoned: bool = False) -> list[bytes]:
    """Single texts, no two alike."""
    bodies = Bodies("tei", "", "float", Target(url).name)
    texts = Texts(TOKENS, seed=random.getrandbits(48)).take(count)
    if poisoned:
        texts[count // 2] += f" {POISON}"
    return [bodies.request([text]) for text in texts]


async def measured(
    behind: Upstream, server: Server | None, connections: int, count: int, *, poisoned: bool = False
) -> dict[str, Any]:
    """One burst; None: straight to the server behind."""
    url = behind.url if server is None else server.url
    burst = requests(url, count, poisoned=poisoned)
    pool = Pool(Target(url), connections)
    await pool.open()
    await asyncio.sleep(SETTLE_S)
    await asyncio.to_thread(behind.forget)
    processes = {"load": os.getpid(), "server": behind.process.pid}
    if server is not None:
        assert server.process is not None
        processes["shoal"] = server.process.pid
    before = {name: cpu_s(pid) for name, pid in processes.items()}
    start = time.time()
    record = await run_burst(pool, burst)
    spent = {name: cpu_s(pid) - before[name] for name, pid in processes.items()}
    pool.close()
    report = await asyncio.to_thread(behind.report)
    calls = report["calls"]
    first, last = report["first_at"], report["last_at"]
    flight = report["most_in_flight"]
    return {
        "seconds": round(record.seconds, 3),
        "errors": dict(record.errors),
        "calls": calls,
        "mean_call": round(report["inputs"] / calls, 1),
        "most_in_flight": flight,
        "start_s": round(first - start, 3),
        "calls_s": round(last - first, 3),
        "gaps_s": round(last - first - calls * DELAY_S / flight, 3),
        **{f"cpu_{name}_s": round(value, 3) for name, value in spent.items()},
    }


async def lone(urls: dict[str, str], count: int) -> dict[str, float]:
    """Milliseconds of a single request on an idle server, at each of these addresses, taking turns."""
    pools = {name: Pool(Target(url), 1) for name, url in urls.items()}
    latencies: dict[str, list[float]] = {name: [] for name in pools}
    pending = {name: requests(url, count) for name, url in urls.items()}
    for pool in pools.values():
        await pool.open()
    for number in range(count):
        for name, pool in pools.items():
            start = time.perf_counter()
            reply = await pool.ask(pending[name][number])
            assert reply.status == 200, reply.status
            latencies[name].append((time.perf_counter() - start) * 1000)
            await asyncio.sleep(0.005)
    for pool in pools.values():
        pool.close()
    found = {f"{name}_ms": median(values) for name, values in latencies.items()}
    added = {f"{name}_adds_ms": found[f"{name}_ms"] - found["direct_ms"] for name in urls if name != "direct"}
    return {**found, **added}


def spread(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The least and the most that each contender added in a round."""
    names = [name for name in rounds[0] if name.endswith("_adds_ms")]
    return {
        name.replace("_ms", f"_{word}_ms"): round(which(one[name] for one in rounds), 3)
        for name in names
        for word, which in (("least", min), ("most", max))
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=1000)
    options.add_argument("--calls", type=int, default=4, help="calls in flight at the server, for both")
    options.add_argument("--lone", type=int, default=50, help="single requests on an idle server, in each round")
    options.set_defaults(rounds=5)
    arguments = options.parse_args()
    count, calls = arguments.requests, arguments.calls
    with upstream() as behind, Server(f"bench=tei+http://127.0.0.1:{behind.port}", streams=calls) as server:
        with phase("one call each"):
            each = asyncio.run(measured(behind, None, calls, count))
        with phase("warming up"):
            first = asyncio.run(measured(behind, server, count, count))
        with phase("joined"):
            rounds = [asyncio.run(measured(behind, server, count, count)) for _ in range(arguments.rounds)]
        with phase("one of them poisoned"):
            poisoned = asyncio.run(measured(behind, server, count, count, poisoned=True))
        with phase("alone"), listening("bench/bare_proxy.py", behind.url) as (_, port):
            urls = {"direct": behind.url, "shoal": server.url, "bare_proxy": f"http://127.0.0.1:{port}"}
            alone = [asyncio.run(lone(urls, arguments.lone)) for _ in range(arguments.rounds)]
    if any(one["errors"] for one in (each, first, *rounds)):
        raise RuntimeError("a run with errors measures nothing")
    joined = medians([{key: value for key, value in one.items() if key != "errors"} for one in rounds])
    ideal = math.ceil(math.ceil(count / MOST) / calls) * DELAY_S
    results = {
        "requests": count,
        "upstream_calls": calls,
        "one_each": each,
        "shoal": joined,
        "first_burst": first,
        "times_faster": round(each["seconds"] / joined["seconds"], 1),
        "ideal_s": round(ideal, 3),
        "ideal_times_faster": round(each["seconds"] / ideal, 1),
        "poisoned": poisoned,
        "lone": medians(alone) | spread(alone),
    }
    print(json.dumps(results, indent=1))
    write("tei_batching", METHOD, results)


if __name__ == "__main__":
    main()
