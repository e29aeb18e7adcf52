"""Link to a text-embeddings-inference server over gRPC: each batch is one stream, with one message per input.

Source: proto/tei.proto and router/src/grpc/server.rs of huggingface/text-embeddings-inference. Streams answer in
message order and wait for permits, while single calls without a permit are rejected; an item's error ends its stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from msgspec.structs import replace

from shoal.backends.base.grpc_channel import CHANNEL_OPTIONS, ChannelOptions
from shoal.backends.base.http_client import MAX_ANSWER_BYTES, MAX_CARD_BYTES
from shoal.backends.base.response_limit import MAX_VECTOR_WIDTH
from shoal.backends.tei import grpc_messages as messages
from shoal.backends.tei import tei_pb2 as pb
from shoal.backends.tei.grpc_errors import status_error
from shoal.backends.tei.info import DTYPES, Info
from shoal.backends.tei.link import ExpectedShape, KeyRefused, Rows, TokenWire
from shoal.core.recording import outgoing_trace
from shoal.errors import (
    BackendError,
    CapacityError,
    ConfigError,
    DeadlineExceeded,
    InputRejected,
    InternalError,
    TransportFailed,
    UpstreamFailed,
)

INFO = "/tei.v1.Info/Info"
HEALTH = "/grpc.health.v1.Health/Check"
HEALTHY = "tei.v1.{}"
"""Service name in health checks: the API that the model uses. A server without health checks counts as healthy."""

PORTS = {False: 80, True: 443}
"""Default ports without and with TLS, as for HTTP."""

PROBE_TEXT = "a"
"""Input of the calls that discover the facts missing from the server's info."""

MOST_LABELS_BYTES = 2**20

