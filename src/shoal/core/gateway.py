"""The entry point of every surface: takes a task and a context and returns the answer of the right model."""

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
from shoal.core.generation.token_estimate import estimate_tokens
from shoal.core.lifecycle.lifecycle import Lifecycle
from shoal.core.protocols import (
    CountsTokens,
    GenerationReport,
    ModelFacts,
    Observer,
    Runner,
    Statistics,
    SupportsCheck,
    TextCodec,
)
from shoal.core.recording import RequestLog, TaskRecord
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
    make_body_error,
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
)

logger = logging.getLogger("shoal.core")


PLACEHOLDER_NAMES = frozenset({"dummy", "tgi"})
"""Model names that Hugging Face clients send to a server with a single model."""


class Gateway:
    """Resolves models, checks their capabilities, notifies the observer and forwards tasks.

    `draining` turns readiness off while accepted requests finish. `lifecycle` loads and unloads models (None: the
    registered models are fixed). `observer` is notified of every request; if it is a Counts, it also supplies the
    statistics of models whose backend keeps none. `pending_sources` is the registry's; it turns readiness off while
    it is not empty. `log` records the tasks (None: nobody does). A stream times out after `first_token_timeout_s`
    without a first chunk, or `token_timeout_s` without a later one.
    """

    def __init__(  # noqa: PLR0913 - all but one may be left out, and are named
        self,
        registry: Registry,
        observer: Observer | None = None,
        *,
        lifecycle: Lifecycle | None = None,
        first_token_timeout_s: float = 60.0,
        token_timeout_s: float = 60.0,
        threads: Threads | None = None,
        log: RequestLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.draining = False
        self.lifecycle = lifecycle
        self.pending_sources = registry.pending_sources
        self._observer = observer or Observer()
        self._counts = observer if isinstance(observer, Counts) else Counts()
        registry.subscribe(self._forget)
        self._streams: dict[str, StreamLimit] = {}
        self._active_timeouts: set[StreamTimeout] = set()
        self._token_timeouts = (first_token_timeout_s, token_timeout_s)
        self._threads = threads or Threads("compare", 1)
        self._log = log
        self._clock = clock

    @overload
    async def run(self, task: Embed, ctx: Context, model: Model | None = None) -> Embedded: ...

    @overload
    async def run(self, task: Rerank | Classify, ctx: Context, model: Model | None = None) -> Scored: ...

    @overload
    async def run(self, task: BatchTask, ctx: Context, model: Model | None = None) -> Result: ...

    async def run(self, task: BatchTask, ctx: Context, model: Model | None = None) -> Result:
        """Embed, rerank or classify. Raises any RequestError, CapacityError, BackendError or InternalError.

        A model that embeds but does not rerank scores documents by their vectors; see `similarity`. `model`: the one
        that the task names, if the caller has found it.
        """
        kind = task.kind
        if model is None:
            model = self._find_model(task.model, kind, ctx.surface)
        started = self._clock()
        items = count_items(task)
        self._observer.accepted(model.name, kind, items, classify_traffic(ctx, items), ctx.surface)
        outcome = "cancelled"
        result: Result | None = None
        record = None
        if self._log is not None:
            record = self._log.begin(TaskRecord(ctx.id, model.name, kind, items, started, ctx.trace, ctx.arrived), task)
        model.enter()
        try:
            runner = _get_runner(model, task, kind)
            _check_request(task, items)
            _check_deadline(ctx, started)
            if runner is None:
                runner = await self._wake_runner(model, task, kind, ctx)
            if isinstance(task, Rerank):
                _check_instruction(task, runner.facts)
            if isinstance(task, Rerank) and "rerank" not in runner.facts.tasks:
                result = await similarity.rerank(runner, task, ctx, threads=self._threads, clock=self._clock)
            else:
                result = await runner.run(task, ctx)
            outcome = "ok"
            return result
        except ShoalError as error:
            outcome = error.kind
            raise
        except Exception as error:  # a bug in the backend; the caller still gets an error in its dialect
            outcome = "internal"
            raise InternalError(f"the request failed unexpectedly: {error!r}") from error
        finally:
            seconds = self._clock() - started
            # Run the observer after the caller has its result. Reading the counts, or an unload that waits for this
            # request and then forgets them, comes later still.
            asyncio.get_running_loop().call_soon(
                self._observer.finished, model.name, kind, outcome, seconds, result, ctx.surface
            )
            model.leave()
            if record is not None and self._log is not None:
                if result is not None:
                    record.facts, record.input_tokens = result.facts, sum(result.tokens)
                self._log.end(record, outcome, seconds)

    async def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        """Generate chunks as the reader pulls them. Closing the iterator stops the work and releases the permit.

        Raises as `run` does, also in mid-stream, and DeadlineExceeded when the model produces nothing for too long.
        """
        model = self._find_model(task.model, "generate", ctx.surface)
        started = self._clock()
        self._observer.accepted(model.name, "generate", task.choices, ctx.traffic or "interactive", ctx.surface)
        outcome, first, pieces = "cancelled", None, 0
        usage: Usage | None = None
        record = self._begin_stream(model, task, ctx, started)
        model.enter()
        try:
            runner = _get_runner(model, task, "generate")
            _check_deadline(ctx, started)
            if runner is None:
                runner = await self._wake_runner(model, task, "generate", ctx)
            places = self._get_stream_limit(model)
            if not places.free and isinstance(runner, SupportsCheck):
                runner.check(task)  # reject an invalid task before it queues; else the stream does it
            await places.enter(ctx)
            try:
                async with aclosing(runner.stream(task, ctx)) as chunks:
                    with self._build_timeout(task, ctx) as timeout:
                        timeout.start_wait()
                        async for chunk in chunks:
                            timeout.end_wait()
                            if first is None:
                                first = self._clock() - started
                            if chunk.usage is not None:
                                usage = chunk.usage
                            pieces += chunk.raw is None
                            yield chunk
                            timeout.start_wait()
            finally:
                places.leave()
            outcome = "ok"
        except ShoalError as error:
            outcome = error.kind
            raise
        except Exception as error:  # as in `run`
            outcome = "internal"
            raise InternalError(f"generation failed unexpectedly: {error!r}") from error
        finally:
            model.leave()
            seconds = self._clock() - started
            self._observer.finished(model.name, "generate", outcome, seconds, None, ctx.surface)
            # An aborted answer has no usage: report the tokens seen so far.
            usage = usage or Usage(completion_tokens=pieces)
            self._observer.generated(
                GenerationReport(model.name, usage.prompt_tokens, usage.completion_tokens, first, seconds)
            )
            self._end_stream(record, usage, outcome, first, seconds)

    async def count_tokens(self, task: Generate, ctx: Context) -> int:
        """Count the tokens of a task's prompts, waking the model if needed; estimate them if nothing counts them.
        Raises as `stream` does before the first chunk."""
        model = self.registry.find(task.model, "generate")
        model.enter()
        try:
            runner = _get_runner(model, task, "generate") or await self._wake_runner(model, task, "generate", ctx)
            return await runner.count_tokens(task, ctx) if isinstance(runner, CountsTokens) else estimate_tokens(task)
        finally:
            model.leave()

    def resolve(self, name: str, task: TaskKind = "generate") -> tuple[str, str]:
        """Resolve a client's model name to the served model and the adapter ("" for none). `model:adapter` and
        `model:latest` (the model itself) are also accepted. Raises ModelNotFound."""
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
            listed = f"it has {', '.join(adapters)}" if adapters else "it has no adapters"
            raise ModelNotFound(f"the model {base!r} has no adapter {tail[:200]!r}: {listed}", param="model")
        return (found or self.registry.find(name, task)).name, ""

    @asynccontextmanager
    async def using_codec(self, name: str, ctx: Context) -> AsyncGenerator[TextCodec]:
        """Yield the model's tokenizer, waking the model if needed and keeping it awake until the block ends. Raises
        ModelNotFound, ModelNotReady, Unsupported, and the errors of Lifecycle.wake."""
        model = self.registry.find(name)
        model.enter()
        try:
            if model.is_sleeping and self.lifecycle is not None:
                await self.lifecycle.wake(model, ctx)
            yield _get_codec(model)
        finally:
            model.leave()

    def ensure_single_state(self) -> None:
        """Return in the process that keeps what one process has; see http.hand_over. Other processes hand over."""

    async def wait_for_first_answer(self, deadline: float) -> bool:
        """Wait for the next first answer of a server named at startup, after which a request that was rejected with
        ModelNotReady is worth another try. Returns False at once if all have answered, and at the deadline."""
        return await self.registry.awaited_servers.wait(deadline - self._clock())

    async def wake(self, name: str, ctx: Context) -> None:
        """Wait until the model is awake, for uses other than a task. Raises ModelNotFound and the errors of
        Lifecycle.wake."""
        model = self.registry.find(name)
        if model.is_sleeping and self.lifecycle is not None:
            model.enter()
            try:
                await self.lifecycle.wake(model, ctx)
            finally:
                model.leave()

    async def statistics(self, name: str = "") -> list[ModelStats]:
        """Return the statistics of one model ("": of all), from its backend if it keeps any, else from the gateway.

        Raises ModelNotFound. If the backend cannot be reached, the gateway's statistics are returned instead.
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
                logger.info("could not read the statistics of %s: %s", model.name, error.message)
        return [self._counts.stats_for(model.name)]

    def models(self) -> list[ModelCard]:
        """Return every served model in command-line order, from memory."""
        return [model.card() for model in self.registry]

    def model(self, name: str) -> ModelCard:
        """Return one model by name or alias ("" = the default). Raises ModelNotFound."""
        return self.registry.find(name).card()

    def check_modality(self, name: str, modality: Modality) -> None:
        """Check that the model ("" = the embedding default) accepts a modality, as far as its facts are known. Call it
        before fetching inputs. Raises ModelNotFound and InvalidValue."""
        card = self.registry.find(name, "embed").card()
        if card.facts is not None:
            _check_modality(card.name, modality, card.facts)

    def report_refusal(self, error: ShoalError, surface: str) -> None:
        """Count a request that a surface rejected itself in the metrics."""
        self._observer.refused(error.kind, surface)

    def ready(self) -> bool:
        """Whether the server is not draining and every model named at startup can answer, waking first if needed.
        Models loaded later do not affect readiness."""
        return not (self.draining or self.pending_sources) and all(
            model.can_answer() for model in self.registry if model.required
        )

    def _begin_stream(self, model: Model, task: Generate, ctx: Context, started: float) -> TaskRecord | None:
        if self._log is None:
            return None
        record = TaskRecord(ctx.id, model.name, "generate", task.choices, started, ctx.trace, ctx.arrived)
        return self._log.begin(record, task)

    def _end_stream(
        self, record: TaskRecord | None, usage: Usage, outcome: str, first: float | None, seconds: float
    ) -> None:
        if record is not None and self._log is not None:
            record.first_seconds = first
            record.input_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
            self._log.end(record, outcome, seconds)

    def _build_timeout(self, task: Generate, ctx: Context) -> StreamTimeout:
        """Build the timeout of a runner that stalls. A non-streaming answer may come as one chunk, so only the deadline
        limits it."""
        first_s, between_s = self._token_timeouts if task.stream else (math.inf, math.inf)
        return StreamTimeout(first_s, between_s, ctx.remaining(self._clock()), self._active_timeouts)

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
        """End every generation in flight with an error that its client can read, at the end of the shutdown grace
        period."""
        for timeout in list(self._active_timeouts):
            timeout.abort(Unavailable("the server is shutting down: send the request again", retry_after=1.0))

    async def _wake_runner(self, model: Model, task: Task, kind: TaskKind, ctx: Context) -> Runner:
        if self.lifecycle is not None:
            await self.lifecycle.wake(model, ctx)
        runner = model.ready_runner()
        _check_task(model.name, task, kind, runner.facts)
        return runner

    def _find_model(self, name: str, task: TaskKind, surface: str) -> Model:
        try:
            return self.registry.find(name, task)
        except ShoalError as error:
            self.report_refusal(error, surface)
            raise


def _get_codec(model: Model) -> TextCodec:
    runner = model.ready_runner()
    if not isinstance(runner, TextCodec):
        raise Unsupported(f"the model {model.name!r} does not expose its tokenizer", param="model")
    return runner


def _get_runner(model: Model, task: Task, kind: TaskKind) -> Runner | None:
    """Return the model's runner, or None while it sleeps. Rejects an unsupported task at once if the facts are
    known."""
    runner = None if model.is_sleeping else model.ready_runner()
    facts = runner.facts if runner is not None else model.facts
    if facts is not None:
        _check_task(model.name, task, kind, facts)
    return runner


def _check_task(name: str, task: Task, kind: TaskKind, facts: ModelFacts) -> None:
    if kind not in facts.tasks and not (kind == "rerank" and similarity.can_rerank(facts)):
        raise Unsupported(f"the model {name!r} cannot {kind}; it can: {', '.join(facts.tasks)}", param="model")
    if isinstance(task, Generate):
        if task.untranslated is not None and (task.raw is None or task.raw[0] not in facts.passes):
            why = task.untranslated
            raise make_body_error(why.kind, why.message, why.param)
    else:
        _check_modalities(name, task, facts)
    if isinstance(task, Embed) and (lacking := set(task.outputs).difference(facts.vectors)):
        raise Unsupported(
            f"the model {name!r} has no {sorted(lacking)[0]} vectors; it has: {', '.join(facts.vectors)}", param="model"
        )


def _check_modalities(name: str, task: BatchTask, facts: ModelFacts) -> None:
    images = 0 if isinstance(task, Rerank) else list(map(type, task.inputs)).count(Image)
    if images:
        _check_modality(name, "image", facts)
    if "text" not in facts.modalities and (not images or images < len(task.items)):
        _check_modality(name, "text", facts)


def _check_modality(name: str, modality: Modality, facts: ModelFacts) -> None:
    if modality in facts.modalities:
        return
    if modality == "text":
        raise InvalidValue(f"the model {name!r} accepts only images: send images", param="input")
    raise InvalidValue(
        f"the model {name!r} accepts only text: send text, or name a model that accepts images", param="input"
    )


def _check_request(task: BatchTask, items: int) -> None:
    if not items:
        raise EmptyInput("the request has no inputs: send at least one", param="input")
    if isinstance(task, Rerank) and len(task.queries) not in (1, len(task.documents)):
        raise InvalidValue(
            f"{len(task.queries)} queries for {len(task.documents)} documents: send one, or one for each document",
            param="query",
        )


def _check_instruction(task: Rerank, facts: ModelFacts) -> None:
    if task.instruction is not None and not facts.takes_instruction:
        raise Unsupported(
            f"the model {task.model!r} has no place for an instruction: omit it, or use a reranker made from a "
            "language model, such as Qwen3-Reranker",
            param="instruction",
        )


def _check_deadline(ctx: Context, now: float) -> None:
    if ctx.deadline <= now:
        raise DeadlineExceeded("the deadline passed before processing started: allow more time")
