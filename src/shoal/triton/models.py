"""Models on Triton servers, put together: schemas, pipelines, engines, and the facts to show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from shoal.backends.triton.control import lasting
from shoal.backends.triton.engine import RETRY_S, Schema, Target, TritonEngine
from shoal.backends.triton.llm_schema import LlmSchema
from shoal.backends.triton.schema import Embedder
from shoal.core.batched import BatchedRunner
from shoal.core.batcher import Lane
from shoal.core.protocols import Engine, ModelFacts, Pipeline, TextCodec
from shoal.errors import ConfigError, DeadlineExceeded, TransportFailed
from shoal.triton.llm import Talk, TritonTalker, open_llm
from shoal.triton.probing import Answered, agrees, probed
from shoal.triton.reading import Reading
from shoal.triton.targets import OnTriton, Wanted, offered

Note = Callable[[str], None]
"""Told what a model waits for, in words."""

MakeLane = Callable[[Pipeline, Sequence[Engine], ModelFacts], Lane]


class TritonRunner(BatchedRunner, OnTriton):
    """A model on Triton that embeds or scores, behind a lane."""

    def __init__(self, lane: Lane, facts: ModelFacts, targets: Sequence[Target], codec: TextCodec | None) -> None:
        BatchedRunner.__init__(self, lane, facts, codec)
        OnTriton.__init__(self, lane.options.model, targets)


async def open_triton(wanted: Wanted, lane: MakeLane, talk: Talk, note: Note) -> TritonRunner | TritonTalker:
    """Open a model's replicas, as soon as one of them can serve; the others join when they come and agree with it.

    `lane` and `talk` make what a model of vectors or scores, and a language model, run behind. While no server is there
    this waits, for ever: `note` is told why. Raises SetupError when a server is there and the model cannot be served.
    """
    for pause in lasting(RETRY_S):
        number, schema, brought = await _first(wanted.targets, note)
        target = wanted.targets[number]
        try:
            if isinstance(schema, LlmSchema):
                return await open_llm(wanted, talk, number, schema)
            return await _opened(wanted, lane, number, schema)
        except (TransportFailed, DeadlineExceeded) as error:  # it went away before its first answer
            note(f"waiting for {target.address}: {error.message}")
        except BaseException:  # a cancelled load, too, leaves nothing on the server
            if brought:
                await target.take_back()
            raise
        await asyncio.sleep(pause)
    raise AssertionError("the pauses never end")


async def _opened(wanted: Wanted, lane: MakeLane, number: int, embedder: Embedder) -> TritonRunner:
    """The runner, with the replica of that number in service."""
    model = await asyncio.to_thread(Reading, wanted, embedder)
    reference: list[Answered] = []

    async def admit(engine: TritonEngine) -> None:
        answered = await probed(engine, model.provisional, model.kinds, pairs=model.pairs)
        if reference:
            agrees(reference[0], answered, engine.facts.name)

    engines = [
        TritonEngine(target, f"{wanted.name}-{at}", embedder=embedder, admit=admit, serving=at == number)
        for at, target in enumerate(wanted.targets)
    ]
    async with AsyncExitStack() as opened:
        for engine in engines:
            opened.push_async_callback(engine.aclose)
        reference.append(await probed(engines[number], model.provisional, model.kinds, pairs=model.pairs))
        pipeline = await asyncio.to_thread(model.settle, reference[0])
        facts = model.facts(pipeline, reference[0])
        for engine in engines:
            engine.start()
        runner = TritonRunner(lane(pipeline, engines, facts), facts, wanted.targets, model.codec(pipeline))
        opened.pop_all()
    return runner


async def _first(targets: Sequence[Target], note: Note) -> tuple[int, Schema, bool]:
    """The first replica that can serve, its schema, and whether it was loaded for that."""
    for pause in lasting(RETRY_S):
        for number, target in enumerate(targets):
            try:
                return number, *await _found(target)
            except (TransportFailed, DeadlineExceeded) as error:  # a host that drops packets answers nothing at all
                note(f"waiting for {target.address}: {error.message}")
        await asyncio.sleep(pause)
    raise AssertionError("the pauses never end")


async def _found(target: Target) -> tuple[Schema, bool]:
    served = await target.serving()
    try:
        return await target.find(), not served
    except ConfigError:  # it is there now, and cannot be served
        if not served:
            await target.take_back()
        raise


__all__ = ["TritonRunner", "TritonTalker", "Wanted", "offered", "open_triton"]
