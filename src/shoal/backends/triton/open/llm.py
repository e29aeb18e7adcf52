"""Opens language models on Triton servers: schemas, chat pipelines, generators, and the facts to show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeAlias

from shoal.backends.triton.engine import Endpoint
from shoal.backends.triton.llm import TritonGenerator
from shoal.backends.triton.llm_request import ModelTokenizer
from shoal.backends.triton.llm_schema import LlmSchema
from shoal.backends.triton.open.targets import TritonMixin, TritonTarget
from shoal.core.generation.runner import GenerationRunner
from shoal.core.protocols import ChatPipeline, ModelFacts, TextGenerator
from shoal.errors import ConfigError
from shoal.models.prepare import SOURCE
from shoal.models.remote_text_models import tokenizer_folder
from shoal.models.sources import Access
from shoal.models.store import Store
from shoal.models.tokenizer_file import TOKENIZER
from shoal.pipelines.chat.vocabulary import Vocabulary

MakeGenerationRunner: TypeAlias = Callable[[ChatPipeline, Sequence[TextGenerator], ModelFacts], GenerationRunner]


class TritonGenerationRunner(GenerationRunner, TritonMixin):
    """A language model on Triton behind its generators. Replaces `runner`, which must not be used afterwards."""

    def __init__(self, runner: GenerationRunner, endpoints: Sequence[Endpoint]) -> None:
        GenerationRunner.__init__(self, runner.pipeline, runner.generators, runner.facts, runner.options)
        TritonMixin.__init__(self, runner.options.model, endpoints)


async def open_llm(
    target: TritonTarget, talk: MakeGenerationRunner, number: int, schema: LlmSchema
) -> TritonGenerationRunner:
    """Return the runner, with replica `number` in service. Raises SetupError if the model needs a tokenizer that is not
    configured or not available, and for adapters that it does not support."""
    from shoal.backends.base.chat_pipeline import load_chat_pipeline  # imported late: embedders need no template engine

    own, table = target.table, target.table.for_language_model
    if schema.family == "tokens" and table.tokenizer is None:
        raise ConfigError(
            f"{target.name} takes token ids and needs a tokenizer: set `tokenizer` in "
            f'[models."{target.name}"] of shoal.toml, as "hf:org/name" or a folder'
        )
    folder = await asyncio.to_thread(_tokenizer_folder, target, table.tokenizer)
    pipeline = await asyncio.to_thread(
        load_chat_pipeline,
        folder,
        target.settings,
        adapters=tuple(table.adapters),
        context_tokens=own.context_tokens or schema.context_tokens or table.context_tokens,
        cuts="max_tokens" not in schema.parameters,
    )
    words = to_model_tokenizer(pipeline.vocabulary) if pipeline.vocabulary is not None else None
    generators = [
        TritonGenerator(
            endpoint,
            f"{target.name}-{at}",
            schema=schema,
            words=words,
            adapters=table.adapters,
            context_tokens=pipeline.options.context_tokens,
            serving=at == number,
        )
        for at, endpoint in enumerate(target.endpoints)
    ]
    async with AsyncExitStack() as opened:
        for generator in generators:
            opened.push_async_callback(generator.aclose)
            generator.start()
        counted = words is not None
        runner = TritonGenerationRunner(
            talk(pipeline, generators, build_facts(target, schema, generators, counted)), target.endpoints
        )
        opened.pop_all()
    return runner


def build_facts(
    target: TritonTarget, schema: LlmSchema, generators: Sequence[TritonGenerator], counted: bool
) -> ModelFacts:
    """Return the facts to show. `counted`: Shoal has a tokenizer to count tokens."""
    facts = generators[0].facts
    reported = "return_num_output_tokens" in schema.flags
    return ModelFacts(
        id=target.name,
        source=target.source,
        backend="triton",
        tasks=("generate",),
        revision=schema.version,
        context_tokens=facts.context_tokens,
        adapters=facts.adapters,
        details={
            "model": target.endpoints[0].model,
            "servers": [endpoint.address for endpoint in target.endpoints],
            "schema": schema.family,
            "instances": schema.instances,
            "streams": schema.streams,
            "parameters": sorted(facts.parameters),
            "usage": "reported" if reported else "counted" if counted else "estimated",
        },
    )


def to_model_tokenizer(vocabulary: Vocabulary) -> ModelTokenizer:
    """Return a tokenizer in the form that generators use."""
    return ModelTokenizer(
        encode=lambda text: vocabulary.encode(text, special=False),
        piece=vocabulary.piece,
        ends=tuple(sorted(vocabulary.eos_ids)),
    )


def _tokenizer_folder(target: TritonTarget, source: str | None) -> Path | None:
    """Return the folder of the tokenizer's original files, including its template; None without a source. Blocks."""
    if source is None:
        return None
    access = Access(offline=target.settings.offline, hf_token=target.settings.hf_token)
    folder = tokenizer_folder(source, store=Store(target.settings.home), access=access) / SOURCE
    if not (folder / TOKENIZER).is_file():
        raise ConfigError(
            f"{source} has no {TOKENIZER}: set `tokenizer` to a repository or folder of the same model that has one"
        )
    return folder
