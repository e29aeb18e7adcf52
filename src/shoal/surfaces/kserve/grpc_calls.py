"""The KServe v2 gRPC API with Triton's extensions, and gRPC's health check. Imported only where it is served.

Access, limits, deadlines, errors and the access log are those of HTTP: each call becomes a `Request`, whose headers are
the call's metadata.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc
import grpc.aio
import msgspec
from google.protobuf import json_format
from google.protobuf.message import Message

from shoal.core.protocols import Access
from shoal.core.recording import RequestSpan
from shoal.errors import Malformed, ModelNotFound, ModelNotReady, ShoalError
from shoal.http import status_codes
from shoal.http.access_log import log_request, record_request
from shoal.http.auth import Gate
from shoal.http.body import PendingBodies
from shoal.http.headers import check_repeated
from shoal.http.redaction import to_public_error
from shoal.http.repetition import repeat_until_answered
from shoal.http.request import REQUEST_ID, Options, Request, choose_timeout
from shoal.kserve import EMPTY_FINAL, SERVICE
from shoal.kserve import protocol_pb2 as pb
from shoal.surfaces.kserve import repository
from shoal.surfaces.kserve.grpc_messages import parse, read_parameter, read_request, to_message
from shoal.surfaces.kserve.grpc_streams import ResponseStream, Turn
from shoal.surfaces.kserve.inference import Inference
from shoal.surfaces.kserve.signature import build_config, build_metadata
from shoal.surfaces.kserve.tensors import InferResponse

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

T = TypeVar("T")

HEALTH = "/grpc.health.v1.Health/Check"
MAX_STREAM_REQUESTS = 256
"""Maximum requests of one stream that run at a time; further ones wait unread."""

MAX_HELD_BYTES = 268_435_456
"""Bytes of all requests in progress; their tensors take several times as much. A single request may have any size."""

MAX_HEALTH_READS = 8
"""Maximum health checks whose message is being received: callers without a key may send large ones. Further ones get
the health of the whole server."""

POLL_S = 1.0
"""Interval at which a silent stream is checked for a shutdown of the server."""

MAX_ERROR_CHARACTERS = 500
"""gRPC sends an error in a header, a character as up to 12 bytes, and rejects headers above 8 KB."""

_NAME = SERVICE.strip("/").encode()
_HEALTH_REQUESTS = (grpc.aio.EOF, b"\n\x00", b"\n%c%b" % (len(_NAME), _NAME))  # HealthCheckRequest with its `service`
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"  # HealthCheckResponse with its `status`

_Code = grpc.StatusCode
CODES: Mapping[int, grpc.StatusCode] = {
    400: _Code.INVALID_ARGUMENT,
    401: _Code.UNAUTHENTICATED,
    403: _Code.PERMISSION_DENIED,
    404: _Code.NOT_FOUND,
    408: _Code.DEADLINE_EXCEEDED,
    409: _Code.ALREADY_EXISTS,
    413: _Code.RESOURCE_EXHAUSTED,
    415: _Code.INVALID_ARGUMENT,
    424: _Code.FAILED_PRECONDITION,
    429: _Code.RESOURCE_EXHAUSTED,
    499: _Code.CANCELLED,
    500: _Code.INTERNAL,
    502: _Code.UNAVAILABLE,
    503: _Code.UNAVAILABLE,
    504: _Code.DEADLINE_EXCEEDED,
}
"""HTTP statuses of errors to gRPC's codes."""


def to_code(error: ShoalError) -> grpc.StatusCode:
    """Return the gRPC code of an error."""
    status = status_codes.status(error)
    return CODES.get(status, _Code.INTERNAL if status >= 500 else _Code.INVALID_ARGUMENT)


_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Metadata: TypeAlias = list[tuple[bytes, bytes]]


