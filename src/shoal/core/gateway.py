"""What every surface talks to: a task and a context in, the answer of the right model out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from shoal.core.limits import traffic_of
from shoal.core.protocols import Observer, Runner, TextCodec
from shoal.core.registry import Model, ModelCard, Registry
from shoal.core.streams import StreamLimit
from shoal.errors import DeadlineExceeded, EmptyInput, InternalError, ShoalError, Unsupported
from shoal.types import Chunk, Context, Embed, Embedded, Generate, TaskKind


class Gateway:
    """Resolves models, checks what they can do, tells the observer, and passes on.

    `draining` turns readiness off while everything already accepted is finished.
    """

    def __init__(self, registry: Registry, observer: Observer | None = None, *, max_streams: int = 256) -> None:
        self.registry = registry
        self.draining = False
        self._observer = observer or Observer()
        self._streams = StreamLimit(max_streams)

    async def run(self, task: Embed, ctx: Context) -> Embedded:
        """Embed. Raises any RequestError, CapacityError, BackendError or InternalError."""
        model = self._find(task.model, "embed")
        started = time.monotonic()
        self._observer.accepted(model.name, "embed", len(task.inputs), traffic_of(task, ctx))
        outcome, result = "cancelled", None
        try:
            runner = _able(model, "embed")
            if not task.inputs:
                raise EmptyInput("there is no input: send at least one", param="input")
            _check_deadline(ctx, started)
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
            self._observer.finished(model.name, "embed", outcome, time.monotonic() - started, result)

    async def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        """Generate, pulled by the reader. Closing the iterator stops the work and gives the permit back."""
        model = self._find(task.model, "generate")
        started = time.monotonic()
        self._observer.accepted(model.name, "generate", 1, traffic_of(task, ctx))
        outcome = "cancelled"
        try:
            runner = _able(model, "generate")
            _check_deadline(ctx, started)
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
            self._observer.finished(model.name, "generate", outcome, time.monotonic() - started, None)

    def codec(self, model: str) -> TextCodec:
        """The model's tokenizer. Raises ModelNotFound, ModelNotReady, Unsupported."""
        found = self.registry.find(model)
        runner = found.ready_runner()
        if not isinstance(runner, TextCodec):
            raise Unsupported(f"the model {found.name!r} does not show its tokenizer", param="model")
        return runner

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
        """Whether every model is loaded and able to serve, and the server is not draining."""
        return not self.draining and all(
            model.state == "ready" and model.runner is not None and model.runner.ready() for model in self.registry
        )

    def _find(self, name: str, task: TaskKind) -> Model:
        try:
            return self.registry.find(name, task)
        except ShoalError as error:
            self.refused(error)
            raise


def _able(model: Model, task: TaskKind) -> Runner:
    runner = model.ready_runner()
    if task not in runner.facts.tasks:
        able = ", ".join(runner.facts.tasks)
        raise Unsupported(f"the model {model.name!r} cannot {task}; it can: {able}", param="model")
    return runner


def _check_deadline(ctx: Context, now: float) -> None:
    if ctx.deadline <= now:
        raise DeadlineExceeded("the deadline had passed before the work began: allow more time")
