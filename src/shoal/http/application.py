"""The ASGI application: dispatches requests to operations. Everything common to all surfaces is here.

Per request: find the operation, authorize the caller, read the body within its limits, call the endpoint while watching
for a disconnect, send the reply. Errors are rendered in the dialect of the surface that owns the path.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.routing import Router

from shoal.core.protocols import Surface
from shoal.errors import Cancelled, Malformed, ModelNotReady, ShoalError
from shoal.http.access_log import log_request, record_request
from shoal.http.auth import Gate
from shoal.http.body import Receive, check_head, has_unread_body, linger, read_body, read_pieces
from shoal.http.cors import Cors
from shoal.http.disconnect import DisconnectWatch
from shoal.http.hand_over import Forward, HandOver, is_for_models
from shoal.http.headers import check_headers
from shoal.http.operation import DocumentedOperation
from shoal.http.redaction import log_bug, to_public_error
from shoal.http.repetition import repeat_until_answered
from shoal.http.request import REQUEST_ID, ErrorRenderer, Headers, Options, Reply, Request, choose_timeout
from shoal.http.routes import Miss, Route, Routes
from shoal.http.streaming import StreamBody

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

Send = Callable[[Any], Any]

LARGE_BODY = 262_144
"""Bodies above this size are decoded one per turn of the event loop: each can hold it for 60 ms."""

_NOSNIFF = (b"x-content-type-options", b"nosniff")
_NOT_HTTP = Router()  # accepts lifespan events and rejects websockets
_CLOSE = (b"connection", b"close")
_CLOSING_STATUSES = {
    408,
    499,
}  # the body was late or its sender left: the next bytes on this connection are not a new request


def build_app(
    gateway: Gateway, surfaces: Sequence[Surface], options: Options, forward: Forward | None = None
) -> Application:
    """Build the ASGI application of these surfaces. The first surface renders the errors of unknown paths.

    Raises ValueError when two surfaces claim the same method of a path.
    """
    return Application(gateway, Routes(surfaces, gateway), options, forward)


class Application:
    """The ASGI application. `routes` is the table of all its routes. `forward`: hands requests over to the process that
    has the models, if that is another one."""

    def __init__(self, gateway: Gateway, routes: Routes, options: Options, forward: Forward | None = None) -> None:
        self._gateway = gateway
        self._options = options
        self.routes = routes
        self._forward = forward
        self._gate = Gate(options)
        self._cors = Cors(options.cors_origins)
        self._client_header = options.client_header.lower().encode()
        self._decoding = asyncio.Lock()
        self._id_prefix = f"req_{os.urandom(6).hex()}"
        self._count = itertools.count(1)
        self._log = options.log

    def render_error(self, error: ShoalError) -> bytes:
        """Render the body of an error that belongs to no route, in the first surface's dialect, which is JSON."""
        return self.routes.first.render_error(error)[2]

    def is_revoked(self, client: str) -> bool:
        """Return whether this identity is that of a key that was removed."""
        return self._gate.is_revoked(client)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _NOT_HTTP(scope, receive, send)
            return
        request = Request(scope, time.monotonic())
        given = request.headers.get(b"x-request-id")
        is_valid = given is not None and REQUEST_ID.fullmatch(given) is not None
        request.id = given.decode("ascii") if given and is_valid else f"{self._id_prefix}{next(self._count):08x}"
        found = self.routes.find(request.method, request.path)
        request.surface = found.surface.name
        try:
            check_headers(scope["headers"], scope["http_version"], self._client_header)
        except Malformed as error:
            found = Miss(found.surface, error)
        generates = isinstance(found, Route) and found.operation.generates
        timeout = self._options.generate_timeout_s if generates else self._options.embed_timeout_s
        if b"x-request-timeout" in request.headers:
            timeout = choose_timeout(request.headers[b"x-request-timeout"], timeout)
        request.deadline = request.started + timeout
        quiet = isinstance(found, Route) and found.operation.quiet
        span = None
        if self._log is not None and self._log.tracer is not None and not quiet:
            route = found.operation.path if isinstance(found, Route) else ""
            trusted = self._gate.trusts_trace(request)
            span = self._log.tracer.begin_request(
                request.method, route, request.headers, request.started, trusted=trusted
            )
            request.trace = span.trace
        status = 499  # of a request whose task is cancelled
        try:
            status = await self._respond(request, found, receive, send)
            if not request.is_forwarded:
                log_request(request, status, quiet=quiet)
        except Exception:
            status = 500
            raise
        finally:
            if self._log is not None and not quiet:
                record_request(self._log, request, status, span)

    async def _respond(self, request: Request, found: Route | Miss, receive: Receive, send: Send) -> int:
        exchange = request.exchange
        try:
            if isinstance(found, Miss):
                reply = self._cors.answer_preflight(
                    request, self.routes.allowed_methods(request.path)
                ) or self._render_miss(found, request)
            else:
                try:
                    if self._forward is not None and is_for_models(found.operation):
                        raise HandOver
                    with DisconnectWatch(receive, self._options.body_timeout_s, exchange) as watch:
                        await self._admit(request, found, receive, watch)
                        if exchange is None and request.pieces is None:
                            watch.start()
                        try:
                            reply = await found.operation.endpoint(request)
                        except ModelNotReady as error:
                            endpoint = partial(found.operation.endpoint, request)
                            reply = await repeat_until_answered(self._gateway, request.deadline, endpoint, error)
                        if not isinstance(reply.body, bytes | list):
                            return await self._stream(request, reply, reply.body, watch, send)
                except HandOver:
                    if self._forward is None:
                        raise
                    return await self._forward(request, receive, send)
        except Exception as error:  # a bug anywhere below must become an error reply in the client's dialect
            if request.has_response:
                return _abort_stream(request, error)
            self._note_error(request, error)
            reply = _report_error(request, request.render_error or found.surface.render_error, error)
        if (
            exchange is None
            or not request.body_read
            or not isinstance(reply.body, bytes)
            or not exchange.send_whole(reply.status, self._build_headers(request, reply, unread=False), reply.body)
        ):
            await self._send(request, reply, receive, send)
        return reply.status

    def _note_error(self, request: Request, error: Exception) -> None:
        request.error = error.kind if isinstance(error, ShoalError) else "internal"
        if isinstance(error, ShoalError) and not request.is_handed_over:
            self._gateway.report_refusal(error, request.surface)

    def _render_miss(self, miss: Miss, request: Request) -> Reply:
        request.error = miss.error.kind
        self._gateway.report_refusal(miss.error, request.surface)
        return _render_reply(miss.surface.render_error, miss.error.for_request(request.id))

    async def _admit(self, request: Request, route: Route, receive: Receive, watch: DisconnectWatch) -> None:
        operation = route.operation
        request.gate = self._gate
        request.client, request.key_class = self._gate.admit(request, operation.access)
        request.parameter = route.parameter
        if operation.limit == 0:
            await operation.endpoint(request)
        if operation.method != "GET":
            limit = self._options.max_body_bytes if operation.limit is None else operation.limit
            others = operation.other_bodies if isinstance(operation, DocumentedOperation) else ()
            check_head(request, limit, json=operation.request is not None, others=others)
            if operation.reads_body:
                request.pieces = read_pieces(request, receive, limit, watch.limit_body_time)
                return
            body = request.exchange.take_body(limit) if request.exchange is not None else None
            if body is None:
                with watch.limit_body_time():
                    body = await read_body(receive, limit)
            request.body = body
            if len(request.body) > LARGE_BODY:
                async with self._decoding:
                    await asyncio.sleep(0)
        request.body_read = True

    async def _send(self, request: Request, reply: Reply, receive: Receive, send: Send) -> None:
        body = reply.body
        assert isinstance(body, bytes | list)
        pieces = body if isinstance(body, list) else [body]
        length = sum(map(len, pieces))
        unread = not request.body_read and has_unread_body(request)
        headers = self._build_headers(request, reply, unread=unread)
        if reply.status != 204:
            headers.append((b"content-length", b"%d" % length))
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        if request.method == "HEAD":
            pieces = [b""]
        if unread and b"expect" not in request.headers:
            await send({"type": "http.response.body", "body": b"".join(pieces), "more_body": True})
            await linger(receive)
            pieces = [b""]
        last = len(pieces) - 1
        for at, piece in enumerate(pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": at < last})

    async def _stream(
        self, request: Request, reply: Reply, body: AsyncIterator[bytes], watch: DisconnectWatch, send: Send
    ) -> int:
        is_last = False
        try:
            request.has_response = True
            headers = self._build_headers(request, reply, unread=has_unread_body(request))
            await send({"type": "http.response.start", "status": reply.status, "headers": headers})
            if request.method != "HEAD":
                async for piece in body:
                    # The end goes with the last piece: a write of its own would wake the client once more.
                    is_last = isinstance(body, StreamBody) and body.is_complete
                    await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
                    if is_last:
                        break
        finally:
            if isinstance(body, StreamBody):
                request.failure = body.failed
            close = getattr(body, "aclose", None)
            if close is not None:
                await close()
        watch.stop()
        if not is_last:
            await send({"type": "http.response.body", "body": b""})
        return reply.status

    def _build_headers(self, request: Request, reply: Reply, *, unread: bool) -> Headers:
        headers = [*reply.headers, (b"x-request-id", request.id.encode()), _NOSNIFF]
        if self._options.cors_origins:
            headers += self._cors.headers(request)
        if unread or reply.status in _CLOSING_STATUSES:
            headers.append(_CLOSE)
        return headers


def _render_reply(render: ErrorRenderer, error: ShoalError) -> Reply:
    status, headers, body = render(error)
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    return Reply(status, raw, body)


def _report_error(request: Request, render: ErrorRenderer, error: Exception) -> Reply:
    """Render an error in the client's dialect."""
    public = to_public_error(error, request.id, f"{request.method} {request.path}")
    return _render_reply(render, public.for_request(request.id))


def _abort_stream(request: Request, error: Exception) -> int:
    """Return 499 for the log if the client left; the status of a started stream cannot change any more.

    Any other error propagates to the HTTP server, which closes the connection: the only way left to report it.
    """
    if isinstance(error, Cancelled):
        return 499
    log_bug(error, request.id, f"{request.method} {request.path}")
    raise error
