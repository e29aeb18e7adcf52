"""The gRPC build of text-embeddings-inference, with the model and the script of the HTTP fake.

    python -m tests.fakes.tei_grpc --grpc-port 8086 --port 8085     its own process; prints --port, for /control
    async with FakeTeiGrpc(Script(delay_ms=20)) as server: ...      or in this one, with gRPC alone

As in the original, streams answer in the order of their messages, each message waits for its own permit, messages with
a permit run concurrently, and an item's error ends its stream. A stream's request is recorded as one Call with the path
of the HTTP build. Of the script's `misbehaves`, "short", "empty" and "labels" are supported; "more" answers one row too
many, "garbage" no message, "ragged" rows of two widths.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from tests.fakes.tei import Call, FakeTei, Refusal, arguments, serve, tokenize_words
from tests.fakes.tei_model import CLS, SEP, Script
from tests.fakes.tei_wire import wire

Code = grpc.StatusCode
CODES = {
    "Validation": Code.INVALID_ARGUMENT,
    "Empty": Code.INVALID_ARGUMENT,
    "Backend": Code.FAILED_PRECONDITION,
    "Tokenizer": Code.FAILED_PRECONDITION,
    "Overloaded": Code.RESOURCE_EXHAUSTED,
    "Unhealthy": Code.UNAVAILABLE,
    "Unauthenticated": Code.UNAUTHENTICATED,
}
STREAMS: dict[str, tuple[str, str, str]] = {
    "/tei.v1.Embed/EmbedStream": ("/embed", "EmbedRequest", "EmbedResponse"),
    "/tei.v1.Embed/EmbedAllStream": ("/embed_all", "EmbedAllRequest", "EmbedAllResponse"),
    "/tei.v1.Embed/EmbedSparseStream": ("/embed_sparse", "EmbedSparseRequest", "EmbedSparseResponse"),
    "/tei.v1.Predict/PredictPairStream": ("/predict", "PredictPairRequest", "PredictResponse"),
    "/tei.v1.Tokenize/TokenizeStream": ("/tokenize", "EncodeRequest", "EncodeResponse"),
    "/tei.v1.Tokenize/DecodeStream": ("/decode", "DecodeRequest", "DecodeResponse"),
}
"""By its path: what it is over HTTP, and its messages."""

OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
)


class FakeTeiGrpc(FakeTei):
    """`grpc_port` is the gRPC port; as its own process the fake also listens on `port`, for /control."""

    def __init__(
        self, script: Script | None = None, *, grpc_port: int = 0, credentials: grpc.ServerCredentials | None = None
    ) -> None:
        super().__init__(script)
        self.grpc_port = grpc_port
        self.metadata: list[dict[str, str]] = []
        self.healthless = False
        """It has no health service."""
        self._credentials = credentials
        self._server: grpc.aio.Server | None = None
        self._ending: asyncio.Task[None] | None = None
        self._freed = asyncio.Condition()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def address(self) -> str:
        return f"tei+grpc://{self.target}"

    async def start(self, port: int = 0) -> None:
        server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers((_Calls(self),))
        address = f"127.0.0.1:{self.grpc_port}"
        if self._credentials is None:
            self.grpc_port = server.add_insecure_port(address)
        else:
            self.grpc_port = server.add_secure_port(address, self._credentials)
        await server.start()
        self._server = server
        if self.alone:
            await super().start(port)

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)
        await super().stop()

    def card(self) -> Any:
        script = self.script
        kind = {"reranker": 2, "classifier": 1}.get(script.kind, 0)
        self.looks += 1
        return wire.InfoResponse(
            version="1.9.3",
            model_id=script.model_id,
            model_sha=script.model_sha or None,
            model_dtype="float32",
            model_type=kind,
            max_concurrent_requests=script.max_concurrent_requests,
            max_input_length=script.max_input_length,
            max_batch_tokens=script.max_batch_tokens,
            max_client_batch_size=script.max_client_batch_size,
            tokenization_workers=4,
        )

    def health(self, part: str) -> Any:
        fits = "Predict" if self.script.kind in ("reranker", "classifier") else "Embed"
        well = part.endswith(f".{fits}") and not self.script.unhealthy
        return wire.HealthCheckResponse(status=1 if well else 2)

    def check_key(self, metadata: dict[str, str]) -> None:
        if self.script.api_key and metadata.get("authorization") != f"Bearer {self.script.api_key}":
            raise Refusal(401, "Unauthenticated", "No valid auth token")

    async def stream(self, path: str, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yield the answers in order. Raises Refusal."""
        call = Call(path, [], {})
        order: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._take(call, requests, order))]
        try:
            with self._count_in_flight():
                while (task := await order.get()) is not None:
                    tasks.append(task)
                    yield await task
            call.status = 200
        except Refusal as refusal:
            call.status = refusal.status
            raise
        except (asyncio.CancelledError, GeneratorExit):
            call.aborted = True
            raise
        finally:
            call.ended = time.time()
            while not order.empty():
                tasks += [each for each in (order.get_nowait(),) if each is not None]
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, call: Call, requests: AsyncIterator[Any], order: asyncio.Queue[Any]) -> None:
        async for request in requests:
            item, options = _read(request)
            call.inputs.append(item)
            call.options = options
            permit = call.path not in ("/tokenize", "/decode")
            order.put_nowait(asyncio.create_task(self._item(Call(call.path, [item], options), permit)))
            if len(call.inputs) == 1:
                async with self._arrived:
                    self.calls.append(call)
                    self._arrived.notify_all()
        order.put_nowait(None)

    async def _item(self, call: Call, permit: bool) -> Any:
        if not permit:
            return self._run_tokenizer(call)
        async with self._freed:
            await self._freed.wait_for(lambda: self._permits < self.script.max_concurrent_requests)
            self._permits += 1
            self.most_permits = max(self.most_permits, self._permits)
        try:
            self._check_kind(call)
            item, ids = self._read(call.inputs[0], call.options)
            await self._work(call.inputs, self)
            if self._ending is not None:
                await asyncio.Event().wait()  # all connections are broken, so no answer is sent
            (row,) = self._rows(call, [(item, ids)])
            return _encode_answer(call.path, row, len(ids))
        finally:
            self._permits -= 1
            async with self._freed:
                self._freed.notify_all()

    def abort(self) -> None:
        """Break every connection, as a crash does."""
        self._ending = asyncio.create_task(self.stop())

    def _run_tokenizer(self, call: Call) -> Any:
        (ids,), options = call.inputs, call.options
        if not ids:
            raise Refusal(400, "Empty", "Input validation error: `inputs` cannot be empty")
        if call.path == "/decode":
            skip = {CLS, SEP} if options["skip_special_tokens"] else set()
            return wire.DecodeResponse(text=" ".join(f"w{one}" for one in ids if one not in skip))
        text = self._add_prompt(ids, options.get("prompt_name"))
        tokens = [wire.SimpleToken(**each) for each in tokenize_words(text, options["add_special_tokens"])]
        return wire.EncodeResponse(tokens=tokens)

    @contextmanager
    def _count_in_flight(self) -> Iterator[None]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            yield
        finally:
            self.in_flight -= 1


