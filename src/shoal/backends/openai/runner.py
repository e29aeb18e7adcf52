"""Generation by servers that speak OpenAI's API: forwards requests and passes their answers through."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec

from shoal.backends.base.http_answer import Answer, RequestNotSent, is_json
from shoal.backends.base.http_client import MAX_ANSWER_BYTES, MAX_ERROR_BYTES, Response
from shoal.backends.openai import errors
from shoal.backends.openai.answers import NO_CHOICES, AnswerReader, parse_usage, read_typed_whole, read_whole
from shoal.backends.openai.body import ModelNameRewriter, encode_request, requested_model
from shoal.backends.openai.replicas import Attempt, Replica, ServerPool
from shoal.backends.openai.request import build_request
from shoal.backends.openai.sse import EventSplitter, has_data, is_done, payload, split_data_events
from shoal.backends.openai.stream_passthrough import MESSAGES, RESPONSES, PassThroughStream
from shoal.core.closing import close_all
from shoal.core.generation.affinity import NO_DEMAND, Routing, estimate_demand
from shoal.core.generation.token_estimate import estimate_tokens
from shoal.core.protocols import ModelFacts, ReplicaStatus
from shoal.errors import (
    InvalidValue,
    RouteNotFound,
    ShoalError,
    TransportFailed,
    Unsupported,
    UpstreamFailed,
    UpstreamRefused,
    make_body_error,
)
from shoal.types import BatchTask, Chunk, Context, Generate, Result

PATHS: Mapping[str, str] = {
    "openai.chat": "/chat/completions",
    "openai.completions": "/completions",
    RESPONSES: "/responses",
    MESSAGES: "/messages",
}
"""Routes of the dialects that are passed through unchanged."""

LACKING_S = 300.0
"""How long servers without a route, or a field, are not asked for it again."""
MAX_TOKENS = "max_tokens"
"""A field that some servers refuse: they take max_completion_tokens instead."""
OPTIONAL = frozenset({RESPONSES, MESSAGES})
"""Dialects that not every server has: where it lacks one, requests are converted to chat completions."""

COUNT_PATH = "/messages/count_tokens"

RETRYABLE_STATUSES = frozenset({429, 502, 503})
"""Statuses after which a request is retried on another replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamOptions:
    """`strip`: fields that are never passed on. `defaults`: fields of chat and completions for requests without them,
    by wire name. `first_token_timeout_s`: time without a first piece after which the gateway ends a stream; it counts
    as a failure of the replica. `routing`: how replicas are chosen. `translates`: dialects that are converted although
    the server may have their routes. `names_tools`: whether the server follows a choice of one function."""

    strip: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    first_token_timeout_s: float = 60.0
    routing: Routing = "session"
    translates: frozenset[str] = frozenset()
    names_tools: bool = True


class _UpstreamRequest(NamedTuple):
    """A request for one replica. `raw`: the dialect in which its answer is passed through; "" if it is parsed.
    `renamed`: makes the request with the newer name of the answer's maximum length, for a server that refuses this
    one."""

    path: str
    body: bytes
    raw: str = ""
    renamed: Callable[[], _UpstreamRequest] | None = None


