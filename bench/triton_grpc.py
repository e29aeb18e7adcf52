"""Shoal in front of a real Triton against `grpc.aio` straight to it, with a near-free model; the original's table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import asdf
from harness import HERE, Server, check_lengths, medians, parser, phase, stored, write, wrk
from triton_kit import Direct, Triton, model_repository, open_options

from shoal.backends.triton.server import run_triton
from shoal.bench.machine import PACKAGES
from shoal.bench.texts import Encoding

METHOD = """
One tritonserver (its python backend, one instance, no dynamic batching), started by Shoal's own code; Shoal, the load
and Triton are processes of their own on the same cores, and only one contender works at a time, in turn in every round;
medians over rounds. Model of the first tables: `near_free`, text to 1,024 floats, an index into an array. Every text is
distinct, of 16 tokens. `direct`: a uvloop Python process with one `grpc.aio` channel, calls in flight = clients, from
texts to numpy arrays, with Shoal's protobuf classes and codec. `json`, `base64`: wrk (one thread) to
`/v1/embeddings`, float and base64 answers, Shoal as it is by default. `one RPC each`: the same, base64, to a Shoal with
batching off: each text an RPC of its own, up to 64 in flight. `batch`: texts an execution, as Triton counted them. CPU:
processor time for a text, of Shoal's process, of tritonserver with its model's process, and of the load client where it
is Python. The original's table: 'asdf' 126 times with spaces between (without them this tokenizer reads one unknown
word), two words before it that make each text another, 256 tokens; POST /v1/embedding on one connection, medians.
`model_ms`: the time of this request's executions by Triton's own statistics; `processing_ms`: all the rest of the
request. The original measured bge-m3 on a GPU, so that only the last column compares.
"""
TOKENS = 16
SIZES = (1, 8, 32)
CLIENTS = (1, 16, 64)
EXPECTED = {1: 9000.0, 8: 4000.0, 32: 1500.0}
"""Requests a second at most, by texts a request: so many bodies are made ready for wrk."""


class OneRpcEach(Server):
    """The same server with batching off."""

    program = (str(HERE / "one_rpc_each.py"),)


class Contest:
    """The contenders with the near-free model."""

    def __init__(self, triton: Triton, stack: ExitStack, seconds: float) -> None:
        self.triton = triton
        self.seconds = seconds
        address = f"near_free=triton://{triton.url}#near_free"
        with phase("shoal, twice"):
            self.shoal = stack.enter_context(Server(address))
            self.single = stack.enter_context(OneRpcEach(address))
        self.direct = Direct()
        stack.callback(self.direct.close)

    def contenders(self, size: int, clients: int) -> dict[str, Callable[[], dict[str, float]]]:
        found = {
            "direct": lambda: self._measured(None, size, lambda: self._ask(size, clients)),
            "json": lambda: self._over_http(self.shoal, size, clients, "float"),
            "base64": lambda: self._over_http(self.shoal, size, clients, "base64"),
        }
        if size == 1:
            found["one RPC each"] = lambda: self._over_http(self.single, size, clients, "base64")
        return found

    def _ask(self, size: int, clients: int) -> dict[str, Any]:
        return self.direct.run(
            url=self.triton.url, model="near_free", tokens=TOKENS, texts=size, clients=clients, seconds=self.seconds
        )

    def _over_http(self, server: Server, size: int, clients: int, encoding: Encoding) -> dict[str, float]:
        def ask() -> dict[str, Any]:
            return wrk(server, TOKENS, clients, self.seconds, expected=EXPECTED[size], each=size, encoding=encoding)

        return self._measured(server, size, ask)

    def _measured(self, server: Server | None, size: int, ask: Callable[[], dict[str, Any]]) -> dict[str, float]:
        """One run with what it cost; a text is what the processor time is shared out over."""
        own, theirs, (texts, calls, _) = server.cpu_s() if server else 0.0, self.triton.cpu_s(), self._counts()
        ran = ask()
        after, calls_after, _ = self._counts()
        done = after - texts
        return {
            "requests_per_s": ran["per_s"],
            "p50_ms": ran["p50"],
            "p99_ms": ran["p99"],
            "batch": done / max(calls_after - calls, 1),
            "shoal_cpu_us": (server.cpu_s() - own) / done * 1e6 if server else 0.0,
            "triton_cpu_us": (self.triton.cpu_s() - theirs) / done * 1e6,
            "client_cpu_us": ran.get("client_cpu_s", 0.0) / done * 1e6,
        }

    def _counts(self) -> tuple[int, int, float]:
        return self.triton.counts("near_free")


def contest(triton: Triton, arguments: Any) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        field = Contest(triton, stack, arguments.seconds)
        with phase("warm-up"):
            for run in field.contenders(1, 64).values():
                run()
        for size in arguments.sizes:
            label = texts_each(size)
            found: dict[str, Any] = {}
            for clients in CLIENTS:
                rounds: dict[str, list[dict[str, float]]] = {}
                with phase(f"{label}, {clients} clients"):
                    for number in range(arguments.rounds):
                        for name, run in turned(field.contenders(size, clients), number):
                            rounds.setdefault(name, []).append(run())
                found |= {from_clients(name, clients): medians(ran) for name, ran in rounds.items()}
                for name, ran in rounds.items():
                    print(f"  {name}: {json.dumps(medians(ran))}")
                found.setdefault("runs", {})[f"{clients} clients"] = rounds
            results[label] = found
    return results


def texts_each(size: int) -> str:
    return f"{size} text{'s' if size > 1 else ''} a request"


def from_clients(name: str, clients: int) -> str:
    return f"{name}, {clients} client{'s' if clients > 1 else ''}"


def turned(contenders: dict[str, Any], turn: int) -> Iterator[tuple[str, Any]]:
    """Another one begins in each round."""
    order = list(contenders.items())
    shift = turn % len(order)
    yield from order[shift:] + order[:shift]


def targets(single: dict[str, Any]) -> dict[str, float]:
    """What the figures with one text a request come to."""

    def ratio(name: str, other: str) -> float:
        return round(float(single[name]["requests_per_s"]) / float(single[other]["requests_per_s"]), 3)

    def over(name: str) -> float:
        return round(float(single[name]["p50_ms"]) - float(single["direct, 1 client"]["p50_ms"]), 3)

    busy = single["base64, 64 clients"]
    return {
        "json, 1 client: p50 over direct, ms": over("json, 1 client"),
        "base64, 1 client: p50 over direct, ms": over("base64, 1 client"),
        "base64, 64 clients: requests/s / one RPC each": ratio("base64, 64 clients", "one RPC each, 64 clients"),
        "base64, 64 clients: requests/s / direct": ratio("base64, 64 clients", "direct, 64 clients"),
        "CPU a request, base64, 64 clients, us: Shoal": busy["shoal_cpu_us"],
        "CPU a request, base64, 64 clients, us: Triton": busy["triton_cpu_us"],
        "CPU a request, one RPC each, us: Shoal": single["one RPC each, 64 clients"]["shoal_cpu_us"],
        "CPU a request, one RPC each, us: Triton": single["one RPC each, 64 clients"]["triton_cpu_us"],
    }


def measure(triton: Triton, repository: Path, arguments: Any) -> dict[str, Any]:
    results: dict[str, Any] = {"triton": triton.version}
    found = contest(triton, arguments)
    if 1 in arguments.sizes:
        results["what it comes to"] = targets(found[texts_each(1)])
        print(json.dumps(results["what it comes to"], indent=1))
    results |= found
    if arguments.asdf_rounds:
        results |= asdf.table(triton, repository, arguments.model, arguments.asdf_rounds)
        results["tokens_checked"] = check_lengths(stored(results["served"]["source"]).tokenizer, [TOKENS])
    return results


async def run(arguments: Any) -> dict[str, Any]:
    with model_repository() as repository:
        async with run_triton(open_options(repository, ["near_free"])) as server:
            return await asyncio.to_thread(measure, Triton(server), repository, arguments)


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(seconds=2.0)
    options.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="texts a request")
    options.add_argument("--asdf-rounds", type=int, default=3, help="runs of the original's table (0: leave it out)")
    options.add_argument("--no-write", action="store_true", help="only print")
    arguments = options.parse_args()
    results = asyncio.run(run(arguments))
    if not arguments.no_write:
        write("triton", METHOD, results, packages=(*PACKAGES, "grpcio", "protobuf"))


if __name__ == "__main__":
    main()
