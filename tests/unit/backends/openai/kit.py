"""Runners over scripted servers, and tasks for them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from shoal.backends.base.http_client import Client
from shoal.backends.openai.replicas import Replica, ServerPool
from shoal.backends.openai.runner import UpstreamOptions, UpstreamRunner
from shoal.core.protocols import ModelFacts
from shoal.types import Chunk, Context, Generate, Message
from tests.fakes.openai_server import FakeUpstream, event, fields_of

FACTS = ModelFacts(source="openai+http://up#up/model", backend="openai", tasks=("generate",))
HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def runner_of(
    *servers: FakeUpstream, options: UpstreamOptions | None = None, key: str | None = None, **adapters: str
) -> UpstreamRunner:
    replicas = [
        Replica(Client(server.base, key=key, connect_timeout_s=30.0), "up/model", adapters) for server in servers
    ]
    return UpstreamRunner(ServerPool(replicas), FACTS, options)


def context(seconds: float = 30.0) -> Context:
    return Context(id="req-1", deadline=time.monotonic() + seconds)


def make_task(body: dict[str, Any] | bytes | None = None, *, dialect: str = "openai.chat", **fields: Any) -> Generate:
    """Return the task that a surface makes from this body."""
    if body is None:
        body = {"model": "mine", "messages": [{"role": "user", "content": "hi"}]}
    sent = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    messages = fields.pop("messages", [Message(role="user", content="hi")])
    stream = bool(json.loads(sent).get("stream"))
    return Generate(model="mine", messages=messages, raw=(dialect, fields_of(sent)), stream=stream, **fields)


def streaming(**more: Any) -> Generate:
    return make_task({"model": "mine", "messages": [], "stream": True, **more})


def typed(**fields: Any) -> Generate:
    """Return a task that came in through another API."""
    fields.setdefault("messages", [Message(role="user", content="hi")])
    return Generate(**{"model": "mine", "stream": True, **fields})


def delta(content: str = "a", model: str = "up/model", *, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return event({**HEAD, "model": model, "choices": [choice], **more})


def last(model: str = "up/model") -> bytes:
    """Return the event with the usage, if it was requested."""
    return event({**HEAD, "model": model, "choices": [], "usage": USAGE})


async def chunks_of(runner: UpstreamRunner, task: Generate, ctx: Context | None = None) -> list[Chunk]:
    async with aclosing(runner.stream(task, ctx or context())) as chunks:
        return [chunk async for chunk in chunks]


def passed_on(chunks: Sequence[Chunk]) -> bytes:
    """Return the bytes that a client reads; every chunk has one dialect, and else only usage and the replica."""
    out = b""
    for chunk in chunks:
        assert chunk.raw is not None
        assert chunk == Chunk(raw=chunk.raw, usage=chunk.usage, replica=chunk.replica)
        out += chunk.raw[1]
    return out