class UpstreamRunner:
    """Runner over the replicas of `fleet`, which it closes.

    A task with `raw` fields of a dialect in PATHS is forwarded with only the model's name replaced, and answered in raw
    chunks: whole events, several in one chunk if they arrived together, with the served name in place of the server's.
    Comments are dropped, because the HTTP layer sends its own heartbeats. `usage` comes with the last chunk if the
    server reports it unasked. All other tasks are answered in typed chunks. An error event in mid-stream is raised, and
    so is the end of an incomplete answer.

    A retry on another replica happens only before the first byte of an answer, if the first replica was unreachable or
    overloaded.
    """

    def __init__(self, fleet: ServerPool, facts: ModelFacts, options: UpstreamOptions | None = None) -> None:
        self._fleet = fleet
        self._facts = facts
        self._options = options or UpstreamOptions()
        # Until when the servers are taken to lack a route, or one of them a field: they may be replaced by other ones.
        self._lacking: dict[str | tuple[Replica, str], float] = {
            PATHS[dialect]: math.inf for dialect in self._options.translates
        }
        self._has_several = len(fleet.replicas) > 1

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    async def run(self, task: BatchTask, ctx: Context) -> Result:
        raise Unsupported(f"the model {task.model!r} only generates text", param="model")

    def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        dialect = task.raw[0] if task.raw is not None else ""
        if dialect not in PATHS or self._lacks(PATHS[dialect]):
            return self._stream_typed(task, ctx)
        return self._stream_optional(task, ctx) if dialect in OPTIONAL else self._stream_raw(task, ctx)

    async def count_tokens(self, task: Generate, ctx: Context) -> int:
        """Return the server's own count, or an estimate if it has no route for it."""
        if task.raw is None or task.raw[0] != MESSAGES or self._lacks(COUNT_PATH):
            return estimate_tokens(task)
        fields = task.raw[1]

        def make_request(replica: Replica) -> _UpstreamRequest:
            model = _model_name(replica, task.adapter)
            body = encode_request(fields, model, strip=self._options.strip, defaults={})
            return _UpstreamRequest(COUNT_PATH, body, MESSAGES)

        try:
            response, attempt = await self._open_response(make_request, task, ctx)
        except _RouteMissing:
            self._note_lacking(COUNT_PATH)
            return estimate_tokens(task)
        with attempt, response:
            count = parse_usage(b'{"usage":%b}' % _check_json(await _read_whole(response, attempt)))
            attempt.replica.record_success()
        if count is None:
            raise errors.invalid_answer_error("no count of tokens")
        return count.prompt_tokens

    def _lacks(self, what: str | tuple[Replica, str]) -> bool:
        return self._lacking.get(what, 0.0) > time.monotonic()

    def _note_lacking(self, what: str | tuple[Replica, str]) -> None:
        self._lacking[what] = time.monotonic() + LACKING_S

    def replicas(self) -> list[ReplicaStatus]:
        return self._fleet.status()

    def ready(self) -> bool:
        return self._fleet.ready()

    async def aclose(self) -> None:
        await close_all(self._fleet.aclose, *(replica.client.aclose for replica in self._fleet.replicas))

    async def _stream_optional(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        """Stream raw chunks, or typed ones of the same content if the server has no route of the dialect."""
        try:
            async with aclosing(self._stream_raw(task, ctx)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        except _RouteMissing as missing:
            self._note_lacking(missing.path)
        async with aclosing(self._stream_typed(task, ctx)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _stream_raw(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        assert task.raw is not None
        dialect, fields = task.raw
        strip = self._options.strip
        defaults = self._options.defaults if dialect not in OPTIONAL else {}

        def make_request(replica: Replica) -> _UpstreamRequest:
            model = _model_name(replica, task.adapter)
            body = encode_request(fields, model, strip=strip, defaults=defaults)
            return _UpstreamRequest(PATHS[dialect], body, dialect)

        names = ModelNameRewriter(requested_model(fields) or task.model)
        response, attempt = await self._open_response(make_request, task, ctx)
        number = self._find_number(attempt.replica)
        with attempt, response:
            _check_content_type(response, attempt.replica.client.base, streams=task.stream)
            if not task.stream:
                answer = await _read_whole(response, attempt)
                usage = read_typed_whole(answer) if dialect in OPTIONAL else read_whole(answer)
                yield Chunk(raw=(dialect, names(answer.body)), usage=usage, replica=number)
                attempt.replica.record_success()
                return
            passed = PassThroughStream(dialect, names, response.key)
            reader = _EventReader(response, attempt)
            while not response.is_finished and (events := await reader.read()):
                chunk = passed.push(events)
                if passed.has_ended:
                    response.finish()
                if chunk is not None:
                    if number is not None:
                        chunk, number = msgspec.structs.replace(chunk, replica=number), None
                    yield chunk
                if passed.error is not None:
                    raise passed.error
            for chunk in passed.finish():
                yield chunk
            attempt.replica.record_success()

    async def _stream_typed(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        if task.untranslated is not None:
            why = task.untranslated
            raise make_body_error(why.kind, why.message, why.param)

        def make_request(replica: Replica, *, renamed: bool = False) -> _UpstreamRequest:
            model = _model_name(replica, task.adapter)
            options = self._options
            renamed = renamed or self._lacks((replica, MAX_TOKENS))
            field = "max_completion_tokens" if renamed else MAX_TOKENS
            path, body = build_request(
                task,
                model,
                strip=options.strip,
                defaults=options.defaults,
                length_field=field,
                names_tools=options.names_tools,
            )
            return _UpstreamRequest(
                path, body, renamed=None if renamed else partial(make_request, replica, renamed=True)
            )

        response, attempt = await self._open_response(make_request, task, ctx)
        with attempt, response:
            _check_content_type(response, attempt.replica.client.base, streams=task.stream)
            number = self._find_number(attempt.replica)
            answer = AnswerReader(reasoning=task.include_reasoning, key=response.key, replica=number)
            if not task.stream:
                for chunk in answer.read(_check_json(await _read_whole(response, attempt))):
                    yield chunk
            else:
                reader = _EventReader(response, attempt)
                while not response.is_finished and (events := await reader.read()):
                    for event in split_data_events(events):
                        if is_done(event):
                            response.finish()
                            break
                        for chunk in answer.read(payload(event)):
                            yield chunk
                if not response.is_finished and not answer.finished:
                    raise TransportFailed("the server ended its stream before the answer was complete: try again")
            if not answer.began:
                raise errors.invalid_answer_error(NO_CHOICES)
            attempt.replica.record_success()
        for chunk in answer.finish():
            yield chunk

    def _find_number(self, replica: Replica) -> int | None:
        """Return the number of a replica, if there are several."""
        return self._fleet.replicas.index(replica) if self._has_several else None

    async def _open_response(
        self, make_request: Callable[[Replica], _UpstreamRequest], task: Generate, ctx: Context
    ) -> tuple[Response, Attempt]:
        """Return the response of the first replica that accepts the request, else raise the error. The caller must use
        both in a `with` block, and record success."""
        tried: list[Replica] = []
        since = time.monotonic()
        first_s = self._options.first_token_timeout_s if task.stream else math.inf
        demand = NO_DEMAND
        if self._has_several:
            demand = estimate_demand(task, ctx, self._options.routing)
        renamed: Callable[[], _UpstreamRequest] | None = None
        while True:
            if renamed is None:
                replica = self._fleet.pick(tried, demand)
                tried.append(replica)
            sent = renamed() if renamed else make_request(replica)
            attempt = Attempt(replica, since=since, first_s=first_s, deadline=ctx.deadline, tokens=demand.tokens)
            with attempt:
                error = await self._try_replica(attempt, sent, ctx)
            if isinstance(error, Response):
                if renamed is not None:  # only now: the first refusal may quote words of the client
                    self._note_lacking((replica, MAX_TOKENS))
                attempt.has_response = True
                return error, attempt
            attempt.record(error)
            renamed = sent.renamed if errors.lacks_max_tokens(error) else None
            if renamed is None and not (_is_retryable(error) and self._fleet.has_alternative(tried)):
                raise error

    async def _try_replica(self, attempt: Attempt, sent: _UpstreamRequest, ctx: Context) -> Response | ShoalError:
        """Return the response, or the error, whose outcome is then recorded for the replica."""
        replica = attempt.replica
        client = replica.client
        now = time.monotonic()
        try:
            response = await client.open_response(
                "POST", sent.path, body=sent.body, deadline=ctx.deadline, request_id=ctx.id
            )
            if response.status == 200:
                return response
            attempt.record_first_piece()
            with response:
                answer = await response.read_all(MAX_ERROR_BYTES)
        except TransportFailed as error:
            replica.record_failure(now, unreachable=isinstance(error, RequestNotSent))
            return error
        if sent.raw in OPTIONAL and errors.lacks_dialect(answer):
            raise _RouteMissing(sent.path)
        if sent.raw == MESSAGES and errors.lacks_system_role(answer, sent.body):
            raise _RouteMissing(sent.path)
        refusal = errors.refusal_error(answer, client.base)
        if answer.status >= 500 and answer.status != 501:
            replica.record_failure(now, unreachable=False)
        else:
            replica.record_success()
        if answer.status in RETRYABLE_STATUSES:
            replica.pause(now, refusal.retry_after)
        return refusal


class _RouteMissing(RouteNotFound):
    """The server lacks the route at `path`, or has too old a form of it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


def _model_name(replica: Replica, adapter: str) -> str:
    if not adapter:
        return replica.model
    try:
        return replica.adapters[adapter]
    except KeyError:
        known = ", ".join(sorted(replica.adapters)) or "none"
        raise InvalidValue(f"the model has no adapter {adapter!r}; it has {known}", param="model") from None


def _is_retryable(error: ShoalError) -> bool:
    """Whether another replica may be tried: this one computed nothing of the request."""
    if isinstance(error, UpstreamRefused):
        return error.status in RETRYABLE_STATUSES
    return isinstance(error, RequestNotSent)


def _check_content_type(response: Response, where: str, *, streams: bool) -> None:
    """Raise UpstreamFailed for a whole answer in place of a stream, or a stream in place of a whole answer."""
    kind = response.content_type
    if streams and is_json(kind):
        raise UpstreamFailed(f"the server at {where} returned one body ({kind}) instead of a stream")
    if not streams and kind.startswith("text/event-stream"):
        raise UpstreamFailed(f"the server at {where} returned a stream instead of one body")


async def _read_whole(response: Response, attempt: Attempt) -> Answer:
    answer = await response.read_all(MAX_ANSWER_BYTES)
    attempt.record_first_piece()
    if not answer.is_complete:
        raise UpstreamFailed(f"the server returned more than {MAX_ANSWER_BYTES} bytes: lower max_tokens, or stream")
    return answer


def _check_json(answer: Answer) -> bytes:
    """Return the body. Raises UpstreamRefused if it is not JSON."""
    if not answer.has_json_body:
        raise errors.invalid_answer_error("invalid JSON")
    return answer.body


class _EventReader:
    """Reads the events of a response: those that arrived together joined, with those without data among them."""

    def __init__(self, response: Response, attempt: Attempt) -> None:
        self._response = response
        self._attempt = attempt
        self._splitter = EventSplitter()

    async def read(self) -> bytes:
        """Return the next events, of which one at least has data; b"" at the end of the body. Raises TransportFailed if
        it ends inside an event."""
        while data := await self._response.read_piece():
            events = self._splitter.push(data)
            if has_data(events):
                self._attempt.record_first_piece()
                return events
        rest = self._splitter.rest
        if is_done(rest + b"\n"):  # some servers do not end it with an empty line
            return rest + b"\n\n"
        if has_data(rest):
            raise TransportFailed("the server ended its stream in the middle of an event: try again")
        return b""
