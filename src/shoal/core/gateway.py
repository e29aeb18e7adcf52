"""What every surface talks to: a task and a context in, the answer of the right model out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager

from shoal.core.lifecycle import Lifecycle
from shoal.core.limits import traffic_of
from shoal.core.protocols import ModelFacts, Observer, Runner, Statistics, TextCodec
from shoal.core.registry import Model, ModelCard, Registry
from shoal.core.statistics import Counts
from shoal.core.streams import StreamLimit
from shoal.errors import DeadlineExceeded, EmptyInput, InternalError, ShoalError, Unsupported
from shoal.types import Chunk, Context, Embed, Embedded, Generate, ModelStats, TaskKind

logger = logging.getLogger("shoal.core")


class Gateway:
    """Resolves models, checks what they can do, tells the observer, and passes on.

    `draining` turns readiness off while everything already accepted is finished. `lifecycle` loads and unloads models
    (None: what is registered is all there is). `observer` is told of every request; where it is a Counts, it is also
    where the statistics of models come from whose backend keeps none. `waiting`: servers that were named at start and
    whose models are not known yet, with the reason; they turn readiness off too.
    """

    def __init__(
        self,
        registry: Registry,
        observer: Observer | None = None,
        *,
        max_streams: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.draining = False
        self.lifecycle: Lifecycle | None = None
        self.waiting: dict[str, str] = {}
        self._observer = observer or Observer()
        self._counts = observer if isinstance(observer, Counts) else Counts()
        registry.gone = self._counts.forget
        self._streams = StreamLimit(max_streams)
        self._clock = clock

    async def run(self, task: Embed, ctx: Context) -> Embedded:
        """Embed. Raises any RequestError, CapacityError, BackendError or InternalError."""
        model = self._find(task.model, "embed")
        started = self._clock()
        self._observer.accepted(model.name, "embed", len(task.inputs), traffic_of(task, ctx))
        outcome, result = "cancelled", None
        model.enter()
        try:
            runner = _able(model, "embed")
            if not task.inputs:
                raise EmptyInput("there is no input: send at least one", param="input")
            _check_deadline(ctx, started)
            if runner is None:
                runner = await self._woken(model, "embed", ctx)
            result = await runner.run(task, ctx)
            outcome = "ok"
            return result
        except ShoalError as error:
            outcome = error.kind
            raise
        except Exception as error:  # a bug behind the seam; the caller still gets its dialect's error
            outcome = "internal"
            raise InternalError(f"answering failed in an unforeseen way: {error!r}") from error
        finally:
            model.leave()
            self._observer.finished(model.name, "embed", outcome, self._clock() - started, result)

    async def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        """Generate, pulled by the reader. Closing the iterator stops the work and gives the permit back."""
        model = self._find(task.model, "generate")
        started = self._clock()
        self._observer.accepted(model.name, "generate", 1, traffic_of(task, ctx))
        outcome = "cancelled"
        model.enter()
        try:
            runner = _able(model, "generate")
            _check_deadline(ctx, started)
            if runner is None:
                runner = await self._woken(model, "generate", ctx)
            async with self._streams.permit(ctx), aclosing(runner.stream(task, ctx)) as chunks:
                async for chunk in chunks:
                    yield chunk
            outcome = "ok"
        except ShoalError as error:
            outcome = error.kind
            raise
        except Exception as error:  # as in `run`
            outcome = "internal"
            raise InternalError(f"generating failed in an unforeseen way: {error!r}") from error
        finally:
            model.leave()
            self._observer.finished(model.name, "generate", outcome, self._clock() - started, None)

    def codec(self, model: str) -> TextCodec:
        """The model's tokenizer. Raises ModelNotFound, ModelNotReady (also of a model that sleeps: `using_codec` wakes
        it), Unsupported."""
        return _codec(self.registry.find(model))

    @asynccontextmanager
    async def using_codec(self, name: str, ctx: Context) -> AsyncGenerator[TextCodec]:
        """The model's tokenizer: it wakes for it, and does not fall asleep before the end. Raises ModelNotFound,
        ModelNotReady, Unsupported, and what Lifecycle.wake raises."""
        model = self.registry.find(name)
        model.enter()
        try:
            if model.resting and self.lifecycle is not None:
                await self.lifecycle.wake(model, ctx)
            yield _codec(model)
        finally:
            model.leave()

    async def wake(self, name: str, ctx: Context) -> None:
        """Return when the model is not asleep, for what needs it otherwise than by a task. Raises ModelNotFound, and
        what Lifecycle.wake raises."""
        model = self.registry.find(name)
        if model.resting and self.lifecycle is not None:
            model.enter()
            try:
                await self.lifecycle.wake(model, ctx)
            finally:
                model.leave()

    async def statistics(self, name: str = "") -> list[ModelStats]:
        """What one model has done ("": every one): its backend's own count where it has one, else the gateway's.

        Raises ModelNotFound. A backend that cannot be asked now is not an error: the gateway's count stands in.
        """
        models = [self.registry.find(name)] if name else list(self.registry)
        each = await asyncio.gather(*(self._statistics(model) for model in models))
        return [stats for some in each for stats in some]

    async def _statistics(self, model: Model) -> list[ModelStats]:
        runner: object = model.runner
        if isinstance(runner, Statistics):
            try:
                return await runner.statistics()
            except ShoalError as error:
                logger.info("%s could not be asked for its statistics: %s", model.name, error.message)
        return [self._counts.of(model.name)]

    def models(self) -> list[ModelCard]:
        """Every served model, in the order of the command line; from memory, at once."""
        return [model.card() for model in self.registry]

    def model(self, name: str) -> ModelCard:
        """One model by name or alias ("" = the default). Raises ModelNotFound."""
        return self.registry.find(name).card()

    def refused(self, error: ShoalError) -> None:
        """A surface turned a request away itself: for the metrics."""
        self._observer.refused(error.kind)

    def ready(self) -> bool:
        """Whether every model that was named at start can answer, if need be after it woke, and the server is not
        draining. Models that were loaded later come and go without a say in it."""
        return not (self.draining or self.waiting) and all(model.able() for model in self.registry if model.required)

    async def _woken(self, model: Model, task: TaskKind, ctx: Context) -> Runner:
        if self.lifecycle is not None:
            await self.lifecycle.wake(model, ctx)
        runner = model.ready_runner()
        _check_task(model.name, task, runner.facts)
        return runner

    def _find(self, name: str, task: TaskKind) -> Model:
        try:
            return self.registry.find(name, task)
        except ShoalError as error:
            self.refused(error)
            raise


def _codec(model: Model) -> TextCodec:
    runner = model.ready_runner()
    if not isinstance(runner, TextCodec):
        raise Unsupported(f"the model {model.name!r} does not show its tokenizer", param="model")
    return runner


def _able(model: Model, task: TaskKind) -> Runner | None:
    """Its runner, None while it sleeps; refused at once is what it cannot do, as far as that is known of a sleeper."""
    runner = None if model.resting else model.ready_runner()
    facts = runner.facts if runner is not None else model.facts
    if facts is not None:
        _check_task(model.name, task, facts)
    return runner


def _check_task(name: str, task: TaskKind, facts: ModelFacts) -> None:
    if task not in facts.tasks:
        raise Unsupported(f"the model {name!r} cannot {task}; it can: {', '.join(facts.tasks)}", param="model")


def _check_deadline(ctx: Context, now: float) -> None:
    if ctx.deadline <= now:
        raise DeadlineExceeded("the deadline had passed before the work began: allow more time")
