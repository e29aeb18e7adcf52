"""A Runner for lanes: handles every batched task of a model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, overload

from shoal.core.protocols import ModelFacts, Pipeline, ReplicaStatus, TextCodec, Token
from shoal.core.scheduling.lane import Lane
from shoal.errors import ShoalError, Unsupported
from shoal.types import (
    BatchTask,
    Chunk,
    Classify,
    Context,
    Embed,
    Embedded,
    Generate,
    Rerank,
    Result,
    Scored,
)


class CodecMixin:
    """Exposes the tokenizer of a runner, if it has one."""

    def __init__(self, codec: TextCodec | None) -> None:
        self._codec = codec

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None
    ) -> list[list[Token]]:
        return await self._get_codec().tokenize(texts, add_special_tokens=add_special_tokens, prompt_name=prompt_name)

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        return await self._get_codec().decode(ids, skip_special_tokens=skip_special_tokens)

    def _get_codec(self) -> TextCodec:
        if self._codec is None:
            raise Unsupported("this model does not expose its tokenizer", param="model")
        return self._codec


class LaneRunner(CodecMixin):
    """Runs the tasks of its facts through a lane, and exposes the tokenizer if there is one."""

    def __init__(self, lane: Lane, facts: ModelFacts, codec: TextCodec | None = None) -> None:
        super().__init__(codec)
        self.lane = lane
        self.facts = facts

    @property
    def text_pipeline(self) -> Pipeline | None:
        return self.lane.pipeline

    @overload
    def run(self, task: Embed, ctx: Context) -> Coroutine[Any, Any, Embedded]: ...

    @overload
    def run(self, task: Rerank | Classify, ctx: Context) -> Coroutine[Any, Any, Scored]: ...

    @overload
    def run(self, task: BatchTask, ctx: Context) -> Coroutine[Any, Any, Result]: ...

    def run(self, task: BatchTask, ctx: Context) -> Coroutine[Any, Any, Result]:
        return self.lane.run(task, ctx)

    def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        raise Unsupported(
            f"the model {task.model!r} does not generate text; it can: {', '.join(self.facts.tasks)}", param="model"
        )

    def when_broken(self, call: Callable[[ShoalError], None]) -> None:
        self.lane.when_broken(call)

    def replicas(self) -> list[ReplicaStatus]:
        return self.lane.status()

    def ready(self) -> bool:
        return self.lane.ready()

    async def aclose(self) -> None:
        await self.lane.aclose()
