"""Language models on Triton servers, put together: schemas, chat pipelines, generators, and the facts to show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeAlias

from shoal.backends.triton.engine import Target
from shoal.backends.triton.llm import TritonGenerator
from shoal.backends.triton.llm_request import Words
from shoal.backends.triton.llm_schema import LlmSchema
from shoal.core.generation import GenerationRunner
from shoal.core.protocols import ChatPipeline, ModelFacts, TextGenerator
from shoal.errors import ConfigError
from shoal.models.foreign import tokenizer_folder
from shoal.models.prepare import SOURCE
from shoal.models.sources import Access
from shoal.models.store import Store
from shoal.models.tokenizer_file import TOKENIZER
from shoal.pipelines.chat.vocabulary import Vocabulary
from shoal.triton.targets import OnTriton, Wanted

Talk: TypeAlias = Callable[[ChatPipeline, Sequence[TextGenerator], ModelFacts], GenerationRunner]


class TritonTalker(GenerationRunner, OnTriton):
    """A language model on Triton behind its generators: as `runner`, which is not to be used any more."""

    def __init__(self, runner: GenerationRunner, targets: Sequence[Target]) -> None:
        GenerationRunner.__init__(self, runner.pipeline, runner.generators, runner.facts, runner.options)
        OnTriton.__init__(self, runner.options.model, targets)


async def open_llm(wanted: Wanted, talk: Talk, number: int, schema: LlmSchema) -> TritonTalker:
    """The runner, with the replica of that number in service. Raises SetupError where the model needs a tokenizer that
    is not named or cannot be had, and for adapters that it cannot take."""
    from shoal.llm.chat import chat_pipeline  # only now: embedders need no template engine

    table = wanted.table
    if schema.family == "tokens" and table.tokenizer is None:
        raise ConfigError(
            f"{wanted.name} takes token ids, and nothing says which tokenizer makes them: set `tokenizer` in "
            f'[models."{wanted.name}"] of shoal.toml, as "hf:org/name" or a folder'
        )
    folder = await asyncio.to_thread(_tokenizer_folder, wanted)
    pipeline = await asyncio.to_thread(
        chat_pipeline,
        folder,
        wanted.settings,
        adapters=tuple(table.adapters),
        context_tokens=table.context_tokens or schema.context_tokens,
        cuts="max_tokens" not in schema.parameters,
    )
    words = words_of(pipeline.vocabulary) if pipeline.vocabulary is not None else None
    generators = [
        TritonGenerator(
            target,
            f"{wanted.name}-{at}",
            schema=schema,
            words=words,
            adapters=table.adapters,
            context_tokens=pipeline.options.context_tokens,
            serving=at == number,
        )
        for at, target in enumerate(wanted.targets)
    ]
    async with AsyncExitStack() as opened:
        for generator in generators:
            opened.push_async_callback(generator.aclose)
            generator.start()
        counted = words is not None
        runner = TritonTalker(talk(pipeline, generators, facts_of(wanted, schema, generators, counted)), wanted.targets)
        opened.pop_all()
    return runner


def facts_of(wanted: Wanted, schema: LlmSchema, generators: Sequence[TritonGenerator], counted: bool) -> ModelFacts:
    """What is shown of the model. `counted`: there is a tokenizer here."""
    facts = generators[0].facts
    reported = "return_num_output_tokens" in schema.flags
    return ModelFacts(
        id=wanted.name,
        source=wanted.source,
        backend="triton",
        tasks=("generate",),
        revision=schema.version,
        context_tokens=facts.context_tokens,
        adapters=facts.adapters,
        details={
            "model": wanted.targets[0].model,
            "servers": [target.address for target in wanted.targets],
            "schema": schema.family,
            "instances": schema.instances,
            "streams": schema.streams,
            "parameters": sorted(facts.parameters),
            "usage": "reported" if reported else "counted" if counted else "estimated",
        },
    )


def words_of(vocabulary: Vocabulary) -> Words:
    """A tokenizer as generators use it."""
    return Words(
        encode=lambda text: vocabulary.encode(text, special=False),
        piece=vocabulary.piece,
        ends=tuple(sorted(vocabulary.eos_ids)),
    )


def _tokenizer_folder(wanted: Wanted) -> Path | None:
    """Where the files of the tokenizer are as they came, its template among them. Blocks."""
    if wanted.table.tokenizer is None:
        return None
    access = Access(offline=wanted.settings.offline, hf_token=wanted.settings.hf_token)
    folder = tokenizer_folder(wanted.table.tokenizer, store=Store(wanted.settings.home), access=access) / SOURCE
    if not (folder / TOKENIZER).is_file():
        raise ConfigError(
            f"{wanted.table.tokenizer} has no {TOKENIZER}: name a repository or folder of the same model that has one"
        )
    return folder