class KServeCalls(grpc.GenericRpcHandler):
    """All calls of the API."""

    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._options = options
        self._gate = Gate(options)
        self._client_header = options.client_header.lower().encode()
        self._inference = Inference(gateway, options)
        self._held = PendingBodies(MAX_HELD_BYTES)
        self._log = options.log
        self._health_reads = 0
        self._id_prefix = f"rpc_{os.urandom(6).hex()}"
        self._count = itertools.count(1)
        table: dict[str, tuple[Any, Access, Callable[[Request, Any], Awaitable[Message]]]] = {
            "ServerLive": (pb.ServerLiveRequest, "public", self._server_live),
            "ServerReady": (pb.ServerReadyRequest, "public", self._server_ready),
            "ServerMetadata": (pb.ServerMetadataRequest, "user", self._server_metadata),
            "ModelReady": (pb.ModelReadyRequest, "user", self._model_ready),
            "ModelMetadata": (pb.ModelMetadataRequest, "user", self._model_metadata),
            "ModelConfig": (pb.ModelConfigRequest, "user", self._model_config),
            "ModelStatistics": (pb.ModelStatisticsRequest, "user", self._model_statistics),
            "ModelInfer": (pb.ModelInferRequest, "user", self._model_infer),
            "RepositoryIndex": (pb.RepositoryIndexRequest, "user", self._repository_index),
            "RepositoryModelLoad": (pb.RepositoryModelLoadRequest, "admin", self._load),
            "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest, "admin", self._unload),
        }
        self._methods = {
            SERVICE + name: self._build_unary(name, kind, access, call) for name, (kind, access, call) in table.items()
        }
        self._methods[SERVICE + "ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream_infer, None, None
        )
        self._methods[HEALTH] = grpc.stream_unary_rpc_method_handler(self._check_health, None, None)

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a method; None for an unknown one, which is UNIMPLEMENTED."""
        return self._methods.get(handler_call_details.method)

    def _build_unary(
        self, name: str, kind: Any, access: Access, call: Callable[[Request, Any], Awaitable[Message]]
    ) -> Any:
        """Return the handler of a call with one request, which is received only once its caller may send it. The
        messages of public calls have no fields and are not received at all."""
        path = SERVICE + name
        quiet = name.endswith(("Live", "Ready"))

        async def answer(_: AsyncIterator[bytes], context: _Context) -> Message:
            metadata = _read_metadata(context)
            request = self._open_request(path, context, metadata)
            span = self._begin_span(request, quiet=quiet)
            status = 200
            try:
                self._admit(request, metadata, access)
                data = b"" if access == "public" else await _receive(context)
                message = parse(kind, data)
                with self._hold(len(data)):
                    return await self._repeat(request, partial(call, request, message))
            except asyncio.CancelledError:
                status = 499
                raise
            except Exception as error:  # a bug anywhere below must become an error of the call
                public = self._report_error(request, error)
                status = status_codes.status(public)
                await _abort(context, public)
            finally:
                self._finish(request, status, span, quiet=quiet)

        # To gRPC it is a call with a stream of requests: it receives that of any other before the first line above.
        return grpc.stream_unary_rpc_method_handler(answer, None, _serialize)

    def _open_request(self, path: str, context: _Context, metadata: _Metadata) -> Request:
        """Return a request for a call, with the caller's deadline if that is earlier than the server's own.

        gRPC shows neither Host nor content type, and no page of a browser can call it: what admin access requires to
        protect from pages is given.
        """
        now = time.monotonic()
        headers = [*metadata, (b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"method": "POST", "path": path, "headers": headers, "client": (_peer_address(context.peer()), 0)}
        request = Request(scope, now)
        given = request.headers.get(b"x-request-id", b"")
        is_valid = REQUEST_ID.fullmatch(given) is not None
        request.id = given.decode() if is_valid else f"{self._id_prefix}{next(self._count):08x}"
        request.gate, request.surface = self._gate, "kserve"
        left = context.time_remaining()
        timeout = choose_timeout(request.headers.get(b"x-request-timeout"), self._options.generate_timeout_s)
        request.deadline = now + (timeout if left is None else min(left, timeout))
        return request

    def _begin_span(self, request: Request, *, quiet: bool = False) -> RequestSpan | None:
        if quiet or self._log is None or self._log.tracer is None:
            return None
        trusted = self._gate.trusts_trace(request)
        span = self._log.tracer.begin_request(
            "POST", request.path, request.headers, request.started, grpc=True, trusted=trusted
        )
        request.trace = span.trace
        return span

    def _finish(self, request: Request, status: int, span: RequestSpan | None, *, quiet: bool = False) -> None:
        log_request(request, status, quiet=quiet)
        if self._log is not None and not quiet:
            record_request(self._log, request, status, span)

    def _admit(self, request: Request, metadata: _Metadata, access: Access) -> None:
        check_repeated(metadata, self._client_header)
        request.client, request.key_class = self._gate.admit(request, access)

    async def _repeat(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        try:
            return await call()
        except ModelNotReady as error:
            return await repeat_until_answered(self._gateway, request.deadline, call, error)

    @contextmanager
    def _hold(self, size: int) -> Iterator[None]:
        """Count the bytes of a request while it is answered. Raises Overloaded if all together are too many."""
        self._held.add(0, size)
        try:
            yield
        finally:
            self._held.remove(size)

    def _report_error(self, request: Request, error: Exception) -> ShoalError:
        if isinstance(error, ShoalError):
            request.error = error.kind
            if not request.is_handed_over:
                self._gateway.report_refusal(error, request.surface)
        return to_public_error(error, request.id, request.path)

    async def _check_health(self, _: AsyncIterator[bytes], context: _Context) -> bytes:
        message = b""
        if self._health_reads < MAX_HEALTH_READS:
            self._health_reads += 1
            try:
                message = await context.read()
            finally:
                self._health_reads -= 1
        if message and message not in _HEALTH_REQUESTS:
            await context.abort(_Code.NOT_FOUND, "only the whole server has a health: leave out 'service'")
        return _SERVING if self._gateway.ready() else _NOT_SERVING

    async def _server_live(self, request: Request, message: Any) -> Message:
        return pb.ServerLiveResponse(live=True)

    async def _server_ready(self, request: Request, message: Any) -> Message:
        return pb.ServerReadyResponse(ready=self._gateway.ready())

    async def _server_metadata(self, request: Request, message: Any) -> Message:
        return _fill(pb.ServerMetadataResponse(), repository.describe_server())

    async def _model_ready(self, request: Request, message: Any) -> Message:
        try:
            ready = repository.is_ready(self._gateway, message.name, message.version)
        except ModelNotFound:
            ready = False
        return pb.ModelReadyResponse(ready=ready)

    async def _model_metadata(self, request: Request, message: Any) -> Message:
        described = build_metadata(*await self._inference.describe(request, message.name, message.version))
        return _fill(pb.ModelMetadataResponse(), described)

    async def _model_config(self, request: Request, message: Any) -> Message:
        described = build_config(*await self._inference.describe(request, message.name, message.version))
        return _fill(pb.ModelConfigResponse(), {"config": described})

    async def _model_statistics(self, request: Request, message: Any) -> Message:
        found = await repository.list_statistics(self._gateway, message.name, message.version)
        return _fill(pb.ModelStatisticsResponse(), {"model_stats": found})

    async def _repository_index(self, request: Request, message: Any) -> Message:
        entries = await repository.list_index(self._gateway, ready=message.ready)
        return _fill(pb.RepositoryIndexResponse(), {"models": entries})

    async def _load(self, request: Request, message: Any) -> Message:
        await repository.load_model(self._gateway, request, message.model_name, list(message.parameters))
        return pb.RepositoryModelLoadResponse()

    async def _unload(self, request: Request, message: Any) -> Message:
        await repository.unload_model(self._gateway, request, message.model_name)
        return pb.RepositoryModelUnloadResponse()

    async def _model_infer(self, request: Request, message: Any) -> Message:
        return to_message(await self._inference.infer(request, read_request(message)))

    async def _stream_infer(self, messages: AsyncIterator[bytes], context: _Context) -> None:
        """Answer the requests of a stream concurrently. An error is a response; it does not end the stream.

        Single responses come in the order of their requests, those of streaming models as they are generated.
        """
        path = SERVICE + "ModelStreamInfer"
        metadata = _read_metadata(context)
        caller = self._open_request(path, context, metadata)
        try:
            self._admit(caller, metadata, "user")
        except Exception as error:  # as in a call with one response
            public = self._report_error(caller, error)
            self._finish(caller, status_codes.status(public), self._begin_span(caller))
            await _abort(context, public)
        stream = ResponseStream(context)
        async with asyncio.TaskGroup() as tasks, aclosing(self._read_messages(messages, stream)) as received:
            async for data in received:
                request = self._open_request(path, context, metadata)
                request.client, request.key_class = caller.client, caller.key_class
                answering = self._answer_streamed(request, data, stream, stream.take_turn())
                stream.running += 1
                tasks.create_task(answering).add_done_callback(stream.count_answered)

    async def _read_messages(self, messages: AsyncIterator[bytes], stream: ResponseStream) -> AsyncGenerator[bytes]:
        """Yield the messages of a stream, until the client half-closes it or the server shuts down."""
        upcoming: asyncio.Future[bytes] | None = None
        try:
            while not self._gateway.draining:
                while stream.running >= MAX_STREAM_REQUESTS:
                    await stream.wait_for_answer()
                upcoming = upcoming or asyncio.ensure_future(anext(messages))
                await asyncio.wait({upcoming}, timeout=POLL_S)
                if upcoming.done():
                    found, upcoming = upcoming, None
                    yield found.result()
        except StopAsyncIteration:
            return
        finally:
            if upcoming is not None:
                upcoming.cancel()

    async def _answer_streamed(self, request: Request, data: bytes, stream: ResponseStream, turn: Turn) -> None:
        status = 200
        span = self._begin_span(request)
        message = pb.ModelInferRequest()
        try:
            message = parse(pb.ModelInferRequest, data)
            with self._hold(len(data)):
                await self._send_responses(request, message, stream, turn)
        except asyncio.CancelledError:
            status = 499
            raise
        except Exception as error:  # as in a call with one response
            public = self._report_error(request, error)
            status = status_codes.status(public)
            await turn.wait()
            await stream.send_error(message, _shorten(public.message))
        finally:
            turn.pass_on()
            self._finish(request, status, span)

    async def _send_responses(self, request: Request, message: Any, stream: ResponseStream, turn: Turn) -> None:
        job = await self._repeat(request, partial(self._inference.prepare, request, read_request(message)))
        wants_empty = job.is_decoupled and read_parameter(message.parameters.get(EMPTY_FINAL)) is True
        if job.streams:
            turn.pass_on()
        async with aclosing(self._inference.respond(request, job)) as responses:
            async for response in responses:
                if not job.streams:
                    await turn.wait()
                await stream.send(response, final=response.final and not wants_empty)
        if wants_empty:
            await stream.send(InferResponse(model=job.model, id=job.id, outputs=[]), final=True)


def _fill(message: Message, content: object) -> Message:
    """Return the message with the content that REST sends as JSON."""
    return json_format.ParseDict(msgspec.to_builtins(content), message)


async def _receive(context: _Context) -> bytes:
    """Return the only message of a call."""
    data = await context.read()
    if data is grpc.aio.EOF:
        raise Malformed("the call has no message; send one")
    return data  # type: ignore[no-any-return]


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


async def _abort(context: _Context, error: ShoalError) -> NoReturn:
    """End a call with an error, by raising gRPC's own."""
    # Headers first: of a status that comes without, Caddy 2.6 makes an answer without a status one time in ten.
    await context.send_initial_metadata(())
    await context.abort(to_code(error), _shorten(error.message), _retry_metadata(error))
    raise AssertionError("abort raises")


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARACTERS else f"{text[:MAX_ERROR_CHARACTERS]}..."


def _retry_metadata(error: ShoalError) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata of an error: the time after which a retry may succeed."""
    headers = status_codes.headers(error, status_codes.status(error))
    return tuple((name, value) for name, value in headers.items() if name == "retry-after")


def _read_metadata(context: _Context) -> _Metadata:
    """Return the metadata of a call in the form of HTTP headers."""
    pairs = context.invocation_metadata() or ()
    return [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in pairs]


def _peer_address(peer: str) -> str:
    """Return the address of gRPC's name for a peer. A Unix socket, which its file's permissions guard, is local."""
    kind, _, place = peer.partition(":")
    if kind == "unix":
        return "127.0.0.1"
    return unquote(place).rpartition(":")[0].strip("[]")
