"""Texts of 512 to 8,192 tokens on the embedded engines: time, memory, and what short texts feel beside them."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import Server, medians, parser, phase, stored, write
from safetensors.numpy import load_file, save_file

from shoal.bench.client import Pool, Target
from shoal.bench.load import run_closed_loop, run_open_loop
from shoal.bench.stats import Record, summarize_latencies
from shoal.bench.texts import WORDS, Bodies, Texts

METHOD = """
`long`: the default model with its table of positions repeated up to 8,192, so that its vectors mean nothing and its
work is that of a model of 6 layers, width 384 and 12 heads. One text: a lone request, nothing else running, median of
rounds; `peak_mb`: what the process had more at most (VmHWM) than before it; `kept_mb`: what it still had after the
answer, both the most of the rounds. Beside: single texts of 16 tokens, open loop at a steady rate, latency from when
each was due, to `long` itself or to the default model in the same process, alone and beside a bulk client of `long`:
requests of 16 texts of 4,096 tokens in a closed loop over two connections. `loop_ms`: the slowest of the requests to
/health/live, one every 10 ms, while a lone text of 8,192 tokens (45 kB) is computed. The clients run on the same cores.
"""
POSITIONS = 8192
LENGTHS = (512, 1024, 2048, 4096, 8192)
ENGINES = (("openvino", "f32"), ("openvino", "bf16"), ("onnxruntime", "f32"))
BULK_TEXTS, BULK_TOKENS = 16, 4096


def write_model(folder: Path, model: str) -> Path:
    """The published files of a stored model, with `POSITIONS` positions."""
    shutil.copytree(stored(model).path / "source", folder)
    weights = load_file(folder / "model.safetensors")
    weights.pop("embeddings.position_ids", None)
    table = weights["embeddings.position_embeddings.weight"]
    weights["embeddings.position_embeddings.weight"] = np.tile(table, (POSITIONS // len(table), 1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name, key in (
        ("config.json", "max_position_embeddings"),
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | {key: POSITIONS}))
    return folder


def long_text(tokens: int) -> str:
    """So many tokens with the two special ones; no two are alike."""
    return " ".join(random.choices(WORDS, k=tokens - 2))


def lone(server: Server, tokens: int, model: str) -> dict[str, float]:
    assert server.process is not None
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # VmHWM begins anew
    before, start = server.status_kb("VmRSS"), time.perf_counter()
    body = json.dumps({"model": model, "input": long_text(tokens)}).encode()
    request = urllib.request.Request(server.url + "/v1/embeddings", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        reply.read()
    took = time.perf_counter() - start
    time.sleep(0.2)
    return {
        "ms": took * 1e3,
        "peak_mb": (server.status_kb("VmHWM") - before) / 1024,
        "kept_mb": (server.status_kb("VmRSS") - before) / 1024,
    }


def requests(server: Server, model: str, count: int, make: Callable[[], list[str]]) -> Callable[[], bytes]:
    bodies = Bodies("openai", model, "base64", Target(server.url).name)
    ready = [bodies.request(make()) for _ in range(count)]
    return lambda: ready.pop() if ready else bodies.request(make())


async def beside(server: Server, model: str, rate: float, seconds: float) -> dict[str, float]:
    """Single short texts to `model`, alone and beside the bulk client; and the bulk client's own rate."""
    short = Texts(16, seed=random.getrandbits(48))
    single = requests(server, model, round(3 * rate * seconds), lambda: short.take(1))
    job = requests(server, "long", 8, lambda: [long_text(BULK_TOKENS) for _ in range(BULK_TEXTS)])
    mine, theirs = Pool(Target(server.url, "127.0.0.2"), 64), Pool(Target(server.url, "127.0.0.3"), 2)
    found: dict[str, float] = {}
    for name in ("alone", "beside"):
        await mine.open()
        await theirs.open()
        bulk = asyncio.create_task(run_closed_loop(theirs, job, clients=2, seconds=1e4)) if name == "beside" else None
        await run_open_loop(mine, single, rate=rate, seconds=3.0)
        items, start = (await asyncio.to_thread(server.batch_counts))[0], time.perf_counter()
        record = await run_open_loop(mine, single, rate=rate, seconds=seconds)
        items = (await asyncio.to_thread(server.batch_counts))[0] - items
        took = summarize_latencies(record.latency)
        found |= {f"{name}_p50_ms": took["p50"], f"{name}_p99_ms": took["p99"], f"{name}_max_ms": took["max"]}
        found["errors"] = found.get("errors", 0) + sum(record.errors.values())
        if bulk is not None:
            found["bulk_texts_per_s"] = (items - len(record.latency)) / (time.perf_counter() - start)
            bulk.cancel()
            await asyncio.gather(bulk, return_exceptions=True)
            theirs.close()
    mine.close()
    return found


