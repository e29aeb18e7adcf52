"""Generation by servers that speak OpenAI's API: what a client sent goes on, and what comes back is passed on."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from shoal.backends.base.http_answer import RequestNotSent, is_json
from shoal.backends.base.http_client import MAX_ANSWER_BYTES, MAX_ERROR_BYTES, Response
from shoal.backends.openai import errors
from shoal.backends.openai.answers import AnswerReader, has_choices, parse_usage
from shoal.backends.openai.body import ModelNameRewriter, RequestBody
from shoal.backends.openai.replicas import Attempt, Replica, ServerPool
from shoal.backends.openai.request import build_request
from shoal.backends.openai.sse import EventSplitter, has_data, is_done, payload
from shoal.backends.openai.stream_passthrough import RESPONSES, PassThroughStream
from shoal.core.protocols import ModelFacts, ReplicaStatus
from shoal.errors import InvalidValue, ShoalError, TransportFailed, Unsupported, UpstreamFailed, UpstreamRefused
from shoal.types import BatchTask, Chunk, Context, Generate, Result

PATHS: Mapping[str, str] = {
    "openai.chat": "/chat/completions",
    "openai.completions": "/completions",
    RESPONSES: "/responses",
}
"""The dialects that are passed on as they are, and their routes."""

RETRYABLE_STATUSES = frozenset({429, 502, 503})
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
class _UpstreamRequest:
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

    def __init__(self, fleet: ServerPool, facts: ModelFacts, options: UpstreamOptions | None = None) -> None:
        self._fleet = fleet
        self._facts = facts
        self._options = options or UpstreamOptions()
        self._lacks_responses = False

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    async def run(self, task: BatchTask, ctx: Context) -> Result:
        raise Unsupported(f"the model {task.model!r} generates text and does nothing else", param="model")

    async def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        if task.raw is not None and task.raw[0] in PATHS and not self._lacks_dialect(task.raw[0]):
            try:
                async with aclosing(self._stream_raw(task, ctx)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except _ResponsesUnsupported:  # known to the server or not, the task says the same in other words
                self._lacks_responses = True
        async with aclosing(self._stream_typed(task, ctx)) as chunks:
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

    def _lacks_dialect(self, dialect: str) -> bool:
        return self._lacks_responses and dialect == RESPONSES

    async def _stream_raw(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        assert task.raw is not None
        dialect, received = task.raw
        body = RequestBody(received)
        strip = self._options.strip
        defaults = self._options.defaults if dialect != RESPONSES else {}

        def make_request(replica: Replica) -> _UpstreamRequest:
            model = _model_name(replica, task.adapter)
            return _UpstreamRequest(PATHS[dialect], body.encode(model, strip=strip, defaults=defaults), dialect)

        names = ModelNameRewriter(body.model or task.model)
        async with self._open_response(make_request, ctx, streams=task.stream) as (response, attempt):
            if not task.stream:
                data = await _read_whole(response, attempt)
                if dialect != RESPONSES:
                    _check_answer(data, response.key)
                yield Chunk(raw=(dialect, names(data)), usage=parse_usage(data))
                return
            passed = PassThroughStream(dialect, names, response.key)
            async with aclosing(_read_events(response, attempt)) as groups:
                async for events in groups:
                    for chunk in passed.push(events):
                        if passed.over:
                            response.finish()
                        yield chunk
                    if passed.over:
                        break
            for chunk in passed.finish():
                yield chunk

    async def _stream_typed(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        def make_request(replica: Replica) -> _UpstreamRequest:
            model = _model_name(replica, task.adapter)
            options = self._options
            return _UpstreamRequest(*build_request(task, model, strip=options.strip, defaults=options.defaults))

        async with self._open_response(make_request, ctx, streams=task.stream) as (response, attempt):
            reader = AnswerReader(reasoning=task.include_reasoning, key=response.key)
            if not task.stream:
                for chunk in reader.read(await _read_whole(response, attempt)):
                    yield chunk
            else:
                done = False
                async with aclosing(_read_events(response, attempt)) as groups:
                    async for events in groups:
                        done = is_done(events[-1])
                        for event in events[:-1] if done else events:
                            for chunk in reader.read(payload(event)):
                                yield chunk
                if not done and not reader.finished:
                    raise TransportFailed("the server ended its stream before the answer was whole: ask again")
            if not reader.began:
                raise errors.invalid_answer_error(_NO_CHOICE)
        for chunk in reader.finish():
            yield chunk

    @asynccontextmanager
    async def _open_response(
        self, sent: Any, ctx: Context, *, streams: bool
    ) -> AsyncIterator[tuple[Response, Attempt]]:
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
                error = await self._try_replica(stack, attempt, sent(replica), ctx, streams=streams)
                if isinstance(error, Response):
                    yield error, attempt
                    replica.record_success()
                    return
            if not (_is_retryable(error) and self._fleet.has_alternative(tried)):
                raise error

    async def _try_replica(
        self, stack: AsyncExitStack, attempt: Attempt, sent: _UpstreamRequest, ctx: Context, *, streams: bool
    ) -> Response | ShoalError:
        """The response, open on `stack`, or why there is none; then the replica's books are kept."""
        replica = attempt.replica
        client = replica.client
        now = time.monotonic()
        try:
            response = await stack.enter_async_context(
                client.open_response("POST", sent.path, body=sent.body, deadline=ctx.deadline, request_id=ctx.id)
            )
            if response.status == 200:
                return _check_content_type(response, client.base, streams=streams)
            attempt.record_first_piece()
            answer = await response.read_all(MAX_ERROR_BYTES)
        except TransportFailed as error:
            replica.record_failure(now, gone=isinstance(error, RequestNotSent))
            return error
        if sent.raw == RESPONSES and errors.lacks_route(answer) and answer.status != 400:
            raise _ResponsesUnsupported
        refusal = errors.refusal_error(answer, client.base)
        if answer.status >= 500 and answer.status != 501:
            replica.record_failure(now, gone=False)
        else:
            replica.record_success()
        if answer.status in RETRYABLE_STATUSES:
            replica.pause(now, refusal.retry_after)
        return refusal


