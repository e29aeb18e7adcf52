"""Shared by the surface tests: an in-process ASGI client and a real gateway over a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import orjson

from shoal.core.gateway import Gateway
from shoal.core.protocols import ModelFacts, Observer, Token
from shoal.core.registry import Model, Registry
from shoal.errors import ShoalError
from shoal.surfaces import SURFACES, Application, Options, build_app
from shoal.types import BatchFacts, BatchTask, Context, Embed, Embedded, Generate, Image, Result, TextItem, Vectors

MODEL = "all-MiniLM-L6-v2"
DIMENSION = 4
FACTS = BatchFacts(size=7, id=42, batches=1, flush="full", queue_ms=1.25, prepare_ms=2.5, infer_ms=3.75)


def vector(item: TextItem) -> list[float]:
    """Return the vector of an input: small numbers, exact in float32, different for different inputs."""
    data = item.encode() if isinstance(item, str) else bytes(each % 256 for each in item)
    return [len(data) / 2, data[0] / 4 if data else 0.0, sum(data) / 8, -0.5]


@dataclass
class RecordingRunner:
    """A runner that records its tasks. It answers, raises `error`, or waits until `release` is set."""

    facts: ModelFacts = field(
        default_factory=lambda: ModelFacts(
            source="hf:sentence-transformers/all-MiniLM-L6-v2",
            id="sentence-transformers/all-MiniLM-L6-v2",
            backend="openvino",
            tasks=("embed",),
            dimension=DIMENSION,
            max_input_tokens=256,
            precision="bf16",
            pooling="mean",
            space="5pace",
            revision="abc123",
            verified="cosine 0.99999",
        )
    )
    error: Exception | None = None
    release: asyncio.Event | None = None
    able: bool = True
    truncated: int = 0
    tasks: list[Embed] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    cancelled: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    tokenized: list[tuple[list[str], bool, str | None]] = field(default_factory=list)
    decoded: list[tuple[list[list[int]], bool]] = field(default_factory=list)

    async def run(self, task: BatchTask, ctx: Context) -> Result:
        assert isinstance(task, Embed)
        self.tasks.append(task)
        self.contexts.append(ctx)
        self.begun.set()
        if self.release is not None:
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self.error is not None:
            raise self.error
        texts = [item for item in task.inputs if not isinstance(item, Image)]
        vectors: Vectors = np.array([vector(item) for item in texts], dtype=np.float32)
        return Embedded(
            vectors=vectors,
            tokens=[len(item) for item in texts],
            truncated=self.truncated,
            facts=FACTS,
            space=self.facts.space,
        )

    def stream(self, task: Generate, ctx: Context) -> Any:
        raise NotImplementedError

    def ready(self) -> bool:
        return self.able

    async def aclose(self) -> None:
        return None

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None
    ) -> list[list[Token]]:
        self.tokenized.append((list(texts), add_special_tokens, prompt_name))
        special = [Token(101, "[CLS]", True, None, None)] if add_special_tokens else []
        return [[*special, Token(7, text, False, 0, len(text))] for text in texts]

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        self.decoded.append(([list(each) for each in ids], skip_special_tokens))
        return [" ".join(map(str, each)) for each in ids]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    pieces: int = 1

    def json(self) -> Any:
        return orjson.loads(self.body)


@dataclass
class Server:
    """An app over one model named MODEL with the alias `mini`, and a client for it."""

    app: Application
    runner: RecordingRunner
    gateway: Gateway
    model: Model

    async def call(
        self,
        method: str,
        path: str,
        json: Any = msgspec.UNSET,
        *,
        body: bytes | Iterable[bytes] = b"",
        headers: dict[str, str] | None = None,
        **scope: Any,
    ) -> Answer:
        """Send one request. A `body` with several pieces is sent as that many messages, without a content-length."""
        sent = {"host": "127.0.0.1:8080"}
        if json is not msgspec.UNSET:
            body = orjson.dumps(json)
            sent["content-type"] = "application/json"
        if isinstance(body, bytes):
            sent["content-length"] = str(len(body))
        else:
            sent["transfer-encoding"] = "chunked"
        sent.update({name.lower(): value for name, value in (headers or {}).items()})
        exchange = Exchange([body] if isinstance(body, bytes) else list(body))
        await self.app(request_scope(method, path, sent, **scope), exchange.receive, exchange.send)
        return exchange.answer()


class Exchange:
    """The server's side of one HTTP exchange; `leave` closes the client's connection."""

    def __init__(self, pieces: Sequence[bytes], *, silent: bool = False) -> None:
        self._pieces = list(pieces)
        self._silent = silent
        self._gone = asyncio.Event()
        self.reads = 0
        self.reads_before_answer = 0
        self.messages: list[dict[str, Any]] = []

    def leave(self) -> None:
        self._gone.set()

    async def receive(self) -> dict[str, Any]:
        if self._pieces and not self._silent:
            self.reads += 1
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if not self.messages:
            self.reads_before_answer = self.reads
        self.messages.append(message)

    def answer(self) -> Answer:
        start, *rest = self.messages
        assert start["type"] == "http.response.start"
        assert [each.get("more_body", False) for each in rest] == [True] * (len(rest) - 1) + [False]
        headers = [(name.decode(), value.decode()) for name, value in start["headers"]]
        names = [name for name, _ in headers]
        assert len(set(names)) == len(names), f"a header is sent twice: {names}"
        return Answer(start["status"], dict(headers), b"".join(each["body"] for each in rest), len(rest))


def request_scope(method: str, path: str, headers: dict[str, str], **more: Any) -> dict[str, Any]:
    """Return the scope of an HTTP/1.1 request with a Host header; `more` overrides fields. `path` may have a query."""
    headers = headers if "http_version" in more else {"host": "127.0.0.1:8080", **headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    path, _, query = path.partition("?")
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": raw}
    return {**scope, "http_version": "1.1", "client": ("127.0.0.1", 5000), **more}


def serve(
    runner: RecordingRunner | None = None,
    *,
    observer: Observer | None = None,
    aliases: tuple[str, ...] = (),
    **options: Any,
) -> Server:
    """Return a server whose model is ready and also has these aliases; the default `runner` answers every request."""
    runner = runner or RecordingRunner()
    registry = Registry()
    model = Model(
        name=MODEL, aliases=("mini", "sentence-transformers/all-MiniLM-L6-v2", *aliases), created=1_700_000_000
    )
    registry.add(model)
    model.mark_loaded(runner)
    gateway = Gateway(registry, observer)
    settings = Options(**options)
    return Server(build_app(gateway, [make(settings) for make in SURFACES], settings), runner, gateway, model)


def raising(error: ShoalError | Exception) -> Server:
    return serve(RecordingRunner(error=error))
