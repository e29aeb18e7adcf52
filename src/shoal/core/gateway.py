"""What every surface talks to: a task and a context in, the answer of the right model out."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import overload

from shoal.core import similarity
from shoal.core.generation.stream_limit import StreamLimit
from shoal.core.generation.stream_timeout import StreamTimeout
from shoal.core.lifecycle.lifecycle import Lifecycle
from shoal.core.protocols import GenerationReport, ModelFacts, Observer, Runner, Statistics, SupportsCheck, TextCodec
from shoal.core.registry import Model, ModelCard, Registry
from shoal.core.scheduling.admission import classify_traffic, count_items
from shoal.core.statistics import Counts
from shoal.core.threads import Threads
from shoal.errors import (
    DeadlineExceeded,
    EmptyInput,
    InternalError,
    InvalidValue,
    ModelNotFound,
    ShoalError,
    Unavailable,
    Unsupported,
)
from shoal.types import (
    BatchTask,
    Chunk,
    Classify,
    Context,
    Embed,
    Embedded,
    Generate,
    Image,
    Modality,
    ModelStats,
    Rerank,
    Result,
    Scored,
    Task,
    TaskKind,
    Usage,
    task_kind,
)

logger = logging.getLogger("shoal.core")


PLACEHOLDER_NAMES = frozenset({"dummy", "tgi"})
"""What Hugging Face's clients call the model of a server that has one alone."""


