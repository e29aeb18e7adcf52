"""The methods of `Shoal` that generate text: `chat` and `generate`, whole or as a stream, synchronous or not."""

from __future__ import annotations

import asyncio
from typing import Literal, Unpack, overload

from shoal.python.answers import Answer, AnswerStream, AsyncAnswerStream, Generation
from shoal.python.background import Background
from shoal.python.conversations import ChatOptions, GenerateOptions, Messages, build_chat, build_generate
from shoal.types import Generate, TextItem


class Conversing:
    """Language models, by the background that runs them. Options that a model cannot honor fail, as on the server."""

    def __init__(self, background: Background) -> None:
        self._background = background

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[False] = False, model: str = "", **options: Unpack[ChatOptions]
    ) -> Answer: ...

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[True], model: str = "", **options: Unpack[ChatOptions]
    ) -> AnswerStream: ...

    def chat(
        self, messages: Messages, *, stream: bool = False, model: str = "", **options: Unpack[ChatOptions]
    ) -> Answer | AnswerStream:
        """Answer a conversation: one text, or OpenAI's messages as dicts. With `stream` the model starts when the
        stream is first read.

        A message's `content` may be a list of texts and images, for models that take them: a file's bytes, a Path, or
        one of Pillow's, beside OpenAI's own parts.
        """
        return self._answer(build_chat(messages, model, options, stream=stream))

    @overload
    def generate(
        self, prompt: TextItem, *, stream: Literal[False] = False, model: str = "", **options: Unpack[GenerateOptions]
    ) -> Answer: ...

    @overload
    def generate(
        self, prompt: TextItem, *, stream: Literal[True], model: str = "", **options: Unpack[GenerateOptions]
    ) -> AnswerStream: ...

    def generate(
        self, prompt: TextItem, *, stream: bool = False, model: str = "", **options: Unpack[GenerateOptions]
    ) -> Answer | AnswerStream:
        """Continue a text, or its token ids, without the model's chat template. Otherwise as `chat`."""
        return self._answer(build_generate(prompt, model, options, stream=stream))

    def _answer(self, task: Generate) -> Answer | AnswerStream:
        if task.stream:
            return AnswerStream(self._background, task)
        return self._background.wait(Generation(self._background, task).read_all())

    @overload
    async def achat(
        self, messages: Messages, *, stream: Literal[False] = False, model: str = "", **options: Unpack[ChatOptions]
    ) -> Answer: ...

    @overload
    async def achat(
        self, messages: Messages, *, stream: Literal[True], model: str = "", **options: Unpack[ChatOptions]
    ) -> AsyncAnswerStream: ...

    async def achat(
        self, messages: Messages, *, stream: bool = False, model: str = "", **options: Unpack[ChatOptions]
    ) -> Answer | AsyncAnswerStream:
        """As `chat`."""
        # In a thread: it reads and encodes images.
        return await self._aanswer(await asyncio.to_thread(build_chat, messages, model, options, stream=stream))

    @overload
    async def agenerate(
        self, prompt: TextItem, *, stream: Literal[False] = False, model: str = "", **options: Unpack[GenerateOptions]
    ) -> Answer: ...

    @overload
    async def agenerate(
        self, prompt: TextItem, *, stream: Literal[True], model: str = "", **options: Unpack[GenerateOptions]
    ) -> AsyncAnswerStream: ...

    async def agenerate(
        self, prompt: TextItem, *, stream: bool = False, model: str = "", **options: Unpack[GenerateOptions]
    ) -> Answer | AsyncAnswerStream:
        """As `generate`."""
        return await self._aanswer(build_generate(prompt, model, options, stream=stream))

    async def _aanswer(self, task: Generate) -> Answer | AsyncAnswerStream:
        if task.stream:
            return AsyncAnswerStream(self._background, task)
        return await self._background.wait_async(Generation(self._background, task).read_all())
