"""Shoal's streaming in front of a real Triton against `grpc.aio` straight to it: 100 tokens an answer."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness import HERE, Server, medians, parser, phase, write
from triton_kit import Triton, open_options

from shoal.backends.triton.server import run_triton
from shoal.bench.machine import PACKAGES

METHOD = """
One tritonserver, started by Shoal's own code, with a decoupled python-backend model that has vLLM's inputs and gives
every active stream one token in each step (`llm_pace.py`), 100 tokens an answer, prompts of 200 words, each of them
sent once; unthrottled it steps as fast as it can, in one process or in three. `direct`: `grpc.aio`, one
ModelStreamInfer for each answer over one channel, Shoal's protobuf classes, text alone; `direct, counting`: with the
counts of tokens, which Shoal asks for too, and which cost the model time; `shoal`: POST /v1/completions with stream,
one keep-alive connection for each stream, to `shoal serve` as it is by default. The load is the same closed loop in
both (`shoal bench chat`), on uvloop, in a process of its own; both read every piece of text and note when it came.
Shoal, the load and Triton are processes on the same cores, and only one contender works at a time, in turn in every
round; medians over rounds. Tokens are what the server counted, else the pieces that came. `ttft`: from the request to
the first piece; `chunk`: the wait between two pieces, over all of a run; `itl`: first to last piece over the tokens but
one. CPU: processor time for a token, of Shoal's process, of tritonserver with its model's processes, and of the load.
`Shoal alone`: the same load on `shoal serve fake:`, whose words cost nothing: what the API and the core come to without
an upstream.
"""
TOKENS = 100
MODELS = {"paced": (10, 1), "free": (0, 1), "wide": (0, 3)}
"""Milliseconds between two tokens, processes."""

RUNS = (("paced", 1, 8), ("paced", 16, 48), ("free", 1, 60), ("free", 64, 256), ("wide", 64, 512))
"""Model, streams, requests of a run."""

ALONE = ((1, 100), (64, 512))

CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
input [
  {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }},
  {{ name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }},
  {{ name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] optional: true }},
  {{ name: "return_finish_reason" data_type: TYPE_BOOL dims: [ 1 ] optional: true }},
  {{ name: "return_num_input_tokens" data_type: TYPE_BOOL dims: [ 1 ] optional: true }},
  {{ name: "return_num_output_tokens" data_type: TYPE_BOOL dims: [ 1 ] optional: true }}
]
output [
  {{ name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }},
  {{ name: "finish_reason" data_type: TYPE_STRING dims: [ -1 ] }},
  {{ name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] }},
  {{ name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ -1 ] }}
]
instance_group [ {{ count: {count} kind: KIND_CPU }} ]
parameters {{ key: "pace_ms" value: {{ string_value: "{pace}" }} }}
"""


@contextmanager
def repository() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        for name, (pace, count) in MODELS.items():
            entry = Path(folder) / name
            (entry / "1").mkdir(parents=True)
            shutil.copyfile(HERE / "llm_pace.py", entry / "1" / "model.py")
            (entry / "config.pbtxt").write_text(CONFIG.format(name=name, pace=pace, count=count))
        yield Path(folder)


