"""An OpenAI-compatible server in this process, scripted byte by byte, with the least HTTP that a client needs.

    async with FakeUpstream() as server:
        server.on("/chat/completions", stream(b'data: {"choices":[]}\n\n', DONE))
        client = Client(server.base)

By default GET /models lists `models`, and POST /embeddings answers `vector_of` each text, or list of ids if `ids` is
true. `requests` records the requests in order, and when their callers disconnect. A path of `on` is below `prefix`, or,
as "root/classify", beside it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import numpy as np

from shoal.types import Vectors
from tests.fakes.closing import close

DONE = b"data: [DONE]\n\n"
DIMENSION = 8


def vector_of(text: Any, dimension: int = DIMENSION, *, seed: int = 0) -> Vectors:
    """Return the vector of a text of any length, as the server's model computes it."""
    draw = np.random.default_rng([seed, zlib.crc32(str(text).encode())])
    return (draw.standard_normal(dimension) * 3).astype(np.float32)


def event(value: Any) -> bytes:
    """Return an event as vLLM and OpenAI write it."""
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def fields_of(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of a request's body, as a surface hands them over."""
    return msgspec.json.decode(body, type=dict[str, msgspec.Raw])


@dataclass
class Request:
    """One received request. `disconnected` is set once its caller closes the connection."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Exchange:
    """A request and the connection to answer it on: `head`, then `piece` by piece, each sent as it is, then `end`."""

    def __init__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        self.request = request
        self.keep = True
        self._writer = writer
        self._chunked = False

    async def head(self, status: int = 200, *, length: int | None = None, **headers: str) -> None:
        """Send the status and headers; `_` in a header's name becomes a dash. Without `length` the body is chunked."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._chunked = length is None
        named |= {"transfer-encoding": "chunked"} if length is None else {"content-length": str(length)}
        lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        await self.raw(f"HTTP/1.1 {status} Scripted\r\n{lines}\r\n".encode())

    async def piece(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def end(self) -> None:
        if self._chunked:
            await self.raw(b"0\r\n\r\n")

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def left(self) -> None:
        """Wait until the caller disconnects."""
        await self.request.disconnected.wait()

    async def cut(self) -> None:
        """Close the connection, whatever was announced."""
        self.keep = False
        self._writer.close()

    def reset(self) -> None:
        """Reset the connection."""
        self.keep = False
        self._writer.transport.abort()


Script = Callable[[Exchange], Awaitable[None]]


def answer(body: Any = b"", status: int = 200, **headers: str) -> Script:
    """Send one answer with a length; anything but bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def run(exchange: Exchange) -> None:
        await exchange.head(status, length=len(data), **{"content_type": "application/json", **headers})
        await exchange.piece(data)

    return run


def stream(*pieces: bytes, after: Script | None = None) -> Script:
    """Send these events one by one, with a turn of the loop each; then run `after`, or end."""

    async def run(exchange: Exchange) -> None:
        await exchange.head(content_type="text/event-stream")
        for piece in pieces:
            await exchange.piece(piece)
            await asyncio.sleep(0)
        await (after or Exchange.end)(exchange)

    return run


class FakeUpstream:
    """The server; its routes are below `prefix`."""

    def __init__(self, *models: str, prefix: str = "/v1", seed: int = 0) -> None:
        self.prefix = prefix
        self.models: list[dict[str, Any]] = [{"id": model, "object": "model"} for model in models or ("up/model",)]
        self.requests: list[Request] = []
        self.connections = 0
        self.port = 0
        self.usage = True
        self.ids = True
        self._seed = seed
        self._scripts: dict[str, Script] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._arrived = asyncio.Condition()

    @property
    def base(self) -> str:
        return f"http://{self.target}"

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}{self.prefix}"

    def on(self, path: str, script: Script) -> None:
        self._scripts[path] = script

    async def request(self, number: int = 1, path: str = "/chat/completions") -> Request:
        """Wait for and return request `number` of a path; Shoal polls /models all the time."""

        def there() -> list[Request]:
            return [one for one in self.requests if one.path == self.prefix + path]

        async with self._arrived:
            await self._arrived.wait_for(lambda: len(there()) >= number)
        return there()[number - 1]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, on the earlier port if there was one."""
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            await close(self._server)
            self._server = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Here, and not at the end of the coroutine, which a task cancelled before its start does not reach.
        task.add_done_callback(lambda _: writer.close())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            ahead = b""
            while True:
                request = await _read(reader, ahead)
                exchange = Exchange(request, writer)
                async with self._arrived:
                    self.requests.append(request)
                    self._arrived.notify_all()
                watch = asyncio.create_task(_watch(reader, request))
                try:
                    await self._script(request)(exchange)
                finally:
                    if not exchange.keep or request.disconnected.is_set():
                        watch.cancel()
                        await asyncio.gather(watch, return_exceptions=True)
                if not exchange.keep or request.disconnected.is_set():
                    return
                ahead = await watch
                if not ahead:
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            return

    def _script(self, request: Request) -> Script:
        below = request.path.startswith(self.prefix)
        path = request.path.removeprefix(self.prefix) if below else f"root{request.path}"
        known = self._scripts.get(path)
        if known is not None:
            return known
        if path == "/models":
            return answer({"object": "list", "data": self.models})
        if path == "/embeddings":
            if not self.ids and isinstance(request.json["input"][0], list):
                return answer({"error": {"message": "input: texts are expected"}}, 400)
            return answer(self.embeddings_reply(request.json))
        return answer({"detail": "Not Found"}, 404)

    def embeddings_reply(self, body: Any) -> dict[str, Any]:
        """Return the answer to an embeddings request, in the requested encoding."""
        rows = [vector_of(text, seed=self._seed)[: body.get("dimensions")] for text in body["input"]]
        vectors: list[Any] = [row.tolist() for row in rows]
        if body.get("encoding_format") == "base64":
            vectors = [base64.b64encode(row.tobytes()).decode() for row in rows]
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(vectors)]
        tokens = sum(len(str(text).split()) + 2 for text in body["input"])
        usage = {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}} if self.usage else {}
        return {"object": "list", "data": data, "model": body["model"], **usage}


async def _read(reader: asyncio.StreamReader, ahead: bytes) -> Request:
    head = ahead + await reader.readuntil(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = line.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines if each)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, body)


async def _watch(reader: asyncio.StreamReader, request: Request) -> bytes:
    """Return the first byte of the next request, or b"" when the caller closes the connection, which is recorded."""
    try:
        ahead = await reader.read(1)
    except ConnectionError:
        ahead = b""
    if not ahead:
        request.disconnected.set()
    return ahead
