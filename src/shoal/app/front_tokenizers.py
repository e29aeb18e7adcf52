"""Tokenizing in front processes for the models of the model process. Part of the composition root.

A front opens a copy of a model's pipeline, which needs the tokenizer's file alone. What it cannot tokenize at once goes
to the model process as texts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from shoal.core.protocols import HasTextPipeline, SharesTokenizer
from shoal.core.registry import Model
from shoal.core.scheduling.preparation import INLINE_TOKENS
from shoal.core.threads import Threads
from shoal.decoding import msgpack_decoder
from shoal.errors import ShoalError
from shoal.specs import TextSpec
from shoal.types import BatchTask, Image, Rerank, TokenizedTexts
from shoal.workers.messages import ModelState

if TYPE_CHECKING:
    from shoal.pipelines.text.pairs import PairPipeline
    from shoal.pipelines.text.tokens import TextPipeline

    _Pipeline: TypeAlias = TextPipeline | PairPipeline

T = TypeVar("T")

MAX_TOKENS = 16_384
"""Estimated tokens of a request that a front tokenizes. The model process admits a larger one first, and tokenizes it
while its first batches run."""
MAX_FILE_BYTES = 1_000_000
"""Size of a tokenizer's file up to which fronts open it. Nothing else runs in a front meanwhile: about 30 ms for the
466 KB of all-MiniLM-L6-v2; for 1 MB 60 ms (WordPiece), 80 ms (Unigram) or 100 ms (BPE), for 8.5 MB of Unigram 1.8 s."""

logger = logging.getLogger("shoal.workers")


class TokenizerSource(msgspec.Struct, frozen=True):
    """Where the copy of a pipeline is opened from, and what its `tokenizer_id` must be."""

    id: str
    folder: str
    spec: TextSpec


_SOURCE = msgpack_decoder(TokenizerSource)


def describe_tokenizer(model: Model) -> bytes:
    """Return how a front tokenizes for a model; b"" if it cannot."""
    runner: object = model.runner
    pipeline: object = runner.text_pipeline if isinstance(runner, HasTextPipeline) else None
    if not isinstance(pipeline, SharesTokenizer) or pipeline.tokenizer_bytes > MAX_FILE_BYTES:
        return b""
    return msgspec.msgpack.encode(TokenizerSource(pipeline.tokenizer_id, str(pipeline.folder), pipeline.spec))


class FrontTokenizers:
    """The tokenizers of one front (see workers.front.Tokenizers). `threads` has one thread."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._sources: dict[str, bytes] = {}
        self._pipelines: dict[bytes, _Pipeline] = {}
        self._opening: dict[bytes, asyncio.Task[None]] = {}
        self._working: set[asyncio.Task[Any]] = set()
        """What the thread runs or will run; it ends with the thread's work, not with those who wait for it."""

    def update(self, states: Sequence[ModelState]) -> None:
        known, self._sources = self._sources, {}
        for each in states:
            if each.state == "ready":
                self._sources[each.name] = each.tokenizer
            elif each.is_sleeping:  # opening it again at each wake-up would stop the loop each time
                self._sources[each.name] = known.get(each.name, b"")
        wanted = set(self._sources.values()) - {b""}
        for gone in self._opening.keys() - wanted:
            self._opening.pop(gone).cancel()
            self._pipelines.pop(gone, None)
        for source in wanted - self._opening.keys():
            self._opening[source] = asyncio.create_task(self._open(source), name="open a tokenizer")

    async def tokenize(self, name: str, task: BatchTask) -> BatchTask:
        pipeline = self._pipelines.get(self._sources.get(name, b""))
        if pipeline is None or not _can_tokenize(pipeline, task):
            return task
        try:
            tokens = sum(map(pipeline.estimate, task.items))
            if tokens <= INLINE_TOKENS:
                return _tokenize(pipeline, task)
            if tokens > MAX_TOKENS or self._working:
                return task
            return await self._run(partial(_tokenize, pipeline, task))
        except ShoalError:  # the model process says so
            return task
        except Exception:  # a bug; the model process can do without
            logger.exception("a front process cannot tokenize for %s", name)
            return task

    async def aclose(self) -> None:
        tasks = [*self._opening.values(), *self._working]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, call: Callable[[], T]) -> T:
        working = asyncio.create_task(self._threads.run(call), name="tokenizers' thread")
        self._working.add(working)
        working.add_done_callback(self._working.discard)
        return await asyncio.shield(working)

    async def _open(self, packed: bytes) -> None:
        source = _SOURCE.decode(packed)
        try:
            pipeline = await self._run(partial(_open_pipeline, source))
        except (ShoalError, OSError) as error:
            logger.info("the model process tokenizes for %s: %s", source.folder, error)
            return
        if pipeline.tokenizer_id != source.id:
            logger.info("the model process tokenizes for %s: its files have changed", source.folder)
            return
        self._pipelines[packed] = pipeline
        logger.debug("this front process tokenizes for %s", source.folder)


def _open_pipeline(source: TokenizerSource) -> _Pipeline:
    from shoal.pipelines.text.pairs import PairPipeline
    from shoal.pipelines.text.tokens import TextPipeline

    folder = Path(source.folder)
    if source.spec.score is not None:
        return PairPipeline(folder, source.spec, truncate=True)
    return TextPipeline(folder, source.spec, truncate=True)


def _can_tokenize(pipeline: _Pipeline, task: BatchTask) -> bool:
    """Whether the pipeline may be asked at all; the model process rejects what is wrong."""
    if task.kind not in pipeline.spec.tasks:
        return False
    if isinstance(task, Rerank):
        is_complete = len(task.queries) in (1, len(task.documents))
        return is_complete and (task.instruction is None or pipeline.takes_instruction)
    return any(isinstance(item, str | tuple) for item in task.inputs) and Image not in map(type, task.inputs)


def _tokenize(pipeline: _Pipeline, task: BatchTask) -> BatchTask:
    started = time.perf_counter()
    items = pipeline.tokenize(task)
    tokenized = TokenizedTexts(pipeline.tokenizer_id, items, time.perf_counter() - started)
    return msgspec.structs.replace(task, tokenized=tokenized)
