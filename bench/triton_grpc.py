"""Shoal in front of a real Triton against `grpc.aio` straight to it, with a near-free model; the original's table."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness import HERE, Server, check_lengths, cpu_s, home, medians, parser, phase, stored, write, wrk

from shoal.backends.triton.server import TritonOptions, TritonServer, run_triton
from shoal.bench.client import Target
from shoal.bench.machine import PACKAGES
from shoal.bench.stats import median
from shoal.bench.texts import WORDS, Bodies

METHOD = """
One tritonserver (its python backend, one instance, no dynamic batching), started by Shoal's own code; Shoal, the load
and Triton are processes of their own on the same cores, and only one contender works at a time, in turn in every round;
medians over rounds. Model of the first tables: `near_free`, text to 1,024 floats, an index into an array. Every text is
distinct, of 16 tokens. `direct`: a uvloop Python process with one `grpc.aio` channel, calls in flight = clients, from
texts to numpy arrays, with Shoal's protobuf classes and codec. `json`, `base64`: wrk (one thread) to
`/v1/embeddings`, float and base64 answers, Shoal as it is by default. `one RPC each`: the same, base64, to a Shoal with
batching off: each text an RPC of its own, up to 64 in flight. `batch`: texts a call as Triton counted them. CPU: processor
time of Shoal's process, and of tritonserver with its model's process, for a text; of the load client, where it is
Python. The original's table: 'asdf' 126 times with spaces between (without them this tokenizer reads one unknown word),
two words before it that make each text another, 256 tokens; POST /v1/embedding on one connection, p50. `model_ms`: time
in which the model computed this request, by Triton's own statistics; `processing_ms`: all the rest of the request.
The original measured bge-m3 on a GPU, so that only the last column compares.
"""
TOKENS = 16
SIZES = (1, 8, 32)
CLIENTS = (1, 16, 64)
ASDF_SIZES = (8, 16, 32, 64, 128, 256)
ASDF = " asdf" * 126
ASDF_TOKENS = 256
EXPECTED = {1: 9000.0, 8: 4000.0, 32: 1500.0}
"""Requests a second at most, by texts a request: so many bodies are made ready for wrk."""

CONFIG = """
name: "near_free"
backend: "python"
max_batch_size: 256
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "embedding" data_type: TYPE_FP32 dims: [ 1024 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""


class OneRpcEach(Server):
    """The same server with batching off."""

    program = (str(HERE / "one_rpc_each.py"),)


class Triton:
    """What the benchmark asks of the server behind all contenders."""

    def __init__(self, server: TritonServer) -> None:
        self.url = server.url
        self.version = server.version
        self.platforms = server.platforms
        self._http = f"http://{server.http_url}/v2"
        assert server.pid is not None, "it has just started"
        self._pid = server.pid

    def cpu_s(self) -> float:
        """Of tritonserver and the processes of its models."""
        return sum(map(cpu_s, (self._pid, *children(self._pid))))

    def counts(self, model: str) -> tuple[int, int, float]:
        """Texts, calls, and seconds of computing so far."""
        with urllib.request.urlopen(f"{self._http}/models/{model}/stats", timeout=10) as reply:
            stats = json.load(reply)["model_stats"][0]
        parts = stats["inference_stats"]
        ns = sum(parts[name]["ns"] for name in ("compute_input", "compute_infer", "compute_output"))
        return stats["inference_count"], stats["execution_count"], ns / 1e9


def children(pid: int) -> list[int]:
    return [int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]


class Direct:
    """The `grpc.aio` client, a process that is told what to do by lines of JSON."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "direct_grpc.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, **job: object) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the grpc.aio client ended; see its messages above")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self.process.stdin.close() if self.process.stdin else None
        self.process.wait(30)


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

    def _over_http(self, server: Server, size: int, clients: int, encoding: Any) -> dict[str, float]:
        def ask() -> dict[str, Any]:
            return wrk(
                server, TOKENS, clients, self.seconds, expected=EXPECTED[size], each=size, encoding=encoding
            )

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
            label = f"{size} text{'s' if size > 1 else ''} a request"
            found: dict[str, Any] = {}
            for clients in CLIENTS:
                rounds: dict[str, list[dict[str, float]]] = {}
                with phase(f"{label}, {clients} clients"):
                    for number in range(arguments.rounds):
                        for name, run in turned(field.contenders(size, clients), number):
                            rounds.setdefault(name, []).append(run())
                found |= {f"{name}, {clients} clients": medians(ran) for name, ran in rounds.items()}
                for name, ran in rounds.items():
                    print(f"  {name}: {json.dumps(medians(ran))}")
                found.setdefault("runs", {})[f"{clients} clients"] = rounds
            results[label] = found
    return results


def turned(contenders: dict[str, Any], turn: int) -> Iterator[tuple[str, Any]]:
    """Another one begins in each round."""
    order = list(contenders.items())
    shift = turn % len(order)
    yield from order[shift:] + order[:shift]


def targets(single: dict[str, Any]) -> dict[str, float]:
    """What the figures with one text a request come to."""

    def ratio(name: str, other: str) -> float:
        return single[name]["requests_per_s"] / single[other]["requests_per_s"]

    busy = single["base64, 64 clients"]
    alone = single["direct, 1 clients"]["p50_ms"]
    return {
        "json, 1 client: p50 over direct, ms": single["json, 1 clients"]["p50_ms"] - alone,
        "base64, 1 client: p50 over direct, ms": single["base64, 1 clients"]["p50_ms"] - alone,
        "base64, 64 clients: requests/s / one RPC each": ratio("base64, 64 clients", "one RPC each, 64 clients"),
        "base64, 64 clients: requests/s / direct": ratio("base64, 64 clients", "direct, 64 clients"),
        "CPU a request, base64, 64 clients, us: Shoal": busy["shoal_cpu_us"],
        "CPU a request, base64, 64 clients, us: Triton": busy["triton_cpu_us"],
        "CPU a request, one RPC each, us: Shoal": single["one RPC each, 64 clients"]["shoal_cpu_us"],
        "CPU a request, one RPC each, us: Triton": single["one RPC each, 64 clients"]["triton_cpu_us"],
    }


def asdf_texts(seed: int) -> Iterator[str]:
    """All different: two words that no other has, in an order of their own."""
    numbers = list(range(len(WORDS) ** 2))
    random.Random(seed).shuffle(numbers)
    for number in numbers:
        yield f"{WORDS[number % len(WORDS)]} {WORDS[number // len(WORDS)]}{ASDF}"


def check_asdf(tokenizer: Path) -> None:
    from tokenizers import Tokenizer

    reader = Tokenizer.from_file(str(tokenizer))
    reader.no_padding()
    reader.no_truncation()
    texts = asdf_texts(0)
    found = {len(one.ids) for one in reader.encode_batch_fast([next(texts) for _ in range(500)])}
    if found != {ASDF_TOKENS}:
        raise RuntimeError(f"texts of {ASDF_TOKENS} tokens have {sorted(found)}")


async def asdf_request(server: Server, triton: Triton, model: str, texts: list[str]) -> dict[str, float]:
    target = Target(server.url)
    request = Bodies("embedding", server.model, "float", target.name).request(texts)
    connection = await target.connect()
    before = triton.counts(model)
    start = time.perf_counter()
    reply = await connection.ask(request)
    took = (time.perf_counter() - start) * 1000
    after = triton.counts(model)
    connection.close()
    if reply.status != 200 or after[0] - before[0] != len(texts):
        raise RuntimeError(f"status {reply.status}, {after[0] - before[0]} texts computed of {len(texts)}")
    computed = (after[2] - before[2]) * 1000
    return {
        "request_ms": took,
        "model_ms": computed,
        "processing_ms": took - computed,
        "calls": after[1] - before[1],
    }


def original(triton: Triton, repository: Path, arguments: Any) -> dict[str, Any]:
    """batch -> request, model and processing, in milliseconds."""
    settings = {"backend": "triton", "triton_url": triton.url, "triton_repository": repository}
    with phase("a real model on Triton"), Server(arguments.model, **settings) as server:
        server.settle()
        card = server.card()
        entry = stored(card["source"] if "source" in card else "")
        check_lengths(entry.tokenizer, [TOKENS])
        check_asdf(entry.tokenizer)
        texts = asdf_texts(random.getrandbits(48))
        model = card["details"]["model"]
        found: dict[str, Any] = {}
        for size in (8, *ASDF_SIZES):  # the first one warms up, and is measured again
            rounds = [
                asyncio.run(asdf_request(server, triton, model, [next(texts) for _ in range(size)]))
                for _ in range(arguments.asdf_rounds)
            ]
            found[f"batch {size}"] = {key: median(one[key] for one in rounds) for key in rounds[0]}
        print(json.dumps(found, indent=1))
    return {"served": card, "table": found}


@contextmanager
def model_repository() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        entry = Path(folder) / "near_free"
        (entry / "1").mkdir(parents=True)
        shutil.copyfile(HERE / "near_free.py", entry / "1" / "model.py")
        (entry / "config.pbtxt").write_text(CONFIG)
        yield Path(folder)


def measure(triton: Triton, repository: Path, arguments: Any) -> dict[str, Any]:
    results: dict[str, Any] = {"triton": triton.version}
    found = contest(triton, arguments)
    if 1 in arguments.sizes:
        results["one text a request"] = {name: round(value, 3) for name, value in targets(found["1 text a request"]).items()}
        print(json.dumps(results["one text a request"], indent=1))
    results |= found
    if arguments.asdf_rounds:
        real = original(triton, repository, arguments)
        results["served"] = real["served"]
        results["the original's table"] = real["table"]
    return results


async def run(arguments: Any) -> dict[str, Any]:
    with model_repository() as repository:
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        options = TritonOptions(home=home(), repository=repository, load=("near_free",), **ports)
        with ExitStack() as stack:
            stack.enter_context(phase("triton"))
            async with run_triton(options) as server:
                stack.close()
                return await asyncio.to_thread(measure, Triton(server), repository, arguments)


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(seconds=2.0)
    options.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="texts a request")
    options.add_argument("--asdf-rounds", type=int, default=5, help="runs of the original's table (0: leave it out)")
    options.add_argument("--no-write", action="store_true", help="only print")
    arguments = options.parse_args()
    results = asyncio.run(run(arguments))
    if not arguments.no_write:
        write("triton", METHOD, results, packages=(*PACKAGES, "grpcio", "protobuf"))


if __name__ == "__main__":
    main()
