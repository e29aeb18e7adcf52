"""A front's side: the gateway that its surfaces call, and its link to the model process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from copy import copy
from typing import Any, NoReturn, Protocol, cast

from shoal.core.gateway import Gateway
from shoal.core.lifecycle.loading import Plan
from shoal.core.packed_error import PackedError
from shoal.core.protocols import BatchReport, GenerationReport, ModelFacts, Observer, Runner
from shoal.core.recording import Found, RequestLog
from shoal.core.registry import Model, Registry
from shoal.core.threads import Threads
from shoal.errors import Crashed, DeadlineExceeded, InvalidValue, ModelNotReady, ShoalError, Unavailable
from shoal.http.hand_over import HandOver
from shoal.types import BatchTask, Chunk, Context, Generate, Result, TaskKind, TrafficClass
from shoal.workers import messages
from shoal.workers.link import Link

STREAM_WINDOW = 32
"""Chunks of a stream that may be on their way to a front which has not read them."""
RETRY_S = 0.2
"""Between two attempts to reach the model process."""
CONNECT_S = 5.0
"""Timeout of an attempt."""
SWEEP_S = 1.0
"""Interval at which calls are looked for whose deadline is over: the model process answers those itself, unless it
hangs."""

HANG_S = 10.0
"""Time without a Tick after which the model process counts as hanging: fronts are not ready then."""

MODEL_PROCESS = "the process of the models"

logger = logging.getLogger("shoal.workers")


class Inbox(asyncio.Queue[Any]):
    """The answers to one call, in order. `deadline`: in seconds of the monotonic clock."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self.deadline = deadline


