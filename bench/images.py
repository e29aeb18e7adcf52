"""Pictures through Shoal against decoding and engine back to back in process, and what memory large ones take."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from clip import write_clip
from harness import Server, medians, parser, phase, write
from PIL import Image as pillow

from shoal.backends.local.compile import compile_graph
from shoal.backends.local.options import EngineOptions
from shoal.bench.client import Pool, Target
from shoal.bench.load import run_closed_loop
from shoal.bench.machine import PACKAGES
from shoal.bench.stats import Record, summarize_latencies
from shoal.core.protocols import Prepared
from shoal.machine_limits import usable_cores
from shoal.models.store import Store
from shoal.pipelines.image import ImagePipeline
from shoal.pipelines.image.budget import TOTAL, Budget
from shoal.types import Embed, Image

METHOD = """
A CLIP of ViT-B-32's shape with random weights; JPEG pictures of about 640 x 480 pixels, all distinct, each request one
of them as base64 to /v1/embeddings with base64 answers, from a closed loop on the same cores. `back to back`: in
process, the same graph compiled by the same code with the same precision, streams and threads, the same preprocessing
code and files; as many threads as there are cores decode pictures, then the engine runs them on all its streams, one
stage after the other, at the best of several batch sizes; no HTTP, no base64. `decode share`: of the time of that.
`one at a time`: one connection to the server; `one at a time, in process`: decode one, run one on all cores. Both sides
work in turn in every round, the other one idle; medians over rounds. `large pictures`: 16 clients send legal JPEGs of
40 million pixels; resident memory of the server before, at its peak and after, and, in process with as many threads,
the most bytes that were lent to decoders at once, against the bound.
"""
CLIENTS = 16
FILES = 192
SIZES = (1, 2, 4, 8, 16, 32)
LARGE = (8000, 5000)
LARGE_FILES = 4
TASK = Embed(model="", inputs=[])


def photograph(width: int, height: int, seed: int) -> bytes:
    """A JPEG with the detail and the size of one: smooth shades, edges and grain."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32) / np.float32(min(width, height))
    channels = []
    for _ in range(3):
        waves, phases = random.uniform(2, 22, (3, 2)), random.uniform(0, 6, 3)
        shade = sum(np.sin(waves[i, 0] * rows + waves[i, 1] * columns + phases[i]) for i in range(3))
        channels.append(shade)
    values = 128 + 34 * np.stack(channels, axis=-1)
    values += 40 * np.sign(np.sin(random.uniform(8, 16) * rows + random.uniform(8, 16) * columns))[..., None]
    if width * height < 2_000_000:
        values += random.normal(0, 7, (height, width, 1))
    return jpeg(np.clip(values, 0, 255).astype(np.uint8))


def jpeg(pixels: Any) -> bytes:
    file = io.BytesIO()
    pillow.fromarray(pixels).save(file, "JPEG", quality=85)
    return file.getvalue()


