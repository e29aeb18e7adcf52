"""Generation by servers that speak OpenAI's API: what a client sent goes on, and what comes back is passed on."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from shoal.backends.base.http_answer import Unreached, is_json
from shoal.backends.base.http_client import MAX_ANSWER_BYTES, MAX_ERROR_BYTES, Response
from shoal.backends.openai import errors
from shoal.backends.openai.answers import AnswerReader, has_choices, usage_in
from shoal.backends.openai.body import ModelNames, RequestBody
from shoal.backends.openai.passed import RESPONSES, PassedStream
from shoal.backends.openai.replicas import Attempt, Fleet, Replica
from shoal.backends.openai.request import request_of
from shoal.backends.openai.sse import EventSplitter, has_data, is_done, payload
from shoal.core.protocols import ModelFacts, ReplicaStatus
from shoal.errors import InvalidValue, ShoalError, TransportFailed, Unsupported, UpstreamFailed, UpstreamRefused
from shoal.types import Batched, Chunk, Context, Generate, Result

PATHS: Mapping[str, str] = {
    "openai.chat": "/chat/completions",
    "openai.completions": "/completions",
    RESPONSES: "/responses",
}
"""The dialects that are passed on as they are, and their routes."""

OTHER_SERVER = frozenset({429, 502, 503})
"""Statuses that another replica may not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamOptions:
    """`strip`: fields that are never passed on. `defaults`: fields of chat and completions for requests without them,
    by the names of the wire. `first_token_timeout_s`: after so long without a first piece the gateway gives a stream
    up; a replica that let it come to that has failed."""

    strip: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    first_token_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request for one replica. `raw`: the dialect that its answer is passed on in; "" where it is parsed."""

    path: str
    body: bytes
    raw: str = ""


class UpstreamRunner:
    """Runner over the replicas of `fleet`, which it closes.

    A task with a `raw` body of OpenAI's is passed on with only the model's name replaced, and answered in raw chunks:
    whole events as they came, several in one chunk where they came together, with the served name in the place of the
    server's; comments are left out, because the front makes heartbeats of its own. Its `usage` is what the server
    tells unasked, with the last chunk. All other tasks are answered in typed chunks. An error that the server tells in
    the middle of its stream is raised, and so is an end before the answer was whole.

    Another replica is tried only before the first byte of an answer, where the first was not reached, or had no room.
    """

    def __init__(self, fleet: Fleet, facts: ModelFacts, options: UpstreamOptions | None = None) -> None:
        self._fleet = fleet
        self._facts = facts
        self._options = options or UpstreamOptions()
        self._lacks_responses = False

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    async def run(self, task: Batched, ctx: Context) -> Result:
        raise Unsupported(f"the model {task.model!r} generates text and does nothing else", param="model")

    async def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        if task.raw is not None and task.raw[0] in PATHS and not self._lacks(task.raw[0]):
            try:
                async with aclosing(self._passed_on(task, ctx)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except _NoResponses:  # known to the server or not, the task says the same in other words
                self._lacks_responses = True
        async with aclosing(self._typed(task, ctx)) as chunks:
            async for chunk in chunks:
                yield chunk

    def replicas(self) -> list[ReplicaStatus]:
        return self._fleet.status()

    def ready(self) -> bool:
        return self._fleet.ready()

    async def aclose(self) -> None:
        await self._fleet.aclose()
        for replica in self._fleet.replicas:
            await replica.client.aclose()

    def _lacks(self, dialect: str) -> bool:
        return self._lacks_responses and dialect == RESPONSES

    async def _passed_on(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        assert task.raw is not None
        dialect, received = task.raw
        body = RequestBody(received)
        strip = self._options.strip
        defaults = self._options.defaults if dialect != RESPONSES else {}

        def sent(replica: Replica) -> _Sent:
            model = _model(replica, task.adapter)
            return _Sent(PATHS[dialect], body.written(model, strip=strip, defaults=defaults), dialect)

        names = ModelNames(body.model or task.model)
        async with self._opened(sent, ctx, streams=task.stream) as (response, attempt):
            if not task.stream:
                data = await _whole(response, attempt)
                if dialect != RESPONSES:
                    _check_answer(data, response.key)
                yield Chunk(raw=(dialect, names(data)), usage=usage_in(data))
                return
            passed = PassedStream(dialect, names, response.key)
            async with aclosing(_events(response, attempt)) as groups:
                async for events in groups:
                    for chunk in passed.push(events):
                        if passed.over:
                            response.finish()
                        yield chunk
                    if passed.over:
                        break
            for chunk in passed.ends():
                yield chunk

    async def _typed(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        def sent(replica: Replica) -> _Sent:
            model = _model(replica, task.adapter)
            options = self._options
            return _Sent(*request_of(task, model, strip=options.strip, defaults=options.defaults))

        async with self._opened(sent, ctx, streams=task.stream) as (response, attempt):
            reader = AnswerReader(reasoning=task.include_reasoning, key=response.key)
            if not task.stream:
                for chunk in reader.read(await _whole(response, attempt)):
                    yield chunk
            else:
                done = False
                async with aclosing(_events(response, attempt)) as groups:
                    async for events in groups:
                        done = is_done(events[-1])
                        for event in events[:-1] if done else events:
                            for chunk in reader.read(payload(event)):
                                yield chunk
                if not done and not reader.finished:
                    raise TransportFailed("the server ended its stream before the answer was whole: ask again")
            if not reader.began:
                raise errors.no_answer(_NO_CHOICE)
        for chunk in reader.ends():
            yield chunk

    @asynccontextmanager
    async def _opened(self, sent: Any, ctx: Context, *, streams: bool) -> AsyncIterator[tuple[Response, Attempt]]:
        """The answer of the first replica that takes the request. Raises what it says otherwise."""
        tried: list[Replica] = []
        since = time.monotonic()
        first_s = self._options.first_token_timeout_s if streams else math.inf
        while True:
            replica = self._fleet.pick(tried)
            tried.append(replica)
            async with AsyncExitStack() as stack:
                attempt = Attempt(replica, since=since, first_s=first_s, deadline=ctx.deadline)
                stack.enter_context(attempt)
                error = await self._tried(stack, attempt, sent(replica), ctx, streams=streams)
                if isinstance(error, Response):
                    yield error, attempt
                    replica.succeeded()
                    return
            if not (_elsewhere(error) and self._fleet.others(tried)):
                raise error

    async def _tried(
        self, stack: AsyncExitStack, attempt: Attempt, sent: _Sent, ctx: Context, *, streams: bool
    ) -> Response | ShoalError:
        """The response, open on `stack`, or why there is none; then the replica's books are kept."""
        replica = attempt.replica
        client = replica.client
        now = time.monotonic()
        try:
            response = await stack.enter_async_context(
                client.opened("POST", sent.path, body=sent.body, deadline=ctx.deadline, request_id=ctx.id)
            )
            if response.status == 200:
                return _checked(response, client.base, streams=streams)
            attempt.heard()
            answer = await response.whole(MAX_ERROR_BYTES)
        except TransportFailed as error:
            replica.failed(now, gone=isinstance(error, Unreached))
            return error
        if sent.raw == RESPONSES and errors.lacks_route(answer) and answer.status != 400:
            raise _NoResponses
        refusal = errors.refusal(answer, client.base)
        if answer.status >= 500 and answer.status != 501:
            replica.failed(now, gone=False)
        else:
            replica.succeeded()
        if answer.status in OTHER_SERVER:
            replica.rest(now, refusal.retry_after)
        return refusal


