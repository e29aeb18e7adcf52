"""Shared by the Ollama tests: a scripted model and a client that reads lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from shoal.core.protocols import ModelFacts
from shoal.errors import ShoalError
from shoal.types import Chunk, Context, Generate, Usage
from tests.surfaces.surface_kit import MODEL, Answer, Exchange, RecordingRunner, Server, request_scope, serve

HELLO = (
    Chunk(text="Hel"),
    Chunk(text="lo"),
    Chunk(finish_reason="stop"),
    Chunk(usage=Usage(prompt_tokens=7, completion_tokens=2)),
)
CHAT_BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"model": MODEL, "prompt": "Hi"}
CHAT_FACTS = ModelFacts(
    source="hf:org/talks",
    backend="genai",
    tasks=("generate", "embed"),
    precision="int4",
    context_tokens=4096,
    dimension=4,
    adapters=("loud",),
    details={"architecture": "llama", "parameter_count": 7_600_000_000, "tools": True, "thinking": True},
)


@dataclass
class ChatModel(RecordingRunner):
    """A model that yields `chunks`, then raises `end`; `generations` records its tasks."""

    facts: ModelFacts = CHAT_FACTS
    chunks: Sequence[Chunk] = HELLO
    end: ShoalError | None = None
    generations: list[Generate] = field(default_factory=list)
    closed: int = 0

    async def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        self.generations.append(task)
        try:
            for chunk in self.chunks:
                yield chunk
            if self.release is not None:
                await self.release.wait()
            if self.end is not None:
                raise self.end
        finally:
            self.closed += 1


class LineExchange(Exchange):
    """An exchange that sets `received` when a message contains `word`, which must not be split."""

    def __init__(self, body: Any, word: bytes) -> None:
        super().__init__([orjson.dumps(body)])
        self.received = asyncio.Event()
        self._word = word

    async def send(self, message: dict[str, Any]) -> None:
        await super().send(message)
        if self._word in message.get("body", b""):
            self.received.set()

    async def call(self, server: Server, path: str) -> None:
        headers = {"host": "localhost", "content-type": "application/json"}
        await server.app(request_scope("POST", path, headers), self.receive, self.send)


def serve_chat(*chunks: Chunk, end: ShoalError | None = None, **options: Any) -> tuple[Server, ChatModel]:
    model = ChatModel(chunks=chunks or HELLO, end=end)
    return serve(model, **options), model


def lines(answer: Answer) -> list[Any]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.body.endswith(b"\n")
    return [orjson.loads(line) for line in answer.body.splitlines()]