def request(host: str, model: str, data: bytes) -> bytes:
    """One picture, ready to be sent."""
    inputs = [{"image": b64encode(data).decode()}]
    body = json.dumps({"model": model, "input": inputs, "encoding_format": "base64"}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Alone:
    """The image tower's graph and its preprocessing in this process, nothing of Shoal between."""

    def __init__(self, home: Path, precision: str) -> None:
        (entry,) = Store(home).entries()
        part = entry.manifest.image
        assert part is not None
        value: Any = precision
        self._compiled = compile_graph(entry.path / part.graph, EngineOptions(precision=value, max_length=1))
        self._requests = [self._compiled.narrow.create_infer_request() for _ in range(self._compiled.streams)]
        self._one = (self._compiled.wide or self._compiled.narrow).create_infer_request()
        self._input = part.spec.input
        # It decodes everything before it runs anything, for which the server's bound is too small.
        self._pipeline = ImagePipeline(part.spec, budget=Budget(2**34))
        self._cores = usable_cores()

    @property
    def facts(self) -> dict[str, Any]:
        compiled = self._compiled
        return {"streams": compiled.streams, "threads": compiled.threads, "precision": compiled.precision}

    def best(self, files: Sequence[bytes], seconds: float) -> dict[str, float]:
        """Every batch size is tried briefly, the winner is measured."""
        tried = self.by_size(files, max(0.3, seconds / 6))
        size = max(tried, key=lambda one: tried[one]["per_s"])
        return self._rate(files, size, seconds) | {"batch_size": size}

    def by_size(self, files: Sequence[bytes], seconds: float) -> dict[int, dict[str, float]]:
        return {size: self._rate(files, size, seconds) for size in SIZES}

    def one_at_a_time(self, files: Sequence[bytes], seconds: float) -> float:
        """Pictures a second."""
        done, start = 0, time.perf_counter()
        while (now := time.perf_counter()) - start < seconds:
            values = self._decoded(files[done % len(files)])
            self._one.infer({self._input: values[None]}, share_inputs=True)
            done += 1
        return done / (now - start)

    def _decoded(self, data: bytes) -> Any:
        (found,) = self._pipeline.prepare([(TASK, Image(data))])
        if not isinstance(found, Prepared):
            raise found
        return found.tensors[self._input]

    def _rate(self, files: Sequence[bytes], size: int, seconds: float) -> dict[str, float]:
        """Several batches for each stream are decoded, then run."""
        count = size * len(self._requests) * max(1, 32 // (size * len(self._requests)))
        around = itertools.cycle(files)
        decoding, done, start = 0.0, 0, time.perf_counter()
        with ThreadPoolExecutor(self._cores) as pool:
            while time.perf_counter() - start < seconds:
                decode_start = time.perf_counter()
                rows = list(pool.map(self._decoded, itertools.islice(around, count)))
                decoding += time.perf_counter() - decode_start
                self._run([np.stack(rows[at : at + size]) for at in range(0, count, size)])
                done += count
        elapsed = time.perf_counter() - start
        return {"per_s": done / elapsed, "decode_share": decoding / elapsed}

    def _run(self, batches: Sequence[Any]) -> None:
        for number, batch in enumerate(batches):
            one = self._requests[number % len(self._requests)]
            one.wait()
            one.start_async({self._input: batch}, share_inputs=True)
        for one in self._requests:
            one.wait()


def load(server: Server, requests: Sequence[bytes], clients: int, seconds: float) -> Record:
    """A closed loop. Raises RuntimeError for any error: such a run measures nothing."""

    async def run() -> Record:
        pool = Pool(Target(server.url), clients)
        await pool.open()
        around = itertools.cycle(requests)
        try:
            return await run_closed_loop(pool, lambda: next(around), clients=clients, seconds=seconds)
        finally:
            pool.close()

    record = asyncio.run(run())
    if record.errors or not record.latency:
        raise RuntimeError(f"a run with errors, or without answers, measures nothing: {dict(record.errors)}")
    return record


def one_round(server: Server, alone: Alone, requests: Sequence[bytes], files: Sequence[bytes], seconds: float) -> Any:
    many = load(server, requests, CLIENTS, seconds)
    back_to_back = alone.best(files, seconds)
    one = load(server, requests, 1, seconds)
    lone = alone.one_at_a_time(files, seconds)
    return {
        "shoal": len(many.latency) / seconds,
        "back to back": back_to_back["per_s"],
        "decode share": back_to_back["decode_share"],
        "batch size, back to back": back_to_back["batch_size"],
        "batch size, shoal": sum(many.batch_sizes) / max(1, len(many.batch_sizes)),
        "one at a time": len(one.latency) / seconds,
        "one at a time, in process": lone,
        "p50_ms": summarize_latencies(many.latency)["p50"],
        "p99_ms": summarize_latencies(many.latency)["p99"],
    }


class Watched(Budget):
    """Keeps the most that was lent at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def take(self, size: int) -> None:
        super().take(size)
        with self._changed:
            self.peak = max(self.peak, self.total - self._free)


def large_images(server: Server, home: Path, seconds: float) -> dict[str, float]:
    files = [photograph(*LARGE, seed) for seed in range(LARGE_FILES)]
    # Twins that run at the same moment would be decoded once: a comment behind the marker makes each another file.
    distinct = (data[:2] + b"\xff\xfe\x00\x0a" + number.to_bytes(8) + data[2:] for number, data in _endless(files))
    requests = [request(Target(server.url).name, server.model, next(distinct)) for _ in range(2 * CLIENTS)]
    before = server.status_kb("VmRSS")
    assert server.process is not None
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # VmHWM begins anew
    record = load(server, requests, CLIENTS, max(seconds, 10.0))
    peak = server.status_kb("VmHWM")
    time.sleep(1)
    return {
        "pictures_per_s": len(record.latency) / record.seconds,
        "file_mb": sum(map(len, files)) / len(files) / 2**20,
        "rss_before_mb": before / 1024,
        "rss_peak_mb": peak / 1024,
        "rss_rise_mb": (peak - before) / 1024,
        "rss_after_mb": server.status_kb("VmRSS") / 1024,
        "requests_mb": CLIENTS * sum(map(len, requests)) / len(requests) / 2**20,
        "decoded_mb_at_most": lent(home, files) / 2**20,
        "decoded_mb_bound": TOTAL / 2**20,
    }


def _endless(files: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
    return enumerate(itertools.cycle(files))


def lent(home: Path, files: Sequence[bytes]) -> int:
    """Bytes lent at once while CLIENTS threads prepare large pictures, here."""
    (entry,) = Store(home).entries()
    part = entry.manifest.image
    assert part is not None
    budget = Watched()
    pipeline = ImagePipeline(part.spec, budget=budget)
    together = threading.Barrier(CLIENTS)

    def prepare(number: int) -> None:
        together.wait()
        pipeline.prepare([(TASK, Image(files[number % len(files)]))])

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(prepare, range(CLIENTS)))
    return budget.peak


def ratios(found: dict[str, float]) -> dict[str, float]:
    pairs: dict[str, Callable[[], float]] = {
        "over back to back": lambda: found["shoal"] / found["back to back"],
        "over one at a time": lambda: found["shoal"] / found["one at a time"],
        "over one at a time, in process": lambda: found["shoal"] / found["one at a time, in process"],
    }
    return {name: round(ratio(), 3) for name, ratio in pairs.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--precision", default="auto", help="of the server")
    options.add_argument("--max-batch-ms", type=float, default=40.0, help="of the server")
    arguments = options.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary) / "home"
        with phase("model and pictures"):
            folder = write_clip(Path(temporary) / "clip")
            files = [photograph(600 + seed % 80, 440 + seed % 70, seed) for seed in range(FILES)]
        settings = {"home": home, "precision": arguments.precision, "max_batch_ms": arguments.max_batch_ms}
        with Server(f"clip=file:{folder}", **settings) as server:
            server.settle()
            results["served"] = server.card()
            alone = Alone(home, image_precision(results["served"]))
            results["setup"] = alone.facts | {
                "clients": CLIENTS,
                "file_kb": sum(map(len, files)) / FILES / 1024,
                "max_batch_ms": arguments.max_batch_ms,
            }
            requests = [request(Target(server.url).name, server.model, data) for data in files]
            with phase("warm-up"):
                one_round(server, alone, requests, files, 1.0)
            rounds = []
            for number in range(arguments.rounds):
                with phase(f"round {number + 1}"):
                    rounds.append(one_round(server, alone, requests, files, arguments.seconds))
            found = medians(rounds)
            results |= {"pictures a second": found, "what it comes to": ratios(found), "rounds": rounds}
            print(json.dumps([found, results["what it comes to"]], indent=1))
            with phase("back to back, by batch size"):
                tried = alone.by_size(files, arguments.seconds / 2)
                results["back to back, by batch size"] = {str(size): one for size, one in tried.items()}
            with phase("large pictures"):
                results["large pictures"] = large_images(server, home, arguments.seconds)
            print(json.dumps(results["large pictures"], indent=1))
    write("images", METHOD, results, (*PACKAGES, "pillow"))


def image_precision(card: dict[str, Any]) -> str:
    """Of the image tower, as the server says it."""
    details = card.get("details") or card
    return str(details["image_precision"])


if __name__ == "__main__":
    main()