class Load:
    """The client, a process that is told what to do by lines of JSON."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "llm_client.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, **job: object) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the load ended; see its messages above")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self.process.stdin.close() if self.process.stdin else None
        self.process.wait(30)


class Contest:
    """Who answers: Triton itself, and Shoal before it (`shoal` None: Triton alone)."""

    def __init__(self, triton: Triton, shoal: Server | None, load: Load) -> None:
        self.triton = triton
        self.shoal = shoal
        self.load = load

    def contenders(self, model: str, streams: int, requests: int) -> dict[str, Callable[[], dict[str, float]]]:
        job = {"model": model, "streams": streams, "requests": requests, "tokens": TOKENS}
        there = {"url": self.triton.url, **job}
        found = {
            "direct": lambda: self._measured(None, {"kind": "grpc", **there}),
            "direct, counting": lambda: self._measured(None, {"kind": "grpc", "count": True, **there}),
        }
        if (shoal := self.shoal) is not None:
            found["shoal"] = lambda: self._measured(shoal, {"kind": "http", "url": shoal.url, **job})
        return found

    def _measured(self, server: Server | None, job: dict[str, Any]) -> dict[str, float]:
        own, theirs = server.cpu_s() if server else 0.0, self.triton.cpu_s()
        ran = self.load.run(**job)
        tokens = job["requests"] * TOKENS
        rows = ran["rows"]
        gaps = rows["Time Between Chunks (ms)"]
        return {
            "tokens_per_s": ran["output_tokens_per_s"],
            "latency_ms": rows["Request Latency (ms)"]["avg"],
            "ttft_ms": rows["Time To First Token (ms)"]["avg"],
            "ttft_p99_ms": rows["Time To First Token (ms)"]["p99"],
            "itl_ms": rows["Inter Token Latency (ms)"]["avg"],
            "chunk_p99_ms": gaps["p99"],
            "chunk_max_ms": gaps["max"],
            "shoal_cpu_us": (server.cpu_s() - own) / tokens * 1e6 if server else 0.0,
            "triton_cpu_us": (self.triton.cpu_s() - theirs) / tokens * 1e6,
            "client_cpu_us": ran["client_cpu_us"],
        }


def label(model: str, streams: int) -> str:
    pace, count = MODELS[model]
    how = f"a token every {pace} ms" if pace else "unthrottled" + (f" in {count} processes" if count > 1 else "")
    return f"{how}, {streams} stream{'s' if streams > 1 else ''}"


def contest(field: Contest, rounds: int, runs: tuple[tuple[str, int, int], ...]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for model, streams, requests in runs:
        ran: dict[str, list[dict[str, float]]] = {}
        with phase(label(model, streams)):
            for number in range(rounds):
                order = list(field.contenders(model, streams, requests).items())
                for name, run in order if number % 2 == 0 else reversed(order):
                    ran.setdefault(name, []).append(run())
        for name, each in ran.items():
            print(f"  {name}: {json.dumps(medians(each))}")
        results[label(model, streams)] = {**{name: medians(each) for name, each in ran.items()}, "runs": ran}
    return results


def targets(found: dict[str, Any]) -> dict[str, float]:
    """What the figures come to, where Shoal took part."""
    made: dict[str, float] = {}
    for name, rows in found.items():
        if "shoal" not in rows:
            continue
        ours, theirs = rows["shoal"], rows["direct"]
        for other in ("direct", "direct, counting"):
            made[f"{name}: tokens/s over {other}"] = round(ours["tokens_per_s"] / rows[other]["tokens_per_s"], 4)
        for key in ("ttft_ms", "chunk_p99_ms"):
            made[f"{name}: {key} added"] = round(ours[key] - theirs[key], 3)
        made[f"{name}: CPU of Shoal, us a token"] = ours["shoal_cpu_us"]
    return made


def alone(load: Load, rounds: int) -> dict[str, dict[str, float]]:
    """Tokens a second, and processor time of Shoal for a token, with a model of its own process."""
    found: dict[str, dict[str, float]] = {}
    with Server("fake:") as server:
        for endpoint in ("completions", "chat"):
            for streams, requests in ALONE:
                ran = []
                for _ in range(rounds):
                    before = server.cpu_s()
                    job = {"model": "fake", "streams": streams, "requests": requests, "tokens": TOKENS}
                    one = load.run(kind="http", url=server.url, endpoint=endpoint, **job)
                    spent = (server.cpu_s() - before) / (requests * TOKENS) * 1e6
                    figures = {"tokens_per_s": one["output_tokens_per_s"], "shoal_cpu_us": spent}
                    ran.append({**figures, "client_cpu_us": one["client_cpu_us"]})
                found[f"{endpoint}, {streams} stream{'s' if streams > 1 else ''}"] = medians(ran)
    print(json.dumps(found, indent=1))
    return found


def loaded(server: Server) -> None:
    """Wait until every model is: a server that offers models is ready before they are."""
    until = time.monotonic() + 60
    while [one["status"]["value"] for one in server.get("/v1/models")["data"]] != ["loaded"] * len(MODELS):
        if time.monotonic() > until:
            raise RuntimeError(f"not all models were loaded: {server.text('/v1/models')}")
        time.sleep(0.05)


def measure(triton: Triton, arguments: Any) -> dict[str, Any]:
    with ExitStack() as stack:
        load = Load()
        stack.callback(load.close)
        shoal, single = None, {}
        if not arguments.direct_only:
            with phase("Shoal alone"):
                single = alone(load, arguments.rounds)
            with phase("Shoal before Triton"):
                shoal = stack.enter_context(Server(f"triton://{triton.url}"))
                loaded(shoal)
        field = Contest(triton, shoal, load)
        with phase("warm-up"):
            for run in field.contenders("wide", 16, 64).values():
                run()
        found = contest(field, arguments.rounds, RUNS)
    made = targets(found)
    print(json.dumps(made, indent=1))
    extra = {"what it comes to": made, "Shoal alone": single} if made else {}
    return {"triton": triton.version, **extra, **found}


async def run(arguments: Any) -> dict[str, Any]:
    with repository() as folder:
        async with run_triton(open_options(folder, list(MODELS))) as server:
            return await asyncio.to_thread(measure, Triton(server), arguments)


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(rounds=5)
    options.add_argument("--direct-only", action="store_true", help="leave Shoal out")
    options.add_argument("--no-write", action="store_true", help="only print")
    arguments = options.parse_args()
    results = asyncio.run(run(arguments))
    if not arguments.no_write and not arguments.direct_only:
        write("triton_llm", METHOD, results, packages=(*PACKAGES, "grpcio", "protobuf"))


if __name__ == "__main__":
    main()
