"""A model that stays open for all tests of a file, on its own event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from shoal.backends.genai import GenaiGenerator, GenaiOptions, compiling, start_generator
from shoal.core.protocols import Piece, Prompt
from shoal.types import Context, Sampling

FIXTURES = Path(__file__).parents[3] / "fixtures"
LIMIT_S = 60.0
"""Time limit of guides here: long, since a busy machine takes many times as long."""
IR = FIXTURES / "tiny_llama_ir"
GGUF = FIXTURES / "tiny_llama.gguf"
EXACT = GenaiOptions(precision="f32", threads=1, kv_cache_mb=4, context_tokens=2048)

T = TypeVar("T")


def context(seconds: float = 30.0) -> Context:
    return Context(id="test", deadline=time.monotonic() + seconds)


async def answer(generator: GenaiGenerator, ids: Sequence[int], **fields: Any) -> tuple[list[int], Piece]:
    """Return the ids of a complete answer, and its last piece."""
    made: list[int] = []
    piece = Piece()
    async for piece in generator.generate(Prompt(text="", ids=tuple(ids)), Sampling(**fields), context()):
        made += piece.ids
    return made, piece


@dataclass
class Model:
    """`run` runs a coroutine on the generator's loop."""

    generator: GenaiGenerator
    runner: asyncio.Runner

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def answer(self, ids: Sequence[int], **fields: Any) -> list[int]:
        return self.run(answer(self.generator, ids, **fields))[0]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "LIMIT_S", LIMIT_S)
        generator = runner.run(start_generator(IR, name="tiny", options=EXACT))
        yield Model(generator, runner)
        runner.run(generator.aclose())
