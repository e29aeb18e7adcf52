"""A connection to one Triton server: the calls that Shoal uses, over grpc.aio.

Source: the KServe v2 gRPC protocol with Triton's extensions. Every call takes an absolute `deadline` in seconds of
`time.monotonic()` and raises only ShoalErrors, mapped by `errors.py`. Cancelling a call cancels it on the server too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from shoal.backends.base.grpc_channel import CHANNEL_OPTIONS, ChannelOptions
from shoal.backends.triton.errors import infer_error, rpc_error
from shoal.backends.triton.infer_stream import InferStream
from shoal.core.closing import close_all
from shoal.core.recording import outgoing_trace
from shoal.errors import DeadlineExceeded, TransportFailed
from shoal.kserve import EMPTY_FINAL, SERVICE
from shoal.kserve import protocol_pb2 as pb

LONG_CALLS = 80
"""Maximum concurrent streams on one connection: HTTP/2 servers and proxies often allow 100 calls and queue further ones
silently. The other 20 are left for short calls."""

OPTIONS: ChannelOptions = (
    *CHANNEL_OPTIONS,
    ("grpc.max_receive_message_length", -1),
    ("grpc.min_reconnect_backoff_ms", 1000),
    # Triton closes connections that ping more often than every 5 minutes without data, or at all without calls. The
    # timeout also bounds how long sent bytes may stay unacknowledged, which detects a lost host.
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 2),
)

R = TypeVar("R", bound=Message)
Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM bytes: `ca` of the server certificate's issuer (None: the public ones), `cert` and `key` of Shoal's own if
    the server requires them (mTLS)."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None


def grpc_target(target: str) -> str:
    """Return gRPC's name for a target: host:port unchanged, the path of a Unix socket with `unix:`."""
    return f"unix:{target}" if target.startswith("/") else target