class Gateway:
    """Resolves models, checks what they can do, tells the observer, and passes on.

    `draining` turns readiness off while everything already accepted is finished. `lifecycle` loads and unloads models
    (None: what is registered is all there is). `observer` is told of every request; where it is a Counts, it is also
    where the statistics of models come from whose backend keeps none. `waiting` is the registry's; what is in it turns
    readiness off too. A model may be silent for `first_token_timeout_s` before its first chunk and for
    `token_timeout_s` before each other.
    """

    def __init__(
        self,
        registry: Registry,
        observer: Observer | None = None,
        *,
        lifecycle: Lifecycle | None = None,
        first_token_timeout_s: float = 60.0,
        token_timeout_s: float = 60.0,
        threads: Threads | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.draining = False
        self.lifecycle = lifecycle
        self.waiting = registry.waiting
        self._observer = observer or Observer()
        self._counts = observer if isinstance(observer, Counts) else Counts()
        registry.gone = self._forget
        self._streams: dict[str, StreamLimit] = {}
        self._active_timeouts: set[StreamTimeout] = set()
        self._token_timeouts = (first_token_timeout_s, token_timeout_s)
        self._threads = threads or Threads("compare", 1)
        self._clock = clock

    @overload
    async def run(self, task: Embed, ctx: Context) -> Embedded: ...

    @overload
    async def run(self, task: Rerank | Classify, ctx: Context) -> Scored: ...

    @overload
    async def run(self, task: BatchTask, ctx: Context) -> Result: ...

    async def run(self, task: BatchTask, ctx: Context) -> Result:
        """Embed, rerank or classify. Raises any RequestError, CapacityError, BackendError or InternalError.

        A model that embeds and does not rerank scores documents by their vectors, as `similarity` says.
        """
        kind = task_kind(task)
        model = self._find_model(task.model, kind)
        started = self._clock()
        items = count_items(task)
        self._observer.accepted(model.name, kind, items, classify_traffic(ctx, items))
        outcome = "cancelled"
        result: Result | None = None
        model.enter()
        try:
            runner = _get_runner(model, task, kind)
            _check_items(task, items)
            _check_deadline(ctx, started)
            if runner is None:
                runner = await self._wake_runner(model, task, kind, ctx)
            if isinstance(task, Rerank) and "rerank" not in runner.facts.tasks:
                result = await similarity.rerank(runner, task, ctx, threads=self._threads, clock=self._clock)
            else:
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
            seconds = self._clock() - started
            # Behind who waits for the answer; whoever asks for the counts after it comes still later, and so does an
            # unload that waits for this request, which forgets them.
            asyncio.get_running_loop().call_soon(self._observer.finished, model.name, kind, outcome, seconds, result)
            model.leave()

    async def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        """Generate, pulled by the reader. Closing the iterator stops the work and gives the permit back.

        Raises as `run` does, also in mid-stream, and DeadlineExceeded for a model that is silent for too long.
        """
        model = self._find_model(task.model, "generate")
        started = self._clock()
        self._observer.accepted(model.name, "generate", task.choices, ctx.traffic or "interactive")
        outcome, first, pieces = "cancelled", None, 0
        usage: Usage | None = None
        model.enter()
        try:
            runner = _get_runner(model, task, "generate")
            _check_deadline(ctx, started)
            if runner is None:
                runner = await self._wake_runner(model, task, "generate", ctx)
            places = self._get_stream_limit(model)
            if not places.free and isinstance(runner, SupportsCheck):
                runner.check(task)  # a refusal waits for nobody; where nobody waits, the stream says it at once
            async with places.permit(ctx), aclosing(self._stream_with_timeout(runner, task, ctx)) as chunks:
                async for chunk in chunks:
                    if first is None:
                        first = self._clock() - started
                    if chunk.usage is not None:
                        usage = chunk.usage
                    pieces += chunk.raw is None
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
            seconds = self._clock() - started
            self._observer.finished(model.name, "generate", outcome, seconds, None)
            # An answer that was broken off has no usage: of its tokens, those that were seen are known.
            usage = usage or Usage(completion_tokens=pieces)
            self._observer.generated(
                GenerationReport(model.name, usage.prompt_tokens, usage.completion_tokens, first, seconds)
            )

    def resolve(self, name: str, task: TaskKind = "generate") -> tuple[str, str]:
        """The served model and the adapter ("" for none) that a client's name means: also `model:adapter`, and
        `model:latest`, which is the model itself. Raises ModelNotFound."""
        found = self.registry.get(name) if name else None
        if found is None and name in PLACEHOLDER_NAMES:
            name = ""
        base, colon, tail = name.rpartition(":")
        if found is None and colon and (model := self.registry.get(base)) is not None:
            if tail == "latest":
                return model.name, ""
            facts = model.runner.facts if model.runner is not None else model.facts
            adapters = facts.adapters if facts is not None else ()
            if tail in adapters:
                return model.name, tail
            listed = f"it has {', '.join(adapters)}" if adapters else "it has none"
            raise ModelNotFound(f"the model {base!r} has no adapter {tail[:200]!r}: {listed}", param="model")
        return (found or self.registry.find(name, task)).name, ""

    @asynccontextmanager
    async def using_codec(self, name: str, ctx: Context) -> AsyncGenerator[TextCodec]:
        """The model's tokenizer: it wakes for it, and does not fall asleep before the end. Raises ModelNotFound,
        ModelNotReady, Unsupported, and what Lifecycle.wake raises."""
        model = self.registry.find(name)
        model.enter()
        try:
            if model.resting and self.lifecycle is not None:
                await self.lifecycle.wake(model, ctx)
            yield _get_codec(model)
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
        return [self._counts.stats_for(model.name)]

    def models(self) -> list[ModelCard]:
        """Every served model, in the order of the command line; from memory, at once."""
        return [model.card() for model in self.registry]

    def model(self, name: str) -> ModelCard:
        """One model by name or alias ("" = the default). Raises ModelNotFound."""
        return self.registry.find(name).card()

    def check_modality(self, name: str, modality: Modality) -> None:
        """Return where the model ("" = the default for embedding) may be sent such inputs, as far as is known of it
        now: to be asked before inputs are fetched. Raises ModelNotFound and InvalidValue."""
        card = self._find_model(name, "embed").card()
        if card.facts is not None:
            _check_modality(card.name, modality, card.facts)

    def report_refusal(self, error: ShoalError) -> None:
        """A surface turned a request away itself: for the metrics."""
        self._observer.refused(error.kind)

    def ready(self) -> bool:
        """Whether every model that was named at start can answer, if need be after it woke, and the server is not
        draining. Models that were loaded later come and go without a say in it."""
        return not (self.draining or self.waiting) and all(
            model.can_answer() for model in self.registry if model.required
        )

    async def _stream_with_timeout(self, runner: Runner, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        """The runner's chunks, unless it is silent for too long. An answer that is wanted whole may come in one piece,
        after any silence."""
        first_s, between_s = self._token_timeouts if task.stream else (math.inf, math.inf)
        async with aclosing(runner.stream(task, ctx)) as chunks:
            with StreamTimeout(first_s, between_s, ctx.remaining(self._clock())) as silence:
                self._active_timeouts.add(silence)
                try:
                    while True:
                        silence.start_wait()
                        try:
                            chunk = await anext(chunks)
                        except StopAsyncIteration:
                            return
                        silence.end_wait()
                        yield chunk
                finally:
                    self._active_timeouts.discard(silence)

    def _get_stream_limit(self, model: Model) -> StreamLimit:
        found = self._streams.get(model.name)
        if found is None:
            plan = model.plan
            found = StreamLimit() if plan is None else StreamLimit(plan.max_streams, plan.max_queued_streams)
            self._streams[model.name] = found
        return found

    def _forget(self, name: str) -> None:
        self._streams.pop(name, None)
        self._counts.forget(name)

    def abort_generations(self) -> None:
        """End every generation in flight, each with an error that its client can read: the server's time is up."""
        for silence in list(self._active_timeouts):
            silence.abort(Unavailable("the server is shutting down: send the request again", retry_after=1.0))

    async def _wake_runner(self, model: Model, task: Task, kind: TaskKind, ctx: Context) -> Runner:
        if self.lifecycle is not None:
            await self.lifecycle.wake(model, ctx)
        runner = model.ready_runner()
        _check_task(model.name, task, kind, runner.facts)
        return runner

    def _find_model(self, name: str, task: TaskKind) -> Model:
        try:
            return self.registry.find(name, task)
        except ShoalError as error:
            self.report_refusal(error)
            raise


def _get_codec(model: Model) -> TextCodec:
    runner = model.ready_runner()
    if not isinstance(runner, TextCodec):
        raise Unsupported(f"the model {model.name!r} does not show its tokenizer", param="model")
    return runner


def _get_runner(model: Model, task: Task, kind: TaskKind) -> Runner | None:
    """Its runner, None while it sleeps; refused at once is what it cannot do, as far as that is known of a sleeper."""
    runner = None if model.resting else model.ready_runner()
    facts = runner.facts if runner is not None else model.facts
    if facts is not None:
        _check_task(model.name, task, kind, facts)
    return runner


def _check_task(name: str, task: Task, kind: TaskKind, facts: ModelFacts) -> None:
    if kind not in facts.tasks and not (kind == "rerank" and similarity.can_rerank(facts)):
        raise Unsupported(f"the model {name!r} cannot {kind}; it can: {', '.join(facts.tasks)}", param="model")
    if not isinstance(task, Generate):
        _check_modalities(name, task, facts)
    if isinstance(task, Embed) and (lacking := set(task.outputs).difference(facts.vectors)):
        raise Unsupported(
            f"the model {name!r} has no {sorted(lacking)[0]} vectors; it has: {', '.join(facts.vectors)}", param="model"
        )


def _check_modalities(name: str, task: BatchTask, facts: ModelFacts) -> None:
    pictures = 0 if isinstance(task, Rerank) else list(map(type, task.inputs)).count(Image)
    if pictures:
        _check_modality(name, "image", facts)
    if "text" not in facts.modalities and (not pictures or pictures < len(task.items)):
        _check_modality(name, "text", facts)


def _check_modality(name: str, modality: Modality, facts: ModelFacts) -> None:
    if modality in facts.modalities:
        return
    if modality == "text":
        raise InvalidValue(f"the model {name!r} takes pictures alone: send pictures", param="input")
    raise InvalidValue(
        f"the model {name!r} reads text alone: send text, or name a model that takes pictures", param="input"
    )


def _check_items(task: BatchTask, items: int) -> None:
    if not items:
        raise EmptyInput("there is no input: send at least one", param="input")
    if isinstance(task, Rerank) and len(task.queries) not in (1, len(task.documents)):
        raise InvalidValue(
            f"{len(task.queries)} queries for {len(task.documents)} documents: send one, or one for each document",
            param="query",
        )


def _check_deadline(ctx: Context, now: float) -> None:
    if ctx.deadline <= now:
        raise DeadlineExceeded("the deadline had passed before the work began: allow more time")