def _read(request: Any) -> tuple[Any, dict[str, Any]]:
    """Return (item, given options), in the form of the HTTP build."""
    if hasattr(request, "ids"):
        return list(request.ids), {"skip_special_tokens": request.skip_special_tokens}
    item = request.inputs
    if not isinstance(item, str):
        item = item[0] if len(item) == 1 else tuple(item)
    options: dict[str, Any] = {}
    for name in ("truncate", "add_special_tokens", "raw_scores"):
        if hasattr(request, name):
            options[name] = getattr(request, name)
    for name in ("prompt_name", "dimensions"):
        if hasattr(request, name) and request.HasField(name):
            options[name] = getattr(request, name)
    if hasattr(request, "normalize"):
        options["normalize"] = request.normalize if request.HasField("normalize") else True
    if getattr(request, "truncation_direction", 0):
        options["truncation_direction"] = "left"
    return item, options


def _encode_answer(path: str, row: Any, tokens: int) -> Any:
    metadata = wire.Metadata(compute_chars=1, compute_tokens=tokens, total_time_ns=10**6)
    if path == "/embed":
        return wire.EmbedResponse(embeddings=row, metadata=metadata)
    if path == "/embed_all":
        vectors = [wire.TokenEmbedding(embeddings=vector) for vector in row]
        return wire.EmbedAllResponse(token_embeddings=vectors, metadata=metadata)
    if path == "/embed_sparse":
        return wire.EmbedSparseResponse(sparse_embeddings=[wire.SparseValue(**each) for each in row], metadata=metadata)
    return wire.PredictResponse(predictions=[wire.Prediction(**each) for each in row], metadata=metadata)


class _Calls(grpc.GenericRpcHandler):
    """The server's side of gRPC: finds the call by its path, and turns Refusal into a status."""

    def __init__(self, fake: FakeTeiGrpc) -> None:
        self._fake = fake

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        path, fake = handler_call_details.method or "", self._fake
        if path == "/tei.v1.Info/Info":
            return self._unary(wire.InfoRequest, lambda _: fake.card())
        if path == "/grpc.health.v1.Health/Check" and not fake.healthless:
            return self._unary(wire.HealthCheckRequest, lambda message: fake.health(message.service), open_=True)
        if path not in STREAMS:
            return None
        http, request, _ = STREAMS[path]

        async def stream(
            requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[bytes]:
            try:
                fake.check_key(self._metadata(context))
                at = -1
                async for answer in fake.stream(http, requests):
                    at += 1
                    for data in _serialize(fake.script.misbehaves, at, answer):
                        yield data
                if fake.script.misbehaves == "more":
                    yield answer.SerializeToString()
            except Refusal as refusal:
                await context.abort(CODES[refusal.kind], refusal.text)

        return grpc.stream_stream_rpc_method_handler(stream, getattr(wire, request).FromString, None)

    def _unary(self, request: Any, answer: Callable[[Any], Message], *, open_: bool = False) -> Any:
        async def unary(message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Message:
            try:
                metadata = self._metadata(context)
                if not open_:
                    self._fake.check_key(metadata)
            except Refusal as refusal:
                await context.abort(CODES[refusal.kind], refusal.text)
            return answer(message)

        return grpc.unary_unary_rpc_method_handler(unary, request.FromString, lambda made: made.SerializeToString())

    def _metadata(self, context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str]:
        found = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        self._fake.metadata.append(found)
        return found


def _serialize(misbehaves: str, at: int, answer: Any) -> Iterator[bytes]:
    """Yield the bytes of an answer, altered if the server misbehaves."""
    if misbehaves == "empty" or (misbehaves == "short" and at == 0):
        return
    if misbehaves == "ragged" and at == 1:
        del answer.embeddings[-1]
    yield b"\xff\xff" if misbehaves == "garbage" else answer.SerializeToString()


def main() -> None:
    script, (port, grpc_port) = arguments(__doc__, "port", "grpc-port")

    async def run() -> None:
        await serve(FakeTeiGrpc(script, grpc_port=grpc_port), port)

    asyncio.run(run())


if __name__ == "__main__":
    main()
