"""Scripted runners, for tests of the gateway and the lifecycle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import numpy as np

from shoal.core.protocols import ModelFacts, Token
from shoal.types import BatchTask, Chunk, Context, Embedded, Generate, Result, TaskKind


class Embedder:
    """Embeds and generates as scripted: answers, raises `error`, or waits until `release` is set."""

    def __init__(
        self,
        tasks: tuple[TaskKind, ...] = ("embed",),
        *,
        error: BaseException | None = None,
        release: asyncio.Event | None = None,
    ) -> None:
        self.facts = ModelFacts(source="s", backend="b", tasks=tasks)
        self.error = error
        self.release = release
        self.is_ready = True
        self.begun = 0
        self.closed = 0
        self.streams_closed = 0
        self.contexts: list[Context] = []
        self.tasks: list[BatchTask] = []
        self.answer = Embedded(vectors=np.zeros((1, 2), np.float32), tokens=[1])

    async def run(self, task: BatchTask, ctx: Context) -> Result:
        self.contexts.append(ctx)
        self.tasks.append(task)
        await self._act()
        return self.answer

    async def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        self.contexts.append(ctx)
        try:
            for word in str(task.prompts[0]).split():
                yield Chunk(text=word)
            await self._act()
        finally:
            self.streams_closed += 1

    def ready(self) -> bool:
        return self.is_ready

    async def aclose(self) -> None:
        self.closed += 1

    async def _act(self) -> None:
        self.begun += 1
        if self.release is not None:
            await self.release.wait()
        if self.error is not None:
            raise self.error


class Codec:
    """Uses characters as tokens."""

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None
    ) -> list[list[Token]]:
        prompt = prompt_name or ""
        return [[Token(ord(char), char, add_special_tokens, None, None) for char in prompt + text] for text in texts]

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        return ["".join(map(chr, row)) + ("" if skip_special_tokens else "$") for row in ids]
