"""Reranking by vectors: what a model that only embeds makes of queries and documents.

One dense vector a text is compared by cosine; vectors of late interaction by MaxSim: over the query's vectors, the sum
of each one's largest dot product with any of the document's (Khattab and Zaharia 2020, https://arxiv.org/abs/2004.12832).
"""

from __future__ import annotations

from typing import cast

import numpy as np

from shoal.core.protocols import ModelFacts, Runner
from shoal.errors import Unsupported
from shoal.types import Array, BatchFacts, Context, Embed, Embedded, Rerank, Scored, Vectors


def can(facts: ModelFacts) -> bool:
    """Whether a model's vectors can rank."""
    return "embed" in facts.tasks and not {"dense", "multi"}.isdisjoint(facts.vectors)


async def rerank(runner: Runner, task: Rerank, ctx: Context) -> Scored:
    """Embed queries and documents, each distinct text once, and compare. There is nothing raw about these scores, so
    `raw_scores` changes nothing. Raises as Runner.run does, and Unsupported for `max_document_tokens`."""
    if task.max_document_tokens is not None:
        raise Unsupported(
            "this model compares vectors and cuts each text at its own length: leave the limit of a document out",
            param="max_tokens_per_doc",
        )
    kind = "multi" if "multi" in runner.facts.vectors else "dense"
    queries = await _embedded(runner, task, ctx, task.queries, "query", kind)
    documents = await _embedded(runner, task, ctx, task.documents, "document", kind)
    lefts = queries.places * len(task.documents) if len(task.queries) == 1 else queries.places
    pairs = list(zip(lefts, documents.places, strict=True))
    if kind == "multi":
        scores = [max_sim(queries.multi[left], documents.multi[right]) for left, right in pairs]
    else:
        left, right = (np.array(side) for side in zip(*pairs, strict=True))
        scores = cosines(queries.dense[left], documents.dense[right]).tolist()
    return Scored(
        scores=np.asarray(scores, dtype=np.float32)[:, None],
        tokens=[queries.tokens[left] + documents.tokens[right] for left, right in pairs],
        truncated=queries.found.truncated + documents.found.truncated,
        facts=_slower(queries.found.facts, documents.found.facts),
    )


def cosines(left: Array, right: Array) -> Vectors:
    """Of the rows of float32 [n, d] with each other; 0 where one has no length."""
    a, b = left.astype(np.float64), right.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    found = np.einsum("ij,ij->i", a, b) / np.where(lengths > 0, lengths, 1.0)
    cosines: Vectors = np.clip(found, -1.0, 1.0).astype(np.float32)
    return cosines


def max_sim(query: Array, document: Array) -> float:
    """MaxSim of vectors [q, d] and [l, d]; 0 where one side has none."""
    if not query.size or not document.size:
        return 0.0
    return float((query @ document.T).max(axis=1).sum())


class _Side:
    """Distinct texts of one side, and where each text of the request is among them."""

    def __init__(self, found: Embedded, places: list[int]) -> None:
        self.found = found
        self.places = places
        self.dense = found.vectors
        self.multi = found.multi_vectors
        self.tokens = found.tokens


async def _embedded(runner: Runner, task: Rerank, ctx: Context, texts: list[str], role: str, kind: str) -> _Side:
    order = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    asked = Embed(
        model=task.model,
        inputs=list(order),
        input_type=role,
        truncate=task.truncate,
        truncation_direction=task.truncation_direction,
        outputs=("multi",) if kind == "multi" else ("dense",),
    )
    found = cast(Embedded, await runner.run(asked, ctx))
    return _Side(found, [order[text] for text in texts])


def _slower(one: BatchFacts, other: BatchFacts) -> BatchFacts:
    return max(one, other, key=lambda facts: facts.queue_ms + facts.infer_ms)
