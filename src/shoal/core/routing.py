"""A Runner over several runners of one model: sends each task to the runner that supports it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from shoal.core.closing import close_all
from shoal.core.generation.token_estimate import estimate_tokens
from shoal.core.protocols import (
    Breakable,
    CountsTokens,
    ModelFacts,
    ReplicaStatus,
    Replicated,
    Runner,
    SupportsCheck,
    TextCodec,
    Token,
)
from shoal.errors import ShoalError, Unsupported
from shoal.types import BatchTask, Chunk, Context, Generate, Result, TaskKind

T = TypeVar("T")


class TaskRouter:
    """Runners under one name. The facts are the first runner's, with the tasks, adapters and details of all, and the
    context, vectors and labels of the first runner that has them. The tokenizer is that of the first runner that has
    one."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        self._runners = runners
        self._by_task: dict[TaskKind, Runner] = {}
        for runner in runners:
            for task in runner.facts.tasks:
                self._by_task.setdefault(task, runner)
        every = [runner.facts for runner in runners]
        self._facts = replace(
            every[0],
            tasks=tuple(self._by_task),
            context_tokens=next((facts.context_tokens for facts in every if facts.context_tokens is not None), None),
            vectors=next((facts.vectors for facts in every if "embed" in facts.tasks), ()),
            labels=next((facts.labels for facts in every if facts.labels), ()),
            adapters=tuple(dict.fromkeys(name for facts in every for name in facts.adapters)),
            details={key: value for facts in reversed(every) for key, value in facts.details.items()},
        )

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    def run(self, task: BatchTask, ctx: Context) -> Coroutine[Any, Any, Result]:
        return self._runner_for(task.kind).run(task, ctx)

    def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        return self._runner_for("generate").stream(task, ctx)

    def check(self, task: Generate) -> None:
        runner = self._runner_for("generate")
        if isinstance(runner, SupportsCheck):
            runner.check(task)

    async def count_tokens(self, task: Generate, ctx: Context) -> int:
        runner = self._runner_for("generate")
        return await runner.count_tokens(task, ctx) if isinstance(runner, CountsTokens) else estimate_tokens(task)

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None
    ) -> list[list[Token]]:
        return await self._call_codec(
            lambda codec: codec.tokenize(texts, add_special_tokens=add_special_tokens, prompt_name=prompt_name)
        )

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        return await self._call_codec(lambda codec: codec.decode(ids, skip_special_tokens=skip_special_tokens))

    def when_broken(self, call: Callable[[ShoalError], None]) -> None:
        for runner in self._runners:
            if isinstance(runner, Breakable):
                runner.when_broken(call)

    def replicas(self) -> list[ReplicaStatus]:
        return [status for runner in self._runners if isinstance(runner, Replicated) for status in runner.replicas()]

    def ready(self) -> bool:
        return all(runner.ready() for runner in self._runners)

    async def aclose(self) -> None:
        await close_all(*(runner.aclose for runner in self._runners))

    async def _call_codec(self, ask: Callable[[TextCodec], Awaitable[T]]) -> T:
        for runner in self._runners:
            if isinstance(runner, TextCodec):
                try:
                    return await ask(runner)
                except Unsupported:  # it implements TextCodec but has no tokenizer
                    continue
        raise Unsupported("this model does not expose its tokenizer", param="model")

    def _runner_for(self, task: TaskKind) -> Runner:
        try:
            return self._by_task[task]
        except KeyError:
            raise Unsupported(f"this model cannot {task}", param="model") from None
