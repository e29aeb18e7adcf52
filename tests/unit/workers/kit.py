"""A model process and its fronts in one event loop, over a real Unix socket."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from shoal.core.gateway import Gateway
from shoal.core.protocols import Observer
from shoal.core.registry import Model, Registry
from shoal.types import Context, Embed, Generate
from shoal.workers import messages
from shoal.workers.front import ModelProcess, RemoteGateway, Reporter, Tokenizers
from shoal.workers.messages import ModelState
from shoal.workers.models import ModelServer
from tests.unit.core.runners import Embedder

PATIENCE_S = 30.0
CONTEXT = Context(id="r", deadline=math.inf)
EMBED = Embed(model="m", inputs=["a"])


def generate(words: int) -> Generate:
    return Generate(model="m", prompts=[" ".join(str(word) for word in range(words))], stream=True)


async def until(true: Callable[[], bool]) -> None:
    """Let the loop run until something is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


def build_gateway(*models: Model, observer: Observer | None = None) -> Gateway:
    registry = Registry()
    for model in models:
        registry.add(model)
    return Gateway(registry, observer)


def build_model(runner: Embedder | None = None, name: str = "m", **fields: Any) -> Model:
    """Return a ready model, or one that is loading if it has no runner."""
    model = Model(name=name, **fields)
    if runner is not None:
        model.mark_loaded(runner)
    return model


async def answer_nothing(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("no request was expected")


class RefusalObserver(Observer):
    """Collects the reasons of refusals."""

    def __init__(self, refusals: list[str]) -> None:
        self._refusals = refusals

    def refused(self, reason: str, surface: str = "") -> None:
        self._refusals.append(f"{surface} {reason}")


class NoRemoteModels:
    """No model is on another server."""

    def update(self, states: Sequence[ModelState]) -> None: ...

    def find(self, name: str) -> Model | None:
        return None


class ModelEnd:
    """A model process: its server, and what its fronts reported."""

    def __init__(self, gateway: Gateway, path: Path, asgi: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        self.gateway = gateway
        self.path = path
        self.refusals: list[str] = []
        self.lags: list[float] = []
        self.stop = asyncio.Event()
        self.server = ModelServer(
            gateway,
            asgi,
            observer=RefusalObserver(self.refusals),
            record_lag=self.lags.append,
            describe_remote=lambda model: b"",
        )
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        self.done = asyncio.create_task(self.server.run(listener, self.stop, PATIENCE_S))


@asynccontextmanager
async def model_end(
    gateway: Gateway, path: Path, asgi: Callable[[Any, Any, Any], Awaitable[None]] = answer_nothing
) -> AsyncIterator[ModelEnd]:
    """Run a model process. At the end it ends as a killed one: its links close."""
    end = ModelEnd(gateway, path, asgi)
    try:
        yield end
    finally:
        end.done.cancel()
        await asyncio.wait([end.done])
        os.unlink(path)


@asynccontextmanager
async def front(path: Path, tokenizers: Tokenizers | None = None) -> AsyncIterator[RemoteGateway]:
    """Run a front, which need not be connected yet."""
    process = ModelProcess(str(path))
    gateway = RemoteGateway(process, Reporter(process.notify), tokenizers=tokenizers)
    connecting = asyncio.create_task(gateway.connect(NoRemoteModels()))
    try:
        yield gateway
    finally:
        connecting.cancel()
        await asyncio.wait([connecting])


def is_connected(gateway: RemoteGateway) -> bool:
    return "the process of the models" not in gateway.pending_sources


@asynccontextmanager
async def pair(
    gateway: Gateway, path: Path, asgi: Callable[[Any, Any, Any], Awaitable[None]] = answer_nothing
) -> AsyncIterator[tuple[RemoteGateway, ModelEnd]]:
    """Run a model process and a front that is connected to it."""
    async with AsyncExitStack() as stack:
        end = await stack.enter_async_context(model_end(gateway, path, asgi))
        remote = await stack.enter_async_context(front(path))
        await until(lambda: is_connected(remote))
        yield remote, end


class RawEnd:
    """One end of a connection whose messages a test writes and reads itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: Any) -> None:
        self._reader = reader
        self.writer = writer
        self._decoder = decoder

    async def read(self) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            (length,) = struct.unpack(">I", await self._reader.readexactly(4))
            return self._decoder.decode(await self._reader.readexactly(length))

    def write(self, *sent: Any) -> None:
        """Write messages in one piece."""
        encoded = [messages.encode(message) for message in sent]
        self.writer.write(b"".join(struct.pack(">I", len(data)) + data for data in encoded))

    async def has_ended(self) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.read() == b""


@asynccontextmanager
async def raw_front(path: Path) -> AsyncIterator[RawEnd]:
    """Connect to a model process as a front."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        yield RawEnd(reader, writer, messages.decoder_to_front())
    finally:
        writer.close()


@asynccontextmanager
async def raw_models(path: Path) -> AsyncIterator[asyncio.Queue[RawEnd]]:
    """Listen as a model process; each front that connects is in the queue, after its Hello."""
    ends: asyncio.Queue[RawEnd] = asyncio.Queue()
    opened: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        end = RawEnd(reader, writer, messages.decoder_from_front())
        assert isinstance(await end.read(), messages.Hello)
        ends.put_nowait(end)

    server = await asyncio.start_unix_server(accept, str(path))
    try:
        yield ends
    finally:
        for writer in opened:
            writer.close()
        server.close()
