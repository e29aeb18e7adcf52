"""Reranks by vectors, for models that only embed.

Dense vectors are compared by cosine; multi-vectors of late interaction by MaxSim: the sum over the query's vectors of
the largest dot product with any of the document's (Khattab and Zaharia 2020, https://arxiv.org/abs/2004.12832).

Multi-vectors are large (3 MB for a bge-m3 document of 500 words) and need many multiplications, so documents are
embedded and compared in chunks, and larger products run in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import cast

import msgspec
import numpy as np

from shoal.core.batch_facts import merge_batch_facts
from shoal.core.input_errors import parse_input_index
from shoal.core.protocols import ModelFacts, Runner
from shoal.core.scheduling.admission import classify_traffic, count_items
from shoal.core.threads import Threads
from shoal.errors import DeadlineExceeded, InputRejected, NotFinite, RequestError, ShoalError, Unsupported
from shoal.types import Array, BatchFacts, Context, Embed, Embedded, Rerank, Scored, Vectors

NUMBERS = 2**25
"""Maximum float32 numbers in a chunk's vectors, estimated from text lengths: 128 MiB."""

CHARS_PER_TOKEN = 2
"""A conservative estimate: prose has four, other scripts one or two."""

WIDTH = 1024
"""Assumed vector width until the first vector: that of bge-m3. ColBERT's is smaller."""

PIECE = 2**28
"""Maximum multiplications per step: a few milliseconds."""

INLINE = 2**22
"""Up to this many multiplications run on the event loop: switching to a thread costs as much."""

NARROWEST = 64
"""Minimum vector width in the count of multiplications: it limits a step to 4 million dot products and results."""

PRODUCTS = PIECE // NARROWEST


def can_rerank(facts: ModelFacts) -> bool:
    """Whether the model's vectors can be used for ranking."""
    return "embed" in facts.tasks and not {"dense", "multi"}.isdisjoint(facts.vectors)


async def rerank(
    runner: Runner, task: Rerank, ctx: Context, *, threads: Threads, clock: Callable[[], float] = time.monotonic
) -> Scored:
    """Embed queries and documents, and compare their vectors. These scores have no activation, so `raw_scores` has no
    effect. Raises the errors of Runner.run, with the input indices of this task, and Unsupported for
    `max_document_tokens`."""
    if task.max_document_tokens is not None:
        raise Unsupported(
            "this model compares vectors and truncates each text at its own maximum length: omit the document limit",
            param="max_tokens_per_doc",
        )
    ranking = _Ranking(runner, task, ctx, threads, clock)
    start = 0
    while start < len(task.documents):
        start = await ranking.score_chunk(start)
    return ranking.build_result()


