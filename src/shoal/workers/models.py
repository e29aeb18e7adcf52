"""The model process's side: runs the tasks of all fronts, and tells them which models there are."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from itertools import count
from typing import Any, TypeAlias, get_args

from shoal.core.gateway import Gateway
from shoal.core.packed_error import PackedError
from shoal.core.protocols import Observer, ReplicaStatus
from shoal.core.recording import Found
from shoal.core.registry import Model
from shoal.errors import InternalError, ShoalError
from shoal.types import Embedded
from shoal.workers import messages
from shoal.workers.forwarding import ForwardedRequest
from shoal.workers.front import STREAM_WINDOW
from shoal.workers.link import GREETING_BYTES, MAX_BYTES, Link

_Work: TypeAlias = Callable[[], Awaitable[None]]

LOOK_S = 0.05
"""Interval of checks whether the state of a model has changed."""
LOOK_UP_S = 1.0
"""Time that a front has to say what it knows of a request."""
SETTLE_S = 1.0
"""Time that fronts have to learn of a change before its cause is answered."""
GREETING_S = 5.0
"""Time that a connection has to show its token."""

_CALLS = {messages.Stream, messages.Request, messages.Wake, messages.AwaitServers}
_REPORTS = set(get_args(messages.Report))

logger = logging.getLogger("shoal.workers")


class Front:
    """One front: what it has asked for and is not answered. `version`: the last state of the models that it knows."""

    def __init__(self) -> None:
        self.pid = 0
        self.version = 0
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.credits: dict[int, asyncio.Semaphore] = {}
        self.requests: dict[int, ForwardedRequest] = {}
        self.replicas: list[tuple[str, ReplicaStatus]] = []
        self._entered: defaultdict[str, deque[Model]] = defaultdict(deque)

    def enter(self, model: Model | None) -> None:
        """Begin a request that the front runs itself: the model must stay loaded."""
        if model is not None:
            model.enter()
            self._entered[model.name].append(model)

    def leave(self, name: str) -> None:
        """End such a request. If the name was loaded again meanwhile, count it to the older model: the new one must not
        seem idle while it is used."""
        if self._entered[name]:
            self._entered[name].popleft().leave()

    def leave_all(self) -> None:
        """End all such requests: the front is gone."""
        for models in self._entered.values():
            while models:
                models.pop().leave()

    def put(self, message: messages.More | messages.Event | messages.Cancel) -> None:
        """Take a message about a call; it may have ended meanwhile."""
        number = message.id
        if number in self.requests and not isinstance(message, messages.Cancel):
            self.requests[number].put(message)
        elif isinstance(message, messages.Cancel) and number in self.tasks:
            self.tasks[number].cancel()
        elif isinstance(message, messages.More) and number in self.credits:
            for _ in range(message.count):
                self.credits[number].release()

    def forget(self, number: int) -> None:
        """Forget a call that has ended."""
        self.tasks.pop(number, None)
        self.credits.pop(number, None)
        self.requests.pop(number, None)


class ModelServer:
    """Serves fronts over a socket.

    `asgi` answers the requests that they hand over; `observer` and `record_lag` take what they report.
    `describe_remote` says how a front can run a model of another server itself, in words of its own (see
    app/remote_models), `describe_tokenizer` how it can tokenize for a model (see app/front_tokenizers); b"" if it
    cannot. `token`: a connection that does not begin with it is closed.
    """

    def __init__(
        self,
        gateway: Gateway,
        asgi: Callable[[Any, Any, Any], Awaitable[None]],
        *,
        observer: Observer,
        record_lag: Callable[[float], None],
        describe_remote: Callable[[Model], bytes],
        describe_tokenizer: Callable[[Model], bytes] = lambda model: b"",
        token: bytes = b"",
    ) -> None:
        self._gateway = gateway
        self._token = token
        self._asgi = asgi
        self._observer = observer
        self._record_lag = record_lag
        self._describe_remote = describe_remote
        self._describe_tokenizer = describe_tokenizer
        self._decoder = messages.decoder_from_front()
        self._fronts: dict[Link, Front] = {}
        self._numbers = count(1)
        self._past_ejections: Counter[tuple[str, str]] = Counter()
        self._asked: dict[int, asyncio.Future[Found]] = {}
        self._state: messages.Models | None = None
        self._seen: object = None
        self._version = 0
        self._changed = asyncio.Event()

    def pids(self) -> list[int]:
        """Return the process ids of the connected fronts."""
        return [front.pid for front in self._fronts.values() if front.pid]

    def replicas(self) -> list[tuple[str, ReplicaStatus]]:
        """Return what each front sees of the replicas that it calls itself, and the ejections that fronts saw which
        have ended, so that no count falls with them. Safe in any thread."""
        past = [
            (model, ReplicaStatus(name, "in_service", ejections))
            for (model, name), ejections in list(self._past_ejections.items())
        ]
        seen = [each for front in list(self._fronts.values()) for each in front.replicas]
        return [each for each in (*past, *seen) if self._gateway.registry.get(each[0]) is not None]

    async def run(self, listener: socket.socket, stop: asyncio.Event, drain_s: float) -> None:
        """Serve until `stop` is set and then all fronts have left, at most `drain_s` later."""
        loop = asyncio.get_running_loop()
        self._look()
        looking = loop.create_task(self._look_again(), name="models")
        create = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
        server = await create(self._make_link, sock=listener)
        try:
            await stop.wait()
            self._gateway.draining = True
            for link in self._fronts:
                link.send(messages.Leaving())
            try:
                async with asyncio.timeout(drain_s):
                    while self._fronts:
                        await self._wait_for_change()
            except TimeoutError:
                logger.warning("stopping although %d front processes still run", len(self._fronts))
        finally:
            looking.cancel()
            server.close()
            for link in list(self._fronts):
                link.close()

    def _make_link(self) -> Link:
        if not self._token:
            return Link(self, self._decoder)
        link = Link(self, self._decoder, max_bytes=GREETING_BYTES)
        asyncio.get_running_loop().call_later(GREETING_S, self._close_stranger, link)
        return link

    def _close_stranger(self, link: Link) -> None:
        if link not in self._fronts:
            link.close()

    def _greet(self, link: Link, message: Any) -> Front | None:
        """Take the first message of a connection; None if it has not the token."""
        token = message.token if isinstance(message, messages.Hello) else b""
        if not hmac.compare_digest(token, self._token):
            logger.warning("a connection without the token of this process is closed")
            link.close()
            return None
        link.max_bytes = MAX_BYTES
        front = self._fronts[link] = Front()
        return front

    def receive(self, link: Link, message: Any) -> None:
        front = self._fronts.get(link) or self._greet(link, message)
        if front is None:
            return
        kind = type(message)
        if kind is messages.Run:
            self._start(link, front, message.id, partial(self._run, link, message))
        elif kind in _CALLS:
            self._call(link, front, message)
        elif kind in _REPORTS:
            self._take_report(front, message)
        elif kind is messages.Recorded:
            if (asked := self._asked.get(message.id)) is not None and not asked.done():
                asked.set_result(message.found)
        elif kind is messages.Known:
            front.version = message.version
            self._note_change()
        elif kind is messages.Hello:
            front.pid = message.pid
            if self._state is not None:
                link.send(self._state)
            if self._gateway.draining:
                link.send(messages.Leaving())
        else:
            front.put(message)

    def _call(self, link: Link, front: Front, message: Any) -> None:
        work: _Work
        match message:
            case messages.Stream():
                front.credits[message.id] = credit = asyncio.Semaphore(STREAM_WINDOW)
                work = partial(self._stream, link, message, credit)
            case messages.Request():
                front.requests[message.id] = request = ForwardedRequest(link, message, self.settle)
                work = partial(self._answer, link, message.id, request)
            case messages.Wake():
                work = partial(self._wake, link, message)
            case _:
                work = partial(self._await_servers, link, message)
        self._start(link, front, message.id, work)

    def _take_report(self, front: Front, message: messages.Report) -> None:
        match message:
            case messages.Accepted():
                front.enter(self._gateway.registry.get(message.model))
                self._observer.accepted(message.model, message.task, message.items, message.traffic, message.surface)
            case messages.Finished():
                result, outcome = message.to_result(), message.outcome
                self._observer.finished(message.model, message.task, outcome, message.seconds, result, message.surface)
                front.leave(message.model)
            case messages.Batched():
                self._observer.batched(message.report)
            case messages.Generated():
                self._observer.generated(message.report)
            case messages.Refused():
                self._observer.refused(message.kind, message.surface)
            case messages.Replicas():
                front.replicas = message.replicas
            case messages.Lag():
                self._record_lag(message.seconds)

    def lose(self, link: Link) -> None:
        front = self._fronts.pop(link, None)
        if front is not None:
            for task in list(front.tasks.values()):
                task.cancel()
            front.leave_all()
            for model, each in front.replicas:
                self._past_ejections[model, each.name] += each.ejections
            self._note_change()

    async def settle(self) -> None:
        """Return once all fronts know the models as they are now, or after SETTLE_S: a client that has its answer may
        ask any front next."""
        self._look()
        version = self._version
        try:
            async with asyncio.timeout(SETTLE_S):
                while any(front.version < version for front in self._fronts.values()):
                    await self._wait_for_change()
        except TimeoutError:
            logger.warning("a front process did not answer for %g s", SETTLE_S)

    async def look_up(self, request_id: str) -> list[Found]:
        """Ask all fronts for what they know of a request; those that do not answer in time are left out."""
        numbers = {next(self._numbers): link for link in self._fronts}
        asked = {number: asyncio.get_running_loop().create_future() for number in numbers}
        self._asked |= asked
        for number, link in numbers.items():
            link.send(messages.LookUp(number, request_id))
        try:
            answered = (await asyncio.wait(asked.values(), timeout=LOOK_UP_S))[0] if asked else ()
            return [each.result() for each in answered]
        finally:
            for number in asked:
                del self._asked[number]

    def _start(self, link: Link, front: Front, number: int, work: _Work) -> None:
        front.tasks[number] = task = asyncio.get_running_loop().create_task(self._guard(link, number, work))
        task.add_done_callback(lambda _: front.forget(number))

    async def _guard(self, link: Link, number: int, work: _Work) -> None:
        try:
            await work()
        except ShoalError as error:
            link.send(messages.Failure(number, PackedError.of(error)))
        except Exception as error:  # a bug; the front waits for an answer all the same
            logger.exception("a call of a front process failed")
            failed = InternalError(f"the request failed unexpectedly: {error!r}")
            link.send(messages.Failure(number, PackedError.of(failed)))

    async def _run(self, link: Link, message: messages.Run) -> None:
        result = await self._gateway.run(message.task, message.ctx)
        if isinstance(result, Embedded):
            link.send(messages.EmbedAnswer(message.id, result))
        else:
            link.send(messages.ScoreAnswer(message.id, result))

    async def _stream(self, link: Link, message: messages.Stream, credit: asyncio.Semaphore) -> None:
        async with aclosing(self._gateway.stream(message.unpack_task(), message.ctx)) as chunks:
            async for chunk in chunks:
                await credit.acquire()
                link.send(messages.Piece(message.id, chunk))
        link.send(messages.Done(message.id))

    async def _answer(self, link: Link, number: int, request: ForwardedRequest) -> None:
        await self._asgi(request.scope, request.receive, request.send)
        link.send(messages.Done(number))

    async def _wake(self, link: Link, message: messages.Wake) -> None:
        await self._gateway.wake(message.model, message.ctx)
        await self.settle()
        link.send(messages.Done(message.id))

    async def _await_servers(self, link: Link, message: messages.AwaitServers) -> None:
        value = await self._gateway.wait_for_first_answer(message.deadline)
        await self.settle()
        link.send(messages.Done(message.id, value))

    async def _look_again(self) -> None:
        told = 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self._look()
            except Exception:  # a state that cannot be sent; the next one may be
                logger.exception("the front processes cannot be told about the models")
            if time.monotonic() - told >= messages.TICK_S:
                told = time.monotonic()
                for link in self._fronts:
                    link.send(messages.Tick())

    def _look(self) -> None:
        """Tell the fronts about the models if anything has changed."""
        registry = self._gateway.registry
        usable = [(model, model.can_answer()) for model in registry]
        seen = (
            [_identify(model, answers) for model, answers in usable],
            dict(registry.pending_sources),
            set(registry.answered_sources),
            dict(registry.unloaded),
        )
        if seen == self._seen:
            return
        self._seen = seen
        self._version += 1
        states = [self._describe(model, answers) for model, answers in usable]
        self._state = messages.Models(self._version, states, *seen[1:])
        for link in self._fronts:
            link.send(self._state)

    def _describe(self, model: Model, usable: bool) -> messages.ModelState:
        card = model.card()
        return messages.ModelState(
            name=card.name,
            aliases=card.aliases,
            default_for=card.default_for,
            created=card.created,
            state=card.state,
            note=card.note,
            is_sleeping=card.sleeping,
            required=model.required,
            usable=usable,
            facts=card.facts,
            error=None if model.error is None else PackedError.of(model.error),
            remote=self._describe_remote(model),
            tokenizer=self._describe_tokenizer(model),
        )

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self) -> None:
        await self._changed.wait()


def _identify(model: Model, usable: bool) -> Iterable[object]:
    """Return what changes with the model's state."""
    facts = model.runner.facts if model.runner is not None else model.facts
    return (model, model.state, model.note, model.is_sleeping, model.required, usable, id(facts), model.error)