class ModelProcess:
    """The link to a model process at a Unix socket's path, or at a host and port. When it is lost,
    calls that are under way raise Crashed, and new ones ModelNotReady.
    `is_leaving`: it takes no new calls. `token`: see messages.Hello; `name`: what errors call it. `follows`: close the
    link once the process is leaving and all calls are answered. `look_up`: returns what is known here of a request."""

    def __init__(
        self,
        place: str | tuple[str, int],
        *,
        token: bytes = b"",
        name: str = MODEL_PROCESS,
        follows: bool = False,
        look_up: Callable[[str], Found] | None = None,
    ) -> None:
        self.is_leaving = False
        self._follows = follows
        self._look_up = look_up
        self._place = place
        self._token = token
        self._name = name
        self._mirror: Callable[[messages.Models | None], None] = lambda state: None
        self._decoder = messages.decoder_to_front()
        self._link: Link | None = None
        self._lost = asyncio.Event()
        self._heard_at = 0.0
        self._numbers = itertools.count(1)
        self._futures: dict[int, tuple[asyncio.Future[Any], float]] = {}
        self._inboxes: dict[int, Inbox] = {}

    def when_changed(self, mirror: Callable[[messages.Models | None], None]) -> None:
        """Register `mirror` for each Models message, and for None when the link is lost."""
        self._mirror = mirror

    async def run(self) -> None:
        """Connect, and connect again; never returns."""
        while True:
            try:
                await self.run_once()
            except OSError as error:
                logger.debug("cannot reach %s: %s", self._name, error)
            await asyncio.sleep(RETRY_S)

    async def run_once(self) -> None:
        """Connect, and return when the link is lost. Raises OSError, TimeoutError among them."""
        loop = asyncio.get_running_loop()
        self._lost.clear()
        async with asyncio.timeout(CONNECT_S):
            _, link = await self._connect(loop)
        link.send(messages.Hello(os.getpid(), self._token))
        sweeping = loop.create_task(self._sweep(), name="deadlines")
        try:
            await self._lost.wait()
            link.close()
        finally:
            sweeping.cancel()
            if not self._lost.is_set():  # nobody waits for the other end any more
                link.abort()

    def _connect(self, loop: asyncio.AbstractEventLoop) -> Coroutine[Any, Any, tuple[asyncio.BaseTransport, Link]]:
        def make() -> Link:
            return Link(self, self._decoder)

        if isinstance(self._place, str):
            return loop.create_unix_connection(make, self._place)
        return loop.create_connection(make, *self._place)

    def is_responsive(self) -> bool:
        """Whether the process has sent something lately."""
        return self._link is not None and asyncio.get_running_loop().time() - self._heard_at < HANG_S

    def receive(self, link: Link, message: Any) -> None:
        match message:
            case messages.EmbedAnswer() | messages.ScoreAnswer():
                self._settle(message.id, message.result)
            case messages.Tick():
                self._heard_at = asyncio.get_running_loop().time()
            case messages.LookUp():
                found = self._look_up(message.request_id) if self._look_up is not None else Found()
                link.send(messages.Recorded(message.id, found))
            case messages.Leaving():
                self.is_leaving = True
                self._leave_if_idle()
            case messages.Models():
                self._link = link
                self._heard_at = asyncio.get_running_loop().time()
                self._mirror(message)
                link.send(messages.Known(message.version))
            case _ if message.id in self._inboxes:
                self._inboxes[message.id].put_nowait(message)
            case messages.Failure():
                self._settle(message.id, message.error.to_error())
            case messages.Done():
                self._settle(message.id, message.value)

    def lose(self, link: Link) -> None:
        self._lost.set()
        if self._link is None:
            return
        self._link = None
        self._mirror(None)
        error = Crashed(f"{self._name} ended before it had answered: send the request again", retry_after=1.0)
        self._fail([*self._futures, *self._inboxes], error)

    def notify(self, message: Any) -> None:
        """Send a message that has no answer; nothing happens while there is no link."""
        if self._link is not None:
            self._link.send(message)

    def new_number(self) -> int:
        """Return the `id` of a new message that has an answer."""
        return next(self._numbers)

    async def call(self, message: Any, deadline: float) -> Any:
        """Send a message with a new number, and return the result of its answer, or raise its error. Cancelling it
        cancels the work."""
        link, number = self._get_link(), message.id
        future = asyncio.get_running_loop().create_future()
        with _unicode_errors():
            link.send(message)
        self._futures[number] = future, deadline
        try:
            return await future
        finally:
            if self._futures.pop(number, None) is not None:  # without an answer
                self.notify(messages.Cancel(number))
            self._leave_if_idle()

    async def open(self, message: Any, deadline: float) -> AsyncGenerator[Any]:
        """Send a message, as `call` does, and yield all that comes back: a Failure or a Done is the last one. Closing
        the iterator before cancels the work."""
        link, number = self._get_link(), message.id
        inbox = self._inboxes[number] = Inbox(deadline)
        ended = False
        try:
            with _unicode_errors():
                link.send(message)
            while not ended:
                answer = await inbox.get()
                ended = isinstance(answer, messages.Done | messages.Failure)
                yield answer
        finally:
            del self._inboxes[number]
            if not ended:
                self.notify(messages.Cancel(number))
            self._leave_if_idle()

    async def stream(self, task: Generate, ctx: Context, deadline: float) -> AsyncGenerator[Chunk]:
        """Generate, pulled by the reader. Closing the iterator cancels the work."""
        number, unread = self.new_number(), 0
        with _unicode_errors():
            request = messages.Stream.of(number, task, ctx)
        async with aclosing(self.open(request, deadline)) as opened:
            async for message in opened:
                if isinstance(message, messages.Failure):
                    raise message.error.to_error()
                if isinstance(message, messages.Piece):
                    yield message.chunk
                    unread += 1
                    if unread == STREAM_WINDOW // 2:
                        self.notify(messages.More(number, unread))
                        unread = 0

    def abort_streams(self, error: ShoalError) -> None:
        """End all streams with an error."""
        self._fail(self._inboxes, error, cancel=True)

    def _leave_if_idle(self) -> None:
        if self._follows and self.is_leaving and not self._futures and not self._inboxes:
            self._lost.set()

    def _get_link(self) -> Link:
        if self._link is None:
            raise ModelNotReady(f"{self._name} is starting: try again soon", param="model", retry_after=2.0)
        return self._link

    def _settle(self, number: int, outcome: object) -> None:
        future, _ = self._futures.pop(number, (None, 0.0))
        if future is None or future.done():
            return
        if isinstance(outcome, ShoalError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _fail(self, numbers: Iterable[int], error: ShoalError, *, cancel: bool = False) -> None:
        for number in list(numbers):
            if cancel:
                self.notify(messages.Cancel(number))
            if number in self._inboxes:
                self._inboxes[number].put_nowait(messages.Failure(number, PackedError.of(error)))
            else:
                self._settle(number, copy(error))

    async def _sweep(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(SWEEP_S)
            now = clock() - SWEEP_S
            late = [number for number, (_, deadline) in self._futures.items() if deadline < now]
            late += [number for number, inbox in self._inboxes.items() if inbox.deadline < now]
            if self._link is not None and not self.is_responsive():
                late += [number for number, inbox in self._inboxes.items() if inbox.deadline == math.inf]
            if late:
                error = DeadlineExceeded(f"{self._name} did not answer in time: try again later", retry_after=1.0)
                self._fail(late, error, cancel=True)


@contextmanager
def _unicode_errors() -> Iterator[None]:
    """Raise InvalidValue for a text that cannot be encoded."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidValue(f"a text is not Unicode: {error.reason}", param="input") from None


class RemoteRunner:
    """Stands for a runner of the model process, which alone is asked for what it does."""

    def __init__(self, facts: ModelFacts, usable: bool) -> None:
        self.facts = facts
        self._usable = usable

    def ready(self) -> bool:
        return self._usable


class _RemoteLifecycle:
    """Stands for the lifecycle: raises HandOver for whatever is asked of it."""

    def __getattr__(self, name: str) -> NoReturn:
        raise HandOver


class Reporter(Observer):
    """Reports what happens in a front to the observer of the model process, to which `send` sends."""

    def __init__(self, send: Callable[[messages.Report], None]) -> None:
        self._send = send

    def refused(self, reason: str, surface: str = "") -> None:
        self._send(messages.Refused(reason, surface))

    def accepted(self, model: str, task: TaskKind, items: int, traffic: TrafficClass, surface: str = "") -> None:
        self._send(messages.Accepted(model, task, items, traffic, surface))

    def batched(self, report: BatchReport) -> None:
        self._send(messages.Batched(report))

    def generated(self, report: GenerationReport) -> None:
        self._send(messages.Generated(report))

    def finished(
        self, model: str, task: TaskKind, outcome: str, seconds: float, result: Result | None, surface: str = ""
    ) -> None:
        self._send(messages.Finished.of(model, task, outcome, seconds, result, surface))


class RemoteModels(Protocol):
    """Opens models of other servers in a front. `update` gets the state of all models when it has changed; `find`
    returns a model that is open here, with its runner."""

    def update(self, states: Sequence[messages.ModelState]) -> None: ...

    def find(self, name: str) -> Model | None: ...


class Tokenizers(Protocol):
    """Tokenizes in a front for models of the model process. `update`: as RemoteModels. `tokenize` returns a task for
    the named model, with the tokens of its texts if that can be done here; it raises nothing."""

    def update(self, states: Sequence[messages.ModelState]) -> None: ...

    async def tokenize(self, name: str, task: BatchTask) -> BatchTask: ...


class RemoteGateway(Gateway):
    """A gateway whose models are in the model process, or on other servers. `registry` is a copy of the model
    process's. `tokenizers`: without them, the model process tokenizes all texts.

    Raises HandOver for what only the model process can answer, and Crashed if it ends before it has answered.
    """

    def __init__(
        self,
        process: ModelProcess,
        reporter: Reporter,
        *,
        first_token_timeout_s: float = 60.0,
        token_timeout_s: float = 60.0,
        threads: Threads | None = None,
        log: RequestLog | None = None,
        tokenizers: Tokenizers | None = None,
    ) -> None:
        super().__init__(
            Registry(),
            reporter,
            lifecycle=cast(Any, _RemoteLifecycle()),
            first_token_timeout_s=first_token_timeout_s,
            token_timeout_s=token_timeout_s,
            threads=threads,
            log=log,
        )
        self._process = process
        self._state: messages.Models | None = None
        self._connected = asyncio.Event()
        self._remote_models: RemoteModels | None = None
        self._tokenizers = tokenizers
        process.when_changed(self._receive_state)
        self.refresh()

    async def connect(self, remote_models: RemoteModels) -> None:
        """Stay connected to the model process; never returns."""
        self._remote_models = remote_models
        await self._process.run()

    async def wait_until_connected(self, seconds: float) -> None:
        """Return once the models are known, or after `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._connected.wait()

    def ready(self) -> bool:
        return super().ready() and self._process.is_responsive()

    async def run(self, task: BatchTask, ctx: Context, model: Model | None = None) -> Any:
        if (opened := self._find_opened(task.model)) is not None:
            return await super().run(task, ctx, opened)
        if self._tokenizers is not None and (name := self._find_name(task)):
            task = await self._tokenizers.tokenize(name, task)
        return await self._process.call(messages.Run(self._process.new_number(), task, ctx), ctx.deadline)

    def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        is_open = self._find_opened(task.model) is not None
        return super().stream(task, ctx) if is_open else self._process.stream(task, ctx, ctx.deadline)

    def _find_opened(self, name: str) -> Model | None:
        """Return a model that runs in this process."""
        model = self.registry.get(name)
        return model if model is not None and _runs_here(model) else None

    def _find_name(self, task: BatchTask) -> str:
        """Return the name of the model that a task asks for, or ""; it is the model process that rejects the task."""
        if task.model:
            model = self.registry.get(task.model)
            return model.name if model is not None else ""
        try:
            return self.registry.find("", task.kind).name
        except ShoalError:
            return ""

    async def wake(self, name: str, ctx: Context) -> None:
        await self._process.call(messages.Wake(self._process.new_number(), name, ctx), ctx.deadline)

    async def wait_for_first_answer(self, deadline: float) -> bool:
        message = messages.AwaitServers(self._process.new_number(), deadline)
        try:
            return bool(await self._process.call(message, deadline))
        except ShoalError:  # the process has not started, or is gone
            return False

    def report_refusal(self, error: ShoalError, surface: str) -> None:
        self._process.notify(messages.Refused(error.kind, surface))

    def record_lag(self, seconds: float) -> None:
        """Report how late the event loop of this process was."""
        self._process.notify(messages.Lag(seconds))

    def abort_generations(self) -> None:
        super().abort_generations()
        self._process.abort_streams(Unavailable("the server is shutting down: send the request again", retry_after=1.0))

    def ensure_single_state(self) -> NoReturn:
        raise HandOver

    def using_codec(self, name: str, ctx: Context) -> NoReturn:
        raise HandOver

    async def statistics(self, name: str = "") -> NoReturn:
        raise HandOver

    def new_number(self) -> int:
        """Return the `id` of a new request to hand over."""
        return self._process.new_number()

    def open_request(self, request: messages.Request, deadline: float) -> AsyncGenerator[Any]:
        """Hand a request over; see ModelProcess.open."""
        return self._process.open(request, deadline)

    def notify(self, message: Any) -> None:
        self._process.notify(message)

    def _receive_state(self, state: messages.Models | None) -> None:
        self._state = state
        if state is not None:
            self._connected.set()
        for opens in (self._remote_models, self._tokenizers):
            if opens is not None and state is not None:
                opens.update(state.models)
        self.refresh()

    def refresh(self) -> None:
        """Copy the state of the model process, and what is open here; without that process, all else is loading."""
        before, registry, state = self.registry, Registry(), self._state
        if state is None:
            registry.pending_sources[MODEL_PROCESS] = "it is starting"
            for model in before:
                registry.add(model if _runs_here(model) else _starting(model))
        else:
            registry.pending_sources |= state.pending_sources
            registry.answered_sources |= state.answered_sources
            for served in state.models:
                opened = self._remote_models.find(served.name) if self._remote_models is not None else None
                registry.add(opened or to_model(served))
            for name in set(state.unloaded.values()):
                aliases = tuple(alias for alias, of in state.unloaded.items() if of == name != alias)
                registry.remember_unloaded(Model(name=name, aliases=aliases))
        self.registry, self.pending_sources = registry, registry.pending_sources


def _runs_here(model: Model) -> bool:
    return model.runner is not None and not isinstance(model.runner, RemoteRunner)


def to_model(state: messages.ModelState, plan: Plan | None = None, runner: Runner | None = None) -> Model:
    """Return a model as the model process describes it. `runner`: where it runs; without one, in the model process."""
    if runner is None and state.facts is not None and state.state == "ready":
        runner = cast(Runner, RemoteRunner(state.facts, state.usable))
    return Model(
        name=state.name,
        aliases=state.aliases,
        default_for=state.default_for,
        created=state.created,
        state=state.state,
        runner=runner,
        plan=plan,
        error=None if state.error is None else state.error.to_error(),
        required=state.required,
        is_sleeping=state.is_sleeping,
        note=state.note,
        facts=state.facts,
    )


def _starting(model: Model) -> Model:
    return Model(
        name=model.name,
        aliases=model.aliases,
        default_for=model.default_for,
        created=model.created,
        required=model.required,
        note="its process is starting",
        facts=model.facts,
    )