async def bulk_alone(server: Server, seconds: float) -> float:
    """Texts a second of the bulk client without anyone else."""
    job = requests(server, "long", 8, lambda: [long_text(BULK_TOKENS) for _ in range(BULK_TEXTS)])
    pool = Pool(Target(server.url, "127.0.0.3"), 2)
    await pool.open()
    bulk = asyncio.create_task(run_closed_loop(pool, job, clients=2, seconds=1e4))
    await asyncio.sleep(3.0)
    items, start = (await asyncio.to_thread(server.batch_counts))[0], time.perf_counter()
    await asyncio.sleep(seconds)
    items = (await asyncio.to_thread(server.batch_counts))[0] - items
    rate = items / (time.perf_counter() - start)
    bulk.cancel()
    await asyncio.gather(bulk, return_exceptions=True)
    pool.close()
    return rate


async def loop_ms(server: Server) -> float:
    """The slowest answer to a health check while a text of `POSITIONS` tokens is posted and computed."""
    pool = Pool(Target(server.url), 8)
    await pool.open()
    ask = f"GET /health/live HTTP/1.1\r\nhost: {Target(server.url).name}\r\n\r\n".encode()
    work = asyncio.create_task(asyncio.to_thread(lone, server, POSITIONS, "long"))
    record: Record = await run_open_loop(pool, lambda: ask, rate=100, seconds=2.0)
    await work
    pool.close()
    return summarize_latencies(record.latency)["max"]


class Both(Server):
    """Serves the long model as `long` and the other one as `short`."""

    def __init__(self, folder: Path, other: str, **settings: object) -> None:
        super().__init__(**settings)
        self._addresses = [f"long=file:{folder}", f"short={other}"]

    def command(self) -> list[str]:
        serve, *rest = super().command()[len(self.program) + 1 :]
        return [*super().command()[: len(self.program) + 1], serve, *self._addresses, *rest]


def one_engine(folder: Path, other: str, settings: dict[str, str], arguments: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with Both(folder, other, embed_timeout_s=600, **settings) as server:
        server.settle()
        lone(server, 64, "long")
        for tokens in LENGTHS:
            rounds = [lone(server, tokens, "long") for _ in range(arguments.rounds)]
            most = {key: round(max(one[key] for one in rounds), 1) for key in ("peak_mb", "kept_mb")}
            found[f"{tokens:,} tokens"] = medians(rounds) | most
        found["health"] = {"loop_ms": round(asyncio.run(loop_ms(server)), 1)}
        alone = round(asyncio.run(bulk_alone(server, arguments.seconds)), 3)
        for name in ("long", "short"):
            rounds = []
            for _ in range(arguments.beside_rounds):
                server.settle()  # the batches of the last bulk client
                rounds.append(asyncio.run(beside(server, name, arguments.rate, arguments.seconds)))
            found[f"16 tokens to {name}"] = medians(rounds) | {"bulk_alone_per_s": alone}
    return found


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(seconds=20.0, rounds=3)
    options.add_argument("--rate", type=float, default=10.0, help="single short texts a second")
    options.add_argument("--beside-rounds", type=int, default=1, help="runs of each pair of clients")
    options.add_argument("--engines", nargs="+", default=[], help="such as openvino-f32; all without")
    options.add_argument("--name", default="long_texts", help="name of the results")
    arguments = options.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = write_model(Path(work) / "long", arguments.model)
        other = arguments.model or stored().manifest.address
        for engine, precision in ENGINES:
            name = f"{engine}, {precision}"
            if arguments.engines and f"{engine}-{precision}" not in arguments.engines:
                continue
            with phase(name):
                results[name] = one_engine(folder, other, {"engine": engine, "precision": precision}, arguments)
            print(json.dumps(results[name]))
    write(arguments.name, METHOD, results)


if __name__ == "__main__":
    main()