class Client:
    """The calls of one server at `target`: host:port, or the path of a Unix socket. It connects on the first call.

    `metadata` is sent with every call. After `aclose` every call raises TransportFailed.
    """

    def __init__(self, target: str, *, tls: Tls | None = None, metadata: Metadata = ()) -> None:
        self.target = target
        self._tls = tls
        self._metadata = tuple(metadata) or None
        self._channel: grpc.aio.Channel | None = None
        self._calls: dict[str, Callable[..., Any]] = {}
        self._extra_clients: list[Client] = []
        self._long_calls = 0
        self._closed = False

    async def infer(self, request: pb.ModelInferRequest, deadline: float) -> pb.ModelInferResponse:
        """Send one batch and return the response. Raises only what `Engine.infer` may raise."""
        call = self._calls.get("ModelInfer") or self._get_callable("ModelInfer", pb.ModelInferResponse)
        timeout = deadline - time.monotonic()
        if timeout <= 0:
            raise DeadlineExceeded("the request's deadline passed before it was sent to Triton")
        try:
            return await call(request, timeout=timeout, metadata=self._call_metadata())  # type: ignore[no-any-return]
        except grpc.aio.AioRpcError as error:
            raise infer_error(error) from error
        except asyncio.CancelledError as error:
            self._check_open(error)
            raise

    @contextmanager
    def long_call(self) -> Iterator[Client]:
        """Yield a connection with room for a long call: this one or, if it has LONG_CALLS already, a further one kept
        for reuse."""
        line = next((each for each in (self, *self._extra_clients) if each._long_calls < LONG_CALLS), None)
        if line is None:
            line = Client(self.target, tls=self._tls, metadata=self._metadata or ())
            self._extra_clients.append(line)
        line._long_calls += 1
        try:
            yield line
        finally:
            line._long_calls -= 1

    def stream_infer(self, request: pb.ModelInferRequest, deadline: float) -> InferStream:
        """Send one request on its own stream and return the stream of its responses, which the caller closes.

        Raises as the other calls do, and TransportFailed if the connection breaks in mid-stream.
        """
        request.parameters[EMPTY_FINAL].bool_param = True
        with ExitStack() as line:
            call = line.enter_context(self.long_call())._stream_call(request, deadline)
            return InferStream(call, self._check_open, line.pop_all().close)

    async def server_live(self, *, deadline: float) -> bool:
        """Return whether the server is up. ServerReady would be False after any model failed to load."""
        return (await self.unary("ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse, deadline)).live

    async def model_ready(self, name: str, version: str = "", *, deadline: float) -> bool:
        """Return whether the model is ready; False for an unknown model."""
        request = pb.ModelReadyRequest(name=name, version=version)
        return (await self.unary("ModelReady", request, pb.ModelReadyResponse, deadline)).ready

    async def model_metadata(self, name: str, version: str = "", *, deadline: float) -> pb.ModelMetadataResponse:
        request = pb.ModelMetadataRequest(name=name, version=version)
        return await self.unary("ModelMetadata", request, pb.ModelMetadataResponse, deadline)

    async def model_config(self, name: str, version: str = "", *, deadline: float) -> pb.ModelConfig:
        request = pb.ModelConfigRequest(name=name, version=version)
        return (await self.unary("ModelConfig", request, pb.ModelConfigResponse, deadline)).config

    async def model_statistics(
        self, name: str = "", version: str = "", *, deadline: float
    ) -> pb.ModelStatisticsResponse:
        """Return the statistics of one model, of all models if `name` is empty."""
        request = pb.ModelStatisticsRequest(name=name, version=version)
        return await self.unary("ModelStatistics", request, pb.ModelStatisticsResponse, deadline)

    async def repository_index(self, *, deadline: float) -> pb.RepositoryIndexResponse:
        return await self.unary("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse, deadline)

    async def repository_model_load(self, request: pb.RepositoryModelLoadRequest, *, deadline: float) -> None:
        await self.unary("RepositoryModelLoad", request, pb.RepositoryModelLoadResponse, deadline)

    async def repository_model_unload(self, name: str, *, dependents: bool = False, deadline: float) -> None:
        """Start to unload a model. The server answers before it is done, and for an unknown model too."""
        request = pb.RepositoryModelUnloadRequest(model_name=name)
        request.parameters["unload_dependents"].bool_param = dependents
        await self.unary("RepositoryModelUnload", request, pb.RepositoryModelUnloadResponse, deadline)

    async def unary(self, name: str, request: Message, kind: type[R], deadline: float) -> R:
        """Call any RPC with one response, by its name; `kind` is the type of the response."""
        call = self._get_callable(name, kind)
        try:
            answer: R = await call(request, timeout=_remaining(deadline), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error) from error
        except asyncio.CancelledError as error:
            self._check_open(error)
            raise
        return answer

    async def aclose(self) -> None:
        """Cancel the calls in flight and close the connection. Idempotent."""
        self._closed = True
        channel, self._channel = self._channel, None
        self._calls = {}
        more, self._extra_clients = self._extra_clients, []
        own = (channel.close,) if channel is not None else ()
        await close_all(*own, *(each.aclose for each in more))

    def _stream_call(self, request: pb.ModelInferRequest, deadline: float) -> Any:
        call = self._get_callable("ModelStreamInfer", pb.ModelStreamInferResponse)
        return call(request, timeout=_remaining(deadline), metadata=self._call_metadata())

    def _call_metadata(self) -> Metadata | None:
        trace = outgoing_trace()
        return (*(self._metadata or ()), *trace) if trace else self._metadata

    def _get_callable(self, name: str, kind: type[Message]) -> Callable[..., Any]:
        """Return the callable of an RPC with a response of type `kind`, created once."""
        found = self._calls.get(name)
        if found is not None:
            return found
        if self._closed:
            raise TransportFailed(f"the connection to {self.target} is closed")
        channel = self._channel
        if channel is None:
            channel = self._channel = self._connect()
        if name == "ModelStreamInfer":
            # One request, then half-closed: a server that never marks a response as final ends the stream instead. On
            # the wire this equals stream_stream, but it is sent at once and without a task for the requests.
            found = channel.unary_stream(SERVICE + name, _serialize, _decode_stream_response)
        else:
            found = channel.unary_unary(SERVICE + name, _serialize, kind.FromString)
        self._calls[name] = found
        return found

    def _connect(self) -> grpc.aio.Channel:
        target = grpc_target(self.target)
        if self._tls is None:
            return grpc.aio.insecure_channel(target, options=OPTIONS)
        credentials = grpc.ssl_channel_credentials(self._tls.ca, self._tls.key, self._tls.cert)
        return grpc.aio.secure_channel(target, credentials, options=OPTIONS)

    def _check_open(self, error: asyncio.CancelledError) -> None:
        """Raise TransportFailed if the call was cancelled only because its channel was closed, as gRPC does."""
        task = asyncio.current_task()
        if self._closed and (task is None or not task.cancelling()):
            raise TransportFailed(f"the connection to {self.target} was closed: send the request again") from error


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _decode_stream_response(data: bytes) -> pb.ModelStreamInferResponse:
    """Decode a response of a stream. Triton wraps it; MLServer sends a plain ModelInferResponse, whose model name
    decodes as an error message. Only the plain one has outputs at its top level."""
    try:
        answer = pb.ModelStreamInferResponse.FromString(data)
        if not answer.error_message:
            return answer
    except DecodeError:
        answer = pb.ModelStreamInferResponse(error_message="the server streamed an invalid KServe v2 response")
    try:
        plain = pb.ModelInferResponse.FromString(data)
    except DecodeError:
        return answer
    return pb.ModelStreamInferResponse(infer_response=plain) if plain.outputs else answer


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise DeadlineExceeded("the deadline passed before the call to Triton was sent")
    return remaining
