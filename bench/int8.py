"""int8 weights against bf16 and f32 on this processor: speed of the engine, and how far vectors and neighbours move."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import HERE, medians, parser, phase, stored, write

from shoal.backends.local.engines import EngineOptions, load_opener
from shoal.core.protocols import Engine, EngineFacts, Prepared, Tensors
from shoal.models.convert.samples import TEXTS
from shoal.models.convert.variants import size_of, write_variant
from shoal.pipelines.text.tokens import TextPipeline
from shoal.types import Array, Embed

METHOD = """
The stored model's graph, and its int8 and fp16 variants written anew, each opened by OpenVINO as Shoal serves it with
--streams streams on as many threads. Speed: random token ids without padding, as many batches in flight as there are
streams, contenders in alternating order every round, medians; `1x16 alone` is one batch at a time. Parity: cosine of
every row to the f32 row of the same text; `top1`, `top10`: the part of the texts' nearest neighbours among the others
that are the same as in f32. Texts: Shoal's sample texts and paragraphs of its documentation, in batches of eight.
"""
SHAPES = ((1, 16), (8, 16), (8, 64), (32, 128))
CONTENDERS = ("f32", "bf16", "int8", "fp16")
BATCH = 8


def texts() -> list[str]:
    """The sample texts, and 150 paragraphs of prose."""
    found = []
    for page in sorted((HERE.parent / "docs").glob("*.md")):
        paragraphs = page.read_text().split("\n\n")
        found += [" ".join(one.split()) for one in paragraphs if len(one) > 60 and one[0].isalpha()]
    random.Random(7).shuffle(found)
    return [*TEXTS, *dict.fromkeys(found[:150])]


def batches(folder: Path, spec: Any) -> list[Tensors]:
    pipeline = TextPipeline(folder, spec, truncate=True)
    task = Embed(model="", inputs=[])
    ready = [one for one in pipeline.prepare([(task, text) for text in texts()]) if isinstance(one, Prepared)]
    nothing = EngineFacts(name="bench", inputs=(), outputs=())
    return [pipeline.collate(ready[at : at + BATCH], nothing) for at in range(0, len(ready), BATCH)]


async def rows(engine: Engine, inputs: Sequence[Tensors], output: str) -> Array:
    found = [(await engine.infer(one, (output,), {}, time.monotonic() + 60))[output] for one in inputs]
    return np.concatenate(found).astype(np.float64)


def agreement(exact: Array, other: Array) -> dict[str, float]:
    unit = [one / np.linalg.norm(one, axis=-1, keepdims=True) for one in (exact, other)]
    cosines = (unit[0] * unit[1]).sum(-1)
    near = []
    for one in unit:
        alike = one @ one.T
        np.fill_diagonal(alike, -2.0)
        near.append(np.argsort(-alike, axis=-1)[:, :10])
    top10 = [len(set(a) & set(b)) / 10 for a, b in zip(*near, strict=True)]
    return {
        "min_cosine": round(float(cosines.min()), 5),
        "mean_cosine": round(float(cosines.mean()), 5),
        "top1": round(float((near[0][:, 0] == near[1][:, 0]).mean()), 3),
        "top10": round(float(np.mean(top10)), 3),
    }


async def rate(engine: Engine, shape: tuple[int, int], flights: int, seconds: float, output: str) -> float:
    """Texts a second."""
    size, length = shape
    draw = np.random.default_rng(size * length)
    done = 0
    end = time.perf_counter() + seconds

    async def flight() -> None:
        nonlocal done
        ids = draw.integers(1000, 20000, (size, length))
        feeds = {name: ids if name == "input_ids" else np.ones_like(ids) for name in engine.facts.inputs}
        while time.perf_counter() < end:
            await engine.infer(feeds, (output,), {}, time.monotonic() + 60)
            done += size

    start = time.perf_counter()
    await asyncio.gather(*(flight() for _ in range(flights)))
    return done / (time.perf_counter() - start)


async def measure(arguments: Any) -> dict[str, Any]:
    entry = stored(arguments.model)
    spec = entry.manifest.text_spec
    results: dict[str, Any] = {"model": entry.manifest.id, "streams": arguments.streams}
    async with AsyncExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        graphs = {"f32": entry.graph, "bf16": entry.graph}
        for variant in ("int8", "fp16"):
            graphs[variant] = place / f"{variant}.onnx"
            write_variant(entry.graph, graphs[variant], variant, grouped=variant == "int8")  # type: ignore[arg-type]
        options = EngineOptions(streams=arguments.streams, threads=arguments.streams, warm_up_s=0.0)
        options = replace(options, max_length=spec.max_tokens)
        engines: dict[str, Engine] = {}
        for name in CONTENDERS:
            chosen = replace(options, precision=name)
            engines[name] = await load_opener("openvino")(graphs[name], name=name, options=chosen)
            stack.push_async_callback(engines[name].aclose)
            results.setdefault("engine", engines[name].facts.details["engine"])
        with phase("parity"):
            inputs = batches(entry.path, spec)
            found = {name: await rows(engine, inputs, spec.pooled) for name, engine in engines.items()}
        results["texts"] = len(found["f32"])
        results["parity"] = {
            name: agreement(found["f32"], found[name])
            | {"mib": round(size_of(graphs[name]) / 2**20, 1)}
            | {"arithmetic": engines[name].facts.details["arithmetic"]}
            for name in CONTENDERS
        }
        cases = [(f"{size}x{length}", (size, length), arguments.streams) for size, length in SHAPES]
        for label, shape, flights in [*cases, ("1x16 alone", (1, 16), 1)]:
            for engine in engines.values():
                await rate(engine, shape, flights, 0.3, spec.pooled)
            rounds = []
            with phase(label):
                for number in range(arguments.rounds):
                    shift = number % len(CONTENDERS)
                    order = CONTENDERS[shift:] + CONTENDERS[:shift]
                    one = {name: await rate(engines[name], shape, flights, arguments.seconds, spec.pooled)
                           for name in order}  # fmt: skip
                    rounds.append({name: one[name] for name in CONTENDERS})
            ratios = [{f"{name} / {base}": one[name] / one[base] for name, base in PAIRS} for one in rounds]
            results[label] = {"texts_per_s": medians(rounds), "ratios": medians(ratios)}
            print(json.dumps(results[label]["ratios"]))
    return results


PAIRS = (("bf16", "f32"), ("int8", "f32"), ("int8", "bf16"), ("fp16", "f32"))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=2)
    arguments = options.parse_args()
    write("int8", METHOD, asyncio.run(measure(arguments)))


if __name__ == "__main__":
    main()
