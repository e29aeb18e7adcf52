"""Language models for tests: words in, words out, with a pipeline without a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from shoal.backends.fake.model import FakeGenerator, FakeScript
from shoal.core.generation.runner import GenerationOptions, GenerationRunner
from shoal.core.protocols import ModelFacts, Piece, Prompt, TextGenerator
from shoal.types import Chunk, Generate, Guide, Sampling

FACTS = ModelFacts(source="fake", backend="fake", tasks=("generate",))


class PlainDecoder:
    """Passes text through; a stop text ends the answer if one piece holds all of it."""

    def __init__(self, index: int, stops: Sequence[str]) -> None:
        self.index = index
        self.stopped = False
        self.tokens = 0
        self.reasoning_tokens = 0
        self._stops = stops

    def push(self, piece: Piece) -> list[Chunk]:
        self.tokens += 1 if piece.tokens is None else piece.tokens
        self.stopped = any(stop in piece.text for stop in self._stops)
        if self.stopped or not piece.text:
            return []
        return [Chunk(text=piece.text, index=self.index, logprobs=list(piece.logprobs))]

    def flush(self, reason: str) -> list[Chunk]:
        return [Chunk(index=self.index, finish_reason=reason)]


class PlainPipeline:
    """Uses the last message, or each prompt, as it is; every Prompt gets `cut` and `tokens`."""

    def __init__(self, *, cut: int = 0, counts: bool = False, guide: Guide | None = None) -> None:
        self.cut = cut
        self.counts = counts
        self.guide = guide
        self.error: Exception | None = None
        self.details: dict[str, object] = {}

    def check(self, task: Generate) -> None:
        if self.error is not None:
            raise self.error

    def prompts(self, task: Generate, *, whole: bool = False) -> list[Prompt]:
        texts = [str(message.content) for message in task.messages[-1:]] or [str(prompt) for prompt in task.prompts]
        return [Prompt(text=text, tokens=len(text.split()) if self.counts else None, cut=self.cut) for text in texts]

    def decoder(
        self, task: Generate, prompt: Prompt, index: int, gives: Literal["delta", "cumulative", "ids"]
    ) -> PlainDecoder:
        return PlainDecoder(index, task.sampling.stop)

    def to_backend_sampling(self, task: Generate, sampling: Sampling) -> Sampling:
        return sampling

    def tools_guide(self, task: Generate, *, tags: bool = False) -> Guide | None:
        return self.guide


def make_runner(
    *generators: TextGenerator, pipeline: PlainPipeline | None = None, options: GenerationOptions | None = None
) -> GenerationRunner:
    """Return a runner over these generators; by default over a new fake one."""
    return GenerationRunner(
        pipeline or PlainPipeline(),
        generators or (FakeGenerator(FakeScript()),),
        FACTS,
        options or GenerationOptions(model="m"),
    )
