"""How much of the engine's best rate `shoal bulk` gets: short texts from a JSONL file to `.npy` shards."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from harness import medians, parser, phase, stored, write
from raw import Raw

from shoal import config
from shoal.app import open_models
from shoal.bench.texts import Texts
from shoal.bulk.computing import Task
from shoal.bulk.plan import Recipe
from shoal.bulk.reading import Columns, Rows, describe_inputs
from shoal.bulk.run import BulkRun, Progress
from shoal.bulk.tasks import BATCH_MS, plan_embed
from shoal.bulk.writing import open_folder
from shoal.models.sources.pins import DEFAULT_MODEL
from shoal.python.background import check_loaded, max_items
from shoal.ray.bulk import Job, Resources, open_workers
from shoal.types import Embed

METHOD = """
The driver of `shoal bulk` in one process, from the first row read to the manifest of the last shard: JSONL is read,
texts are tokenized, computed, written, hashed and synced. The model is loaded before. The engine alone runs the same
ONNX file with the precision, streams and threads that the model uses, token ids made beforehand: its best rate over
batch sizes at the length to which these texts are padded. Both in turn in every round on the same cores, the other
one idle; medians over rounds. `cpu_ms`: processor time of a text, which other work on a shared machine changes less
than the rate.
"""

RAY_METHOD = """
The driver of `shoal bulk` over the same JSONL file: with a model in one process on all cores, and with workers on a
local Ray cluster, of one core each. Both models are loaded and warm before, and idle while the other one runs; both in
turn in every round; medians over rounds. Ray starts workers with a niceness of 15, here of 0: other work on a shared
machine would slow them alone.
"""


def run_engine(raw: Raw, tokens: int, seconds: float) -> dict[str, float]:
    """Texts a second and processor time of a text, at the best batch size of this moment."""
    best = raw.best(tokens, seconds / 2)
    cpu, start = time.process_time(), time.perf_counter()
    rate = raw.rate(int(best["batch_size"]), tokens, seconds)
    took = time.perf_counter() - start
    cpu_ms = (time.process_time() - cpu) / (rate * took) * 1000
    return {"per_s": max(rate, best["texts_per_s"]), "cpu_ms": cpu_ms, "batch": best["batch_size"]}


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    loaded = config.load({"precision": arguments.precision, "reproducible": True, "max_batch_ms": BATCH_MS}, {}, None)
    rounds = []
    texts = Texts(arguments.tokens)
    async with open_models(loaded, (arguments.model,) if arguments.model else ()) as running:
        await running.wait_until_loaded()
        check_loaded(running)
        name = running.gateway.resolve("", "embed")[0]
        facts = running.gateway.model(name).facts
        assert facts is not None
        raw = Raw(stored(arguments.model), facts.precision)
        task = plan_embed(running.gateway, Embed(model=name, inputs=[]), max_items(loaded))
        for number in range(arguments.rounds + 1):  # the first one warms up both
            count = 2000 if number == 0 else arguments.texts // arguments.rounds
            path = folder / f"{number}.jsonl"
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts.take(count)))
            engine = await asyncio.to_thread(run_engine, raw, raw.padded(arguments.tokens), arguments.seconds)
            files = describe_inputs([str(path)], Columns(("text",)))
            recipe = Recipe(
                task="embed", model={}, options={}, format="npy", shard_rows=arguments.shard_rows, inputs=files
            )
            start, cpu = time.perf_counter(), time.process_time()
            with open_folder(folder / str(number), recipe) as output:
                await BulkRun(task, Rows(files, Columns(("text",))), output, _Silent()).run()
            seconds, cpu_ms = time.perf_counter() - start, (time.process_time() - cpu) / count * 1000
            found = {
                "bulk / engine": count / seconds / engine["per_s"],
                "engine cpu / bulk cpu": engine["cpu_ms"] / cpu_ms,
                "bulk_per_s": count / seconds,
                "bulk_cpu_ms": cpu_ms,
            } | {f"engine_{name}": value for name, value in engine.items()}
            print("  " + json.dumps({key: round(value, 3) for key, value in found.items()}), flush=True)
            rounds += [found] if number else []
    return {"model": name, "precision": facts.precision, "texts": arguments.texts, **medians(rounds)}


async def measure_ray(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare workers on Ray, of one core each, with one process on as many cores."""
    workers = arguments.ray
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its name
    settings = {"precision": arguments.precision, "reproducible": True, "max_batch_ms": BATCH_MS}
    loaded = config.load({**settings, "threads": workers}, {}, None)
    address = arguments.model or DEFAULT_MODEL
    texts = Texts(arguments.tokens)
    rounds = []
    options = {"dimensions": None, "input_type": None, "prompt_name": None, "normalize": True}
    job = Job(config.load(settings, {}, None), address, "embed", options, 1)
    async with (
        open_models(loaded, (address,)) as running,
        open_workers(job, Resources(workers, 1.0)) as (spread, _),
    ):
        await running.wait_until_loaded()
        check_loaded(running)
        name = running.gateway.resolve("", "embed")[0]
        here = plan_embed(running.gateway, Embed(model=name, inputs=[]), max_items(loaded))
        for number in range(arguments.rounds + 1):  # the first one warms up both
            path = folder / f"{number}.jsonl"
            count = arguments.texts // arguments.rounds
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts.take(count)))
            found = {}
            for kind, task in (("one_process", here), ("ray", spread)):
                found[f"{kind}_per_s"] = count / await time_run(task, path, folder / f"{number}-{kind}", arguments)
            found["ray / one process"] = found["ray_per_s"] / found["one_process_per_s"]
            print("  " + json.dumps({key: round(value, 3) for key, value in found.items()}), flush=True)
            rounds += [found] if number else []
    return {"model": name, "workers": workers, "texts": arguments.texts, **medians(rounds)}


async def time_run(task: Task, path: Path, out: Path, arguments: argparse.Namespace) -> float:
    """Return the seconds of one run over a file."""
    files = describe_inputs([str(path)], Columns(("text",)))
    recipe = Recipe(task="embed", model={}, options={}, format="npy", shard_rows=arguments.shard_rows, inputs=files)
    start = time.perf_counter()
    with open_folder(out, recipe) as output:
        await BulkRun(task, Rows(files, Columns(("text",))), output, _Silent()).run()
    return time.perf_counter() - start


class _Silent(Progress):
    """Shows nothing."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--texts", type=int, default=20_000, help="texts of all rounds together")
    options.add_argument("--tokens", type=int, default=16, help="tokens of each text, special ones included")
    options.add_argument("--shard-rows", type=int, default=50_000, help="rows per shard")
    options.add_argument("--precision", default="auto", help="as --precision of serve")
    options.add_argument("--ray", type=int, default=0, metavar="N", help="compare N Ray workers with one process")
    arguments = options.parse_args()
    name, method, run = ("bulk_ray", RAY_METHOD, measure_ray) if arguments.ray else ("bulk", METHOD, measure)
    loop = uvloop.new_event_loop
    with tempfile.TemporaryDirectory() as folder, phase(name), asyncio.Runner(loop_factory=loop) as runner:
        results = runner.run(run(arguments, Path(folder)))
    print(json.dumps(results, indent=2))
    write(name, method, results)


if __name__ == "__main__":
    main()
