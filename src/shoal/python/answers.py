"""Answers of language models, whole and as streams that callers read from threads and event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from shoal.core.gateway import Gateway
from shoal.python.background import Background
from shoal.surfaces.shared import generation
from shoal.types import Chunk, Generate, TokenLogprob, ToolCall, Usage


@dataclass(frozen=True, slots=True)
class Answer:
    """What a language model wrote. `finish_reason`: "stop", "length", "tool_calls" or "content_filter".

    `reasoning`: what it thought before. `tool_calls`: the calls it asks for, their arguments as JSON text. `ignored`:
    options that the model cannot honor. `cut`: messages that were left out of a conversation that was too long.
    """

    text: str
    finish_reason: str
    usage: Usage
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ignored: tuple[str, ...] = ()
    cut: int = 0

    @property
    def message(self) -> dict[str, Any]:
        """The turn for the next call of `chat`, with its tool calls."""
        turn: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            turn["reasoning_content"] = self.reasoning
        if self.tool_calls:
            turn["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return turn


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of a stream. The last pieces hold the `tool_calls`, whole, with the `finish_reason`, and the `usage`."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None


class Generation:
    """One answer as it is generated: its methods are for the background's loop.

    It begins with the first call of `next_piece`. `close` also ends a `next_piece` that waits.
    """

    def __init__(self, background: Background, task: Generate) -> None:
        self._background = background
        self._task = task
        self._chunks: AsyncGenerator[Chunk] | None = None
        self._collector = generation.AnswerCollector()
        self._turn = asyncio.Lock()
        self._reader: asyncio.Task[Any] | None = None
        self._is_closing = False
        self.has_ended = False

    async def next_piece(self) -> AnswerPiece | None:
        """Return the next piece with content; None at the end. Raises what the model raises, once."""
        async with self._turn:
            self._reader = asyncio.current_task()
            try:
                return await self._read()
            except BaseException as error:
                self.has_ended = True
                if self._is_closing and isinstance(error, asyncio.CancelledError):
                    return None
                raise
            finally:
                self._reader = None
                if self.has_ended:
                    self._background.streams.discard(self)

    async def _read(self) -> AnswerPiece | None:
        self._background.check_usable()
        if self._chunks is None and not self.has_ended:
            self._chunks = self._background.stream(resolve_model(self._background.gateway, self._task))
            self._background.streams.add(self)
        while not self.has_ended:
            assert self._chunks is not None
            chunk = await anext(self._chunks, None)
            self.has_ended = chunk is None
            if chunk is not None and (piece := self._to_piece(chunk)) is not None:
                return piece
        return None

    def _to_piece(self, chunk: Chunk) -> AnswerPiece | None:
        self._collector.add(chunk)
        if not (chunk.text or chunk.reasoning or chunk.logprobs or chunk.finish_reason or chunk.usage):
            return None
        calls = self.build_answer().tool_calls if chunk.finish_reason else []
        return AnswerPiece(chunk.text, chunk.reasoning, calls, [*chunk.logprobs], chunk.finish_reason, chunk.usage)

    async def read_all(self) -> Answer:
        """Generate the whole answer."""
        try:
            while await self.next_piece() is not None:
                pass
        finally:
            await self.close()
        return self.build_answer()

    def build_answer(self) -> Answer:
        """Return the answer so far; that of a stream which was closed ends with "stop"."""
        found = self._collector.build_answer()
        choice = found.choices[0] if found.choices else generation.Choice(0)
        return Answer(
            text=choice.text,
            finish_reason=choice.finish_reason,
            usage=found.usage or Usage(),
            reasoning=choice.reasoning,
            tool_calls=choice.tools,
            logprobs=choice.logprobs,
            ignored=found.ignored,
            cut=found.cut,
        )

    async def close(self) -> None:
        """Stop generating. A second call does nothing more."""
        self.has_ended = self._is_closing = True
        if self._reader is not None:
            self._reader.cancel()
        async with self._turn:
            await self.abandon()

    async def abandon(self) -> None:
        """Stop generating unless somebody waits for the next piece."""
        self._background.streams.discard(self)
        if self._reader is None and self._chunks is not None:
            await self._chunks.aclose()


class _Stream:
    """What streams for threads and for event loops share. One that is dropped before its end stops the model, too."""

    def __init__(self, background: Background, task: Generate) -> None:
        self._background = background
        self._generation = Generation(background, task)

    @property
    def answer(self) -> Answer:
        """Everything that was read so far; the whole answer once the stream has ended."""
        return self._generation.build_answer()

    def __del__(self) -> None:
        if not self._generation.has_ended:
            self._background.start(self._generation.close())


class AnswerStream(_Stream):
    """Iterates over the pieces of an answer. `close`, or leaving its `with`, stops the model."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> AnswerPiece:
        piece = None if self._generation.has_ended else self._background.wait(self._generation.next_piece())
        if piece is None:
            raise StopIteration
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop generating; further iteration ends at once."""
        if not self._generation.has_ended and not self._background.is_closed:
            self._background.wait(self._generation.close())


class AsyncAnswerStream(_Stream):
    """As AnswerStream, for event loops."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnswerPiece:
        ended = self._generation.has_ended
        piece = None if ended else await self._background.wait_async(self._generation.next_piece())
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """As AnswerStream.close."""
        if not self._generation.has_ended and not self._background.is_closed:
            await self._background.wait_async(self._generation.close())


def resolve_model(gateway: Gateway, task: Generate) -> Generate:
    """Return the task for the served model, and the adapter, that its model names. Raises ModelNotFound."""
    model, adapter = gateway.resolve(task.model)
    return msgspec.structs.replace(task, model=model, adapter=adapter)