class _Ranking:
    """The state of one request."""

    def __init__(
        self, runner: Runner, task: Rerank, ctx: Context, threads: Threads, clock: Callable[[], float]
    ) -> None:
        self._runner = runner
        self._task = task
        # The traffic class depends on the whole request, not on its small chunks.
        self._ctx = msgspec.structs.replace(ctx, traffic=classify_traffic(ctx, count_items(task)))
        self._threads = threads
        self._clock = clock
        self._multi = "multi" in runner.facts.vectors
        self._width = runner.facts.dimension or WIDTH
        self._query: Embedded | None = None
        self._scores: list[Array] = []
        self._tokens: list[int] = []
        self._truncated = 0
        self._facts: list[BatchFacts] = []

    async def score_chunk(self, start: int) -> int:
        """Score one chunk of documents from `start` on, and return the start of the next."""
        if len(self._task.queries) == 1:
            if self._query is None:
                self._query = await self._embed(self._task.queries, "query", 0)
            queries, stop = self._query, self._chunk_end(start)
        else:
            stop = self._chunk_end(start)
            queries = await self._embed(self._task.queries[start:stop], "query", start)
        documents = await self._embed(self._task.documents[start:stop], "document", start)
        count = stop - start
        repeated = count // len(queries.tokens)
        tokens = queries.tokens * repeated
        self._tokens += [one + other for one, other in zip(tokens, documents.tokens, strict=True)]
        # A truncated query counts once for each of its documents.
        self._truncated += min(count, queries.truncated * repeated + documents.truncated)
        for size, call in self._split_pairs(queries, documents, count):
            if self._ctx.deadline <= self._clock():
                raise DeadlineExceeded(
                    "the deadline passed before all comparisons were done: send fewer inputs, or allow more time"
                )
            self._scores.append(call() if size <= INLINE else await self._threads.run(call))
        return stop

    def build_result(self) -> Scored:
        return Scored(
            scores=np.concatenate(self._scores)[:, None],
            tokens=self._tokens,
            truncated=self._truncated,
            facts=merge_batch_facts(self._facts, sum),
        )

    def _chunk_end(self, start: int) -> int:
        """Return the end of the chunk at `start`, which has at least one document."""
        task, left = self._task, NUMBERS
        for place in range(start, len(task.documents)):
            left -= self._estimate_numbers(task.documents[place])
            if len(task.queries) > 1:
                left -= self._estimate_numbers(task.queries[place])
            if left < 0:
                return max(place, start + 1)
        return len(task.documents)

    def _estimate_numbers(self, text: str) -> int:
        if not self._multi:
            return self._width
        tokens = len(text) // CHARS_PER_TOKEN + 16
        return self._width * min(tokens, self._runner.facts.max_input_tokens or tokens)

    async def _embed(self, texts: list[str], role: str, start: int) -> Embedded:
        task = Embed(
            model=self._task.model,
            inputs=[*texts],
            input_type=role,
            truncate=self._task.truncate,
            truncation_direction=self._task.truncation_direction,
            outputs=("multi",) if self._multi else ("dense",),
        )
        try:
            found = cast(Embedded, await self._runner.run(task, self._ctx))
        except ShoalError as error:
            raise self._remap_error(error, role, start, len(texts)) from None
        self._facts.append(found.facts)
        self._width = max(found.multi_vectors[0].shape[1] if self._multi else found.vectors.shape[1], 1)
        return found

    def _remap_error(self, error: ShoalError, role: str, start: int, count: int) -> ShoalError:
        """Replace the input index of a chunk in an error by that of the request."""
        named, message = parse_input_index(error)
        alone = count == 1 and isinstance(error, RequestError | InputRejected | NotFinite)
        if named is None and (not alone or isinstance(error, Unsupported)):
            return error
        place = start + (named or 0)
        placed = error.with_message(f"the query: {message}" if role == "query" else message)
        several = len(self._task.queries if role == "query" else self._task.documents) > 1
        return placed.at_input(place) if several else placed

    def _split_pairs(
        self, queries: Embedded, documents: Embedded, count: int
    ) -> Iterator[tuple[int, Callable[[], Array]]]:
        """Yield (multiplications, function that returns the scores) for the pairs, in order."""
        one = len(queries.tokens) == 1
        if not self._multi:
            step = max(1, PRODUCTS // self._width)
            for start in range(0, count, step):
                right = documents.vectors[start : start + step]
                left = queries.vectors if one else queries.vectors[start : start + step]
                yield right.size * NARROWEST, partial(cosines, np.broadcast_to(left, right.shape), right)
            return
        pairs = [
            (queries.multi_vectors[0 if one else place], document)
            for place, document in enumerate(documents.multi_vectors)
        ]
        start = size = 0
        for place, (query, document) in enumerate(pairs):
            more = query.shape[0] * document.shape[0] * max(query.shape[1], NARROWEST)
            if size + more > PIECE and place > start:
                yield size, partial(max_sims, pairs[start:place])
                start, size = place, 0
            size += more
        yield size, partial(max_sims, pairs[start:])


def cosines(left: Array, right: Array) -> Vectors:
    """Return the cosines of corresponding rows of two arrays float32 [n, d]; 0 if a row is zero."""
    a, b = left.astype(np.float64), right.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    found = np.einsum("ij,ij->i", a, b) / np.where(lengths > 0, lengths, 1.0)
    cosines: Vectors = np.clip(found, -1.0, 1.0).astype(np.float32)
    return cosines


def max_sims(pairs: Sequence[tuple[Array, Array]]) -> Vectors:
    """Return MaxSim of pairs of vectors [q, d] and [l, d] as float32 [pairs]; 0 if one side has no vectors.

    Consecutive pairs with the identical query array share one product."""
    found = []
    for _, group in groupby(pairs, key=lambda pair: id(pair[0])):
        some = list(group)
        found += _score_query(some[0][0], [document for _, document in some])
    return np.array(found, dtype=np.float32)


def _score_query(query: Array, documents: Sequence[Array]) -> list[float]:
    scores = np.zeros(len(documents), dtype=np.float32)
    there = [place for place, document in enumerate(documents) if document.size]
    if there and query.size:
        joined = np.concatenate([documents[place] for place in there])
        starts = np.cumsum([0, *(documents[place].shape[0] for place in there[:-1])])
        step = max(1, PRODUCTS // joined.shape[0])
        for first in range(0, query.shape[0], step):
            products = joined @ query[first : first + step].T
            scores[there] += np.maximum.reduceat(products, starts, axis=0).sum(axis=1)
    return scores.tolist()