_NO_CHOICE = "without any choice"


class _ResponsesUnsupported(Exception):
    """The server has no /responses."""


def _model_name(replica: Replica, adapter: str) -> str:
    if not adapter:
        return replica.model
    try:
        return replica.adapters[adapter]
    except KeyError:
        known = ", ".join(sorted(replica.adapters)) or "none"
        raise InvalidValue(f"the model has no adapter {adapter!r}; it has {known}", param="model") from None


def _is_retryable(error: ShoalError) -> bool:
    """Whether another replica may answer what this one did not: nothing of the request was computed."""
    if isinstance(error, UpstreamRefused):
        return error.status in RETRYABLE_STATUSES
    return isinstance(error, RequestNotSent)


def _check_content_type(response: Response, where: str, *, streams: bool) -> Response:
    """Raise UpstreamFailed where the answer is of the other kind than the one asked for."""
    kind = response.content_type
    if streams and is_json(kind):
        raise UpstreamFailed(f"the server at {where} was asked for a stream and sent one answer ({kind})")
    if not streams and kind.startswith("text/event-stream"):
        raise UpstreamFailed(f"the server at {where} was asked for one answer and sent a stream")
    return response


async def _read_whole(response: Response, attempt: Attempt) -> bytes:
    answer = await response.read_all(MAX_ANSWER_BYTES)
    attempt.record_first_piece()
    if not answer.whole:
        raise UpstreamFailed(f"the server answered more than {MAX_ANSWER_BYTES} bytes: ask for less, or for a stream")
    if not answer.has_json_body:
        raise errors.invalid_answer_error("what is no JSON")
    return answer.body


def _check_answer(body: bytes, key: bytes) -> None:
    """Raise UpstreamRefused for a whole answer of chat or completions that tells an error, or nothing."""
    if error := errors.find_failure(body, key):
        raise error
    if not has_choices(body):
        raise errors.invalid_answer_error(_NO_CHOICE)


async def _read_events(response: Response, attempt: Attempt) -> AsyncGenerator[list[bytes]]:
    """The events of a stream that say something, those that came together in one list, up to `[DONE]`, after which
    nobody waits for the end of the stream. Raises TransportFailed where the stream breaks off inside of one."""
    splitter = EventSplitter()
    async with aclosing(response.pieces()) as pieces:
        async for data in pieces:
            events = [event for event in splitter.push(data) if has_data(event)]
            if not events:
                continue
            attempt.record_first_piece()
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