_NO_CHOICE = "without any choice"


class _NoResponses(Exception):
    """The server has no /responses."""


def _model(replica: Replica, adapter: str) -> str:
    if not adapter:
        return replica.model
    try:
        return replica.adapters[adapter]
    except KeyError:
        known = ", ".join(sorted(replica.adapters)) or "none"
        raise InvalidValue(f"the model has no adapter {adapter!r}; it has {known}", param="model") from None


def _elsewhere(error: ShoalError) -> bool:
    """Whether another replica may answer what this one did not: nothing of the request was computed."""
    if isinstance(error, UpstreamRefused):
        return error.status in OTHER_SERVER
    return isinstance(error, Unreached)


def _checked(response: Response, where: str, *, streams: bool) -> Response:
    """Raise UpstreamFailed where the answer is of the other kind than the one asked for."""
    kind = response.content_type
    if streams and is_json(kind):
        raise UpstreamFailed(f"the server at {where} was asked for a stream and sent one answer ({kind})")
    if not streams and kind.startswith("text/event-stream"):
        raise UpstreamFailed(f"the server at {where} was asked for one answer and sent a stream")
    return response


async def _whole(response: Response, attempt: Attempt) -> bytes:
    answer = await response.whole(MAX_ANSWER_BYTES)
    attempt.heard()
    if not answer.whole:
        raise UpstreamFailed(f"the server answered more than {MAX_ANSWER_BYTES} bytes: ask for less, or for a stream")
    if not answer.json:
        raise errors.no_answer("what is no JSON")
    return answer.body


def _check_answer(body: bytes, key: bytes) -> None:
    """Raise UpstreamRefused for a whole answer of chat or completions that tells an error, or nothing."""
    if error := errors.failed(body, key):
        raise error
    if not has_choices(body):
        raise errors.no_answer(_NO_CHOICE)


async def _events(response: Response, attempt: Attempt) -> AsyncGenerator[list[bytes]]:
    """The events of a stream that say something, those that came together in one list, up to `[DONE]`, after which
    nobody waits for the end of the stream. Raises TransportFailed where the stream breaks off inside of one."""
    splitter = EventSplitter()
    async with aclosing(response.pieces()) as pieces:
        async for data in pieces:
            events = [event for event in splitter.push(data) if has_data(event)]
            if not events:
                continue
            attempt.heard()
            done = next((at for at, event in enumerate(events) if is_done(event)), None)
            if done is not None:
                response.finish()
                yield events[: done + 1]
                return
            yield events
    if is_done(splitter.rest + b"\n"):  # some servers write nothing behind it
        yield [splitter.rest + b"\n\n"]
    elif has_data(splitter.rest):
        raise TransportFailed("the server ended its stream in the middle of an event: ask again")
