"""What a request costs the model process of `shoal serve --workers` with and without the tokens of its texts."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
from harness import medians, parser, phase, stored, write

from shoal.bench.texts import Texts
from shoal.core.gateway import Gateway
from shoal.core.lane_runner import LaneRunner
from shoal.core.protocols import EngineFacts, ModelFacts, Observer
from shoal.core.registry import Model, Registry
from shoal.core.scheduling.lane import Lane, LaneOptions
from shoal.core.threads import Threads
from shoal.pipelines.text.tokens import TextPipeline
from shoal.types import Context, Embed, TokenizedTexts
from shoal.workers import messages
from shoal.workers.front import ModelProcess
from shoal.workers.models import ModelServer

METHOD = """
A model process of `--workers` with the tokenizer of all-MiniLM-L6-v2 and an engine that returns ones at once; a process
in the place of its fronts sends tasks over the Unix socket, 64 in flight, every text distinct. `model process`: its
processor time in microseconds a text, all threads, of texts and of the same texts with their tokens; each in turn in
every round. `front`: processor time of tokenizing and packing. Medians over rounds; `ratio` is that of a round. The
machine was shared, so processor time is somewhat high.
"""
LOADS = ((1, 16), (1, 100), (32, 16), (32, 100))
"""Texts a request, tokens a text."""
IN_FLIGHT = 64
TEXTS = 2048


class NoEngine:
    """Returns ones at once."""

    def __init__(self, dimension: int) -> None:
        self.facts = EngineFacts(name="none", inputs=("input_ids", "attention_mask"), outputs=("pooled",), slots=2)
        self._rows = np.ones((self.facts.max_batch_size, dimension), np.float32)

    async def infer(self, inputs: Any, outputs: Sequence[str], params: Any, deadline: float) -> dict[str, Any]:
        return {"pooled": self._rows[: len(inputs["input_ids"])].copy()}

    def ready(self) -> bool:
        return True

    async def aclose(self) -> None: ...


def main() -> None:
    arguments = parser(__doc__).parse_args()
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/models"
        process = multiprocessing.get_context("spawn").Process(target=run_models, args=(path, theirs))
        process.start()
        try:
            ours.recv()
            rounds = asyncio.run(measure(path, ours, arguments.rounds))
        finally:
            process.kill()
    figures = medians(rounds)
    for name, value in figures.items():
        print(f"{name:32} {value:8.2f}")
    write("tokenizing", METHOD, {"medians": figures, "rounds": rounds})


def run_models(path: str, pipe: Connection) -> None:
    asyncio.run(serve(path, pipe))


async def serve(path: str, pipe: Connection) -> None:
    pipeline = open_pipeline()
    lane = Lane(pipeline, [NoEngine(pipeline.spec.dimension)], LaneOptions(model="m"), threads=Threads("prepare", 2))
    model = Model(name="m")
    model.mark_loaded(LaneRunner(lane, ModelFacts(source="", backend="none", tasks=("embed",))))
    registry = Registry()
    registry.add(model)
    server = ModelServer(
        Gateway(registry), refuse, observer=Observer(), record_lag=lambda _: None, describe_remote=lambda _: b""
    )
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    listener.setblocking(False)
    pipe.send(None)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.run(listener, asyncio.Event(), 1.0))
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send(time.process_time())


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("no request was expected")


def open_pipeline() -> TextPipeline:
    found = stored()
    return TextPipeline(found.path, found.manifest.text_spec, truncate=True)


async def measure(path: str, pipe: Connection, count: int) -> list[dict[str, float]]:
    pipeline, process = open_pipeline(), ModelProcess(path)
    is_connected = asyncio.Event()
    process.when_changed(lambda _: is_connected.set())
    connecting = asyncio.create_task(process.run())
    await is_connected.wait()
    rounds = []
    for number in range(-1, count):  # the first one warms up
        with phase(f"round {number + 1}"):
            one: dict[str, float] = {}
            for texts, tokens in LOADS:
                one |= await measure_load(process, pipe, pipeline, texts, Texts(tokens, seed=number + 1).take(TEXTS))
            rounds.append(one)
    connecting.cancel()
    return rounds[1:]


async def measure_load(
    process: ModelProcess, pipe: Connection, pipeline: TextPipeline, each: int, texts: list[str]
) -> dict[str, float]:
    tasks = [Embed(model="m", inputs=texts[at : at + each]) for at in range(0, len(texts), each)]
    began = time.process_time()
    tokenized = [with_tokens(pipeline, task) for task in tasks]
    front = time.process_time() - began
    name = f"{each} x {round(len(pipeline.tokenizer.encode(texts[:1])[0]))}"
    found = {f"{name}, front": front / len(texts) * 1e6}
    for kind, some in (("texts", tasks), ("tokens", tokenized)):
        before = processor_s(pipe)
        await send(process, some)
        found[f"{name}, model process, {kind}"] = (processor_s(pipe) - before) / len(texts) * 1e6
    found[f"{name}, ratio"] = found[f"{name}, model process, tokens"] / found[f"{name}, model process, texts"]
    return found


def with_tokens(pipeline: TextPipeline, task: Embed) -> Embed:
    tokenized = TokenizedTexts(pipeline.tokenizer_id, pipeline.tokenize(task))
    return msgspec.structs.replace(task, tokenized=tokenized)


def processor_s(pipe: Connection) -> float:
    pipe.send(None)
    seconds: float = pipe.recv()
    return seconds


async def send(process: ModelProcess, tasks: Sequence[Embed]) -> None:
    left = iter(tasks)

    async def send_some() -> None:
        for task in left:
            deadline = time.monotonic() + 60
            ctx = Context(id="request", deadline=deadline, client="client", surface="openai")
            await process.call(messages.Run(process.new_number(), task, ctx), deadline)

    await asyncio.gather(*(send_some() for _ in range(IN_FLIGHT)))


if __name__ == "__main__":
    main()