OPTIONS: ChannelOptions = (*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", MAX_ANSWER_BYTES))
"""No keepalive pings: the health checks detect a lost host."""

M = TypeVar("M", bound=Message)


class GrpcLink:
    """Link to the gRPC build at `target` (host[:port]). It connects with the first call. Token counts are per input.

    Unlike the info of the HTTP build, this one has neither the sparsity of vectors nor a classifier's labels. Calls of
    the model discover both; labels named LABEL_0, LABEL_1, ... are then sorted by number, others alphabetically. The
    info has no `auto_truncate` either, and calls ignore it: Shoal's own setting applies.

    `roots`: PEM bytes of the CA certificates that replace gRPC's defaults. Raises ConfigError for a key that is not
    valid in a header.
    """

    def __init__(
        self,
        target: str,
        *,
        key: str | None = None,
        tls: bool = False,
        roots: bytes | None = None,
        connect_timeout_s: float = 5.0,
    ) -> None:
        if key and not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError("upstream_api_key is not valid in a header: use ASCII characters without spaces")
        self.base = f"grpc{'s' if tls else ''}://{target}"
        named = target.rpartition("]")[2].rpartition(":")[1]
        self._target = target if named else f"{target}:{PORTS[tls]}"
        self._key = key or ""
        self._metadata = (("authorization", f"Bearer {key}"),) if key else None
        self._credentials = grpc.ssl_channel_credentials(roots) if tls else None
        # This option also limits the time of a connection attempt.
        self._options = (*OPTIONS, ("grpc.min_reconnect_backoff_ms", max(1, int(connect_timeout_s * 1000))))
        self._channel: grpc.aio.Channel | None = None
        self._calls: dict[str, Callable[..., Any]] = {}
        self._known_info: tuple[pb.InfoResponse, Info] | None = None
        self._closed = False

    async def info(self, deadline: float) -> Info:
        try:
            card = await self._call_unary(INFO, pb.InfoRequest(), pb.InfoResponse, deadline)
            if self._known_info is None or self._known_info[0] != card:
                self._known_info = card, await self._read_info(card, deadline)
            return self._known_info[1]
        except KeyRefused as error:
            raise ConfigError(error.message) from None
        except (TransportFailed, DeadlineExceeded, UpstreamFailed):
            raise
        except (BackendError, CapacityError) as error:
            raise UpstreamFailed(f"the server at {self.base} does not report its model: {error.message}") from error

    async def check_health(self, seconds: float) -> Info:
        info = await self.info(time.monotonic() + seconds)
        part = HEALTHY.format("Embed" if info.embeds else "Predict")
        request = pb.HealthCheckRequest(service=part)
        try:
            found = await self._call_unary(HEALTH, request, pb.HealthCheckResponse, time.monotonic() + seconds)
        except UpstreamFailed:  # a proxy forwards the API but no health checks: the info is enough
            return info
        if found.status == pb.HealthCheckResponse.NOT_SERVING:
            raise TransportFailed(f"the server at {self.base} reports that its model is not healthy")
        return info

    async def rows(
        self, name: str, items: Sequence[Any], params: Mapping[str, Any], deadline: float, shape: ExpectedShape
    ) -> Rows:
        texts = items
        if any(isinstance(item, list) for item in items):
            texts = await self._as_texts(items, deadline)
        requests = messages.build_requests(name, texts, params)
        stream = messages.STREAMS[name]
        found = await self._call_stream(stream, requests, deadline, messages.max_message_bytes(name, shape))
        array = await messages.to_array(name, found, shape, self.base)
        return array, messages.count_tokens(found, items)

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None, deadline: float
    ) -> list[list[TokenWire]]:
        options = {"prompt_name": prompt_name} if prompt_name else {}
        try:
            requests = [
                pb.EncodeRequest(inputs=text, add_special_tokens=add_special_tokens, **options) for text in texts
            ]
        except ValueError as error:  # a lone surrogate
            raise InputRejected(f"the text cannot be sent to the model's server: {error}") from None
        longest = max((request.ByteSize() for request in requests), default=0)
        max_bytes = messages.INPUT_BYTES + messages.SIZE_BYTES * longest
        return [
            messages.to_tokens(each)
            for each in await self._call_stream(messages.TOKENIZE, requests, deadline, max_bytes)
        ]

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool, deadline: float) -> list[str]:
        try:
            requests = [pb.DecodeRequest(ids=some, skip_special_tokens=skip_special_tokens) for some in ids]
        except ValueError as error:  # an id of more than 32 bits
            raise InputRejected(f"invalid token ids: {error}") from None
        max_bytes = messages.INPUT_BYTES + messages.SIZE_BYTES * max(map(len, ids), default=0)
        return [each.text for each in await self._call_stream(messages.DECODE, requests, deadline, max_bytes)]

    def _call_metadata(self) -> tuple[tuple[str, str], ...] | None:
        return (*(self._metadata or ()), *outgoing_trace()) or None

    async def aclose(self) -> None:
        """Abort the calls in flight and close the connection. Later calls do nothing."""
        self._closed = True
        channel, self._channel = self._channel, None
        self._calls = {}
        if channel is not None:
            await channel.close()

    async def _as_texts(self, items: Sequence[Any], deadline: float) -> list[str]:
        """Decode items of token ids to text, since this protocol takes no ids. Special tokens are dropped, because the
        server adds its own."""
        ids = [item for item in items if not isinstance(item, str)]
        texts = iter(await self.decode(ids, skip_special_tokens=True, deadline=deadline))
        return [item if isinstance(item, str) else next(texts) for item in items]

    async def _read_info(self, card: pb.InfoResponse, deadline: float) -> Info:
        """Return the server's info, completed by calls of the model."""
        info = Info(
            kind="embedding",
            model_id=card.model_id,
            revision=card.model_sha,
            dtype=DTYPES.get(card.model_dtype, card.model_dtype),
            max_input_length=card.max_input_length or None,
            max_batch_tokens=card.max_batch_tokens or 16384,
            max_client_batch_size=card.max_client_batch_size or 32,
            max_concurrent_requests=card.max_concurrent_requests or 512,
            auto_truncate=True,
            version=card.version,
        )
        if card.model_type == pb.MODEL_TYPE_EMBEDDING:
            sparse = await self._is_splade(deadline)
            return replace(info, kind="splade", pooling="splade") if sparse else info
        if card.model_type not in (pb.MODEL_TYPE_CLASSIFIER, pb.MODEL_TYPE_RERANKER):
            raise ConfigError(f"the server at {self.base} has a kind of model that this version of Shoal does not know")
        labels = await self._labels(deadline)
        return replace(info, kind="reranker" if len(labels) == 1 else "classifier", labels=labels)

    async def _is_splade(self, deadline: float) -> bool:
        requests = messages.build_requests("embedding", [PROBE_TEXT], {"normalize": True})
        try:
            await self._call_stream(messages.EMBED, requests, deadline, messages.SPARE_BYTES + 4 * MAX_VECTOR_WIDTH)
        except UpstreamFailed as error:
            if "splade" in error.message.lower():
                return True
            raise
        return False

    async def _labels(self, deadline: float) -> tuple[str, ...]:
        requests = messages.build_requests("scores", [PROBE_TEXT], {})
        (answer,) = await self._call_stream(messages.PREDICT, requests, deadline, MOST_LABELS_BYTES)
        labels = sorted((each.label for each in answer.predictions), key=_label_order)
        if len(set(labels)) < len(labels):
            raise ConfigError(
                f"the model at {self.base} has several classes with the same name, which its answers do not"
                " distinguish: give each a unique name in the model's config.json"
            )
        if not labels:
            raise UpstreamFailed(f"the server at {self.base} returned no scores")
        return tuple(labels)

    async def _call_stream(
        self, stream: messages.Stream, requests: Sequence[Message], deadline: float, max_bytes: int
    ) -> list[Any]:
        """Return one answer per request, each of at most `max_bytes` bytes, all of at most MAX_ANSWER_BYTES. If this
        call ends early, the stream is cancelled on the server too."""
        # Requests are sent while answers are read: a server that writes before it reads on would otherwise deadlock.
        call = self._get_callable(stream.path, streams=True)(
            requests, timeout=self._remaining(deadline), metadata=self._call_metadata()
        )
        statuses: list[tuple[grpc.StatusCode, str]] = []
        call.add_done_callback(lambda ended: statuses.append(_status_of(ended)))
        found: list[Any] = []
        size = 0
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                size += len(data)
                if len(found) == len(requests) or len(data) > max_bytes or size > MAX_ANSWER_BYTES:
                    raise UpstreamFailed(
                        f"the server at {self.base} returned more rows or bytes than the limit for this request: send"
                        " fewer inputs at once"
                    )
                found.append(stream.answer.FromString(data))
        except grpc.aio.AioRpcError as error:
            # Reading a stream that ended during a write gives INTERNAL; the first status is the server's.
            raise self._to_error(*(statuses or [(error.code(), error.details() or "")])[0]) from error
        except DecodeError as error:
            raise UpstreamFailed(f"the server at {self.base} returned an invalid response: {error}") from None
        except asyncio.CancelledError as error:
            self._check_open(error)
            raise
        finally:
            call.cancel()
        if len(found) < len(requests):
            raise UpstreamFailed(f"the server at {self.base} returned {len(found)} rows for {len(requests)} inputs")
        return found

    async def _call_unary(self, path: str, request: Message, kind: type[M], deadline: float) -> M:
        """Call an RPC with one answer."""
        try:
            call = self._get_callable(path)
            data = await call(request, timeout=self._remaining(deadline), metadata=self._call_metadata())
            if len(data) > MAX_CARD_BYTES:
                raise UpstreamFailed(f"the server at {self.base} returned more than {MAX_CARD_BYTES} bytes")
            return kind.FromString(data)
        except grpc.aio.AioRpcError as error:
            if path == INFO and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise ConfigError(
                    f"{self.base} is not a gRPC server of text-embeddings-inference: check the address (the HTTP build"
                    " is tei+http://HOST:PORT)"
                ) from None
            raise self._to_error(error.code(), error.details() or "") from error
        except DecodeError as error:
            raise ConfigError(f"{self.base} is not text-embeddings-inference ({error}): check the address") from None
        except asyncio.CancelledError as error:
            self._check_open(error)
            raise

    def _get_callable(self, path: str, *, streams: bool = False) -> Callable[..., Any]:
        """Return the cached callable of an RPC. It returns bytes, so that their size is checked before decoding."""
        found = self._calls.get(path)
        if found is not None:
            return found
        if self._closed:
            raise TransportFailed(f"the connection to {self.base} is closed: send the request again")
        if self._channel is None:
            self._channel = self._open_channel()
        made = self._channel.stream_stream if streams else self._channel.unary_unary
        found = self._calls[path] = made(path, messages.encode, None)
        return found

    def _open_channel(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._target, options=self._options)
        return grpc.aio.secure_channel(self._target, self._credentials, options=self._options)

    def _to_error(self, code: grpc.StatusCode, details: str) -> Exception:
        found = status_error(code, details, self.base, key=self._key)
        if isinstance(found, TransportFailed):
            self._known_info = None  # a restarted server may have another model with the same info
        return found

    def _remaining(self, deadline: float) -> float:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceeded(f"the request's deadline passed before it was sent to {self.base}")
        return remaining

    def _check_open(self, error: asyncio.CancelledError) -> None:
        """Raise TransportFailed if the link was closed: gRPC then reports its calls as cancelled, although no
        caller cancelled them."""
        task = asyncio.current_task()
        if self._closed and (task is None or not task.cancelling()):
            raise TransportFailed(f"the connection to {self.base} was closed: send the request again") from error


def _status_of(ended: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status of a finished call, without waiting."""
    return _get_result(ended.code()), _get_result(ended.details()) or ""


def _get_result(answer: Coroutine[Any, Any, Any]) -> Any:
    try:
        answer.send(None)
    except StopIteration as done:
        return done.value
    answer.close()
    raise InternalError("a finished call has no status")


def _label_order(label: str) -> tuple[int, str]:
    """Return a sort key: LABEL_2 before LABEL_10, other names alphabetically."""
    number = label.removeprefix("LABEL_")
    known = number != label and number.isascii() and number.isdigit() and len(number) < 16
    return (int(number) if known else 2**53), label
