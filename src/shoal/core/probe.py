"""Check that a replica gives the same vectors or scores as the other replicas before it joins. Otherwise an index could
mix vectors of two models under one name, and a ranking could depend on the replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Self, cast

import numpy as np

from shoal.core.protocols import CountedRow, Engine, Pipeline
from shoal.errors import ConfigError, EngineFailed, ShoalError
from shoal.types import Array, BatchTask, Classify, Embed, SparseVector, TextPair, VectorKind, Vectors

TEXTS = ("A shoal of herring turns as one.", "42", "Où est la bibliothèque ?", "for i in range(10): print(i)")
"""Short, dissimilar texts: two different models disagree on at least one of them."""

PAIRS: tuple[TextPair, ...] = (
    ("What does a shoal of fish do?", TEXTS[0]),
    ("What does a shoal of fish do?", TEXTS[3]),
    ("Where is the library?", TEXTS[2]),
    ("42", "The answer to everything."),
)
"""Queries with documents that answer them, and one that does not."""

LEAST_COSINE = 0.999
"""Minimum cosine between replicas: other weights, pooling or prompts fall below it; bf16 against f32 stays well
above."""

SCORE_ATOL, SCORE_RTOL = 0.1, 0.02
"""Tolerances between logits of replicas: half precision stays well within them; other weights exceed them on some
input."""

DIGEST_STEPS = 10
"""Quantization steps per vector's largest value: coarse enough that the same model nearly always gives the same
digest."""

UNIT_TOLERANCE = 5e-3
"""Tolerance of a unit norm: half precision with a thousand dimensions stays within it."""


@dataclass(frozen=True, slots=True)
class ProbeVectors:
    """A model's vectors for TEXTS: float32 [len(TEXTS), dimension], as the model returns them."""

    vectors: Vectors

    @property
    def dimension(self) -> int:
        return int(self.vectors.shape[1])

    @property
    def unit(self) -> bool:
        """Whether all rows are unit vectors, so that the model normalizes by itself."""
        norms = np.linalg.norm(self.vectors, axis=1)
        return bool(np.all(np.abs(norms - 1.0) < UNIT_TOLERANCE))

    @property
    def digest(self) -> str:
        """A digest that differs between models or prompts and is nearly always stable for the same model."""
        return _digest(self.vectors)

    def of(self, place: int) -> Self:
        """Return the vectors of a single text."""
        return type(self)(self.vectors[place : place + 1])

    def check(self, peer: ProbeVectors, name: str) -> None:
        """Raise ConfigError if `peer`, called `name`, does not give the same vectors."""
        if peer.dimension != self.dimension:
            raise ConfigError(
                f"{name} returns {peer.dimension} dimensions, but the other replicas return {self.dimension}: it is a "
                "different model; serve it under a separate name"
            )
        _check_cosine(least_cosine(self.vectors, peer.vectors), name)


@dataclass(frozen=True, slots=True)
class ProbeSparseVectors:
    """A model's answers for TEXTS: one sparse vector each."""

    vectors: list[SparseVector]

    @property
    def digest(self) -> str:
        """See ProbeVectors.digest."""
        indices = _collect_indices(self.vectors)
        rows = _to_dense(self.vectors, indices)
        kept = _quantize_rows(rows).any(axis=0)  # values near zero may be missing another time
        return _digest(rows[:, kept], indices[kept])

    def of(self, place: int) -> Self:
        """See ProbeVectors.of."""
        return type(self)(self.vectors[place : place + 1])

    def check(self, peer: ProbeSparseVectors, name: str) -> None:
        """See ProbeVectors.check."""
        indices = _collect_indices([*self.vectors, *peer.vectors])
        _check_cosine(least_cosine(_to_dense(self.vectors, indices), _to_dense(peer.vectors, indices)), name)


@dataclass(frozen=True, slots=True)
class ProbeScores:
    """A model's scores for a few inputs: float32 [inputs, labels], before activation."""

    scores: Vectors

    def of(self, place: int) -> Self:
        """See ProbeVectors.of."""
        return type(self)(self.scores[place : place + 1])

    def check(self, peer: ProbeScores, name: str) -> None:
        """Raise ConfigError if `peer`, called `name`, does not give the same scores."""
        if peer.scores.shape != self.scores.shape:
            raise ConfigError(
                f"{name} scores {peer.scores.shape[1]} labels, but the other replicas score {self.scores.shape[1]}: "
                "it is a different model; serve it under a separate name"
            )
        if not np.allclose(peer.scores, self.scores, rtol=SCORE_RTOL, atol=SCORE_ATOL):
            apart = float(np.abs(peer.scores - self.scores).max())
            raise ConfigError(
                f"{name} returns different scores than the other replicas (differing by up to {apart:.3f}): its "
                "weights differ; serve it under a separate name"
            )


def least_cosine(one: Vectors, other: Vectors) -> float:
    """Return the smallest cosine between corresponding rows of two [n, dimension] arrays. Two zero rows agree; NaN if
    only one of the two is zero."""
    with np.errstate(invalid="ignore", divide="ignore"):
        products = np.einsum("ij,ij->i", one, other)
        cosines = products / (np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1))
    cosines[~(one.any(axis=1) | other.any(axis=1))] = 1.0
    return float(cosines.min())


async def probe(engine: Engine, pipeline: Pipeline, deadline: float, texts: Sequence[str] = TEXTS) -> ProbeVectors:
    """Run `texts` through a pipeline and one replica, without normalizing. Raises the errors of either."""
    task = Embed(model="", inputs=list(texts), truncate=True, normalize=False)
    return ProbeVectors(np.stack(await _run_probe(engine, pipeline, task, deadline)).astype(np.float32))


async def probe_sparse(
    engine: Engine, pipeline: Pipeline, deadline: float, texts: Sequence[str] = TEXTS
) -> ProbeSparseVectors:
    """Like `probe`, for a model of sparse vectors."""
    task = Embed(model="", inputs=list(texts), truncate=True, normalize=False, outputs=("sparse",))
    return ProbeSparseVectors(
        [cast(SparseVector, row.sparse) for row in await _run_probe(engine, pipeline, task, deadline)]
    )


async def probe_scores(
    engine: Engine, pipeline: Pipeline, deadline: float, items: Sequence[str | TextPair] = PAIRS
) -> ProbeScores:
    """Like `probe`, for a model that scores; returns the scores of `items`."""
    task = Classify(model="", inputs=list(items), raw_scores=True, truncate=True)
    return ProbeScores(np.stack(await _run_probe(engine, pipeline, task, deadline)).astype(np.float32))


async def probe_token(engine: Engine, pipeline: Pipeline, deadline: float, token: int, kind: VectorKind) -> None:
    """Run a single token id through the model. Raises the errors of the engine and the pipeline."""
    await _run_probe(engine, pipeline, Embed(model="", inputs=[[token]], outputs=(kind,), truncate=True), deadline)


async def _run_probe(engine: Engine, pipeline: Pipeline, task: BatchTask, deadline: float) -> list[Any]:
    prepared = [_whole(each) for each in pipeline.prepare([(task, item) for item in task.items])]
    most = max(1, engine.facts.max_batch_size)
    rows: list[Any] = []
    for at in range(0, len(prepared), most):
        batch = prepared[at : at + most]
        inputs = pipeline.collate(batch, engine.facts)
        outputs = await engine.infer(inputs, batch[0].outputs, batch[0].params, deadline)
        finished = [_whole(each) for each in pipeline.finish(outputs, batch)]
        rows += [each.row if isinstance(each, CountedRow) else each for each in finished]
    if len(rows) != len(prepared):
        raise EngineFailed(f"the model returned {len(rows)} rows for {len(prepared)} inputs")
    return rows


def _check_cosine(cosine: float, name: str) -> None:
    if not cosine >= LEAST_COSINE:
        raise ConfigError(
            f"{name} returns different vectors than the other replicas (cosine {cosine:.4f}, at least {LEAST_COSINE} "
            "is required): its weights or pooling differ; serve it under a separate name"
        )


def _quantize_rows(rows: Vectors) -> Vectors:
    """Quantize rows to whole steps of their largest absolute value."""
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    steps: Vectors = np.rint(rows / np.where(largest > 0, largest, 1) * DIGEST_STEPS)
    return steps + 0.0  # avoid negative zeros


def _digest(rows: Vectors, indices: Array | None = None) -> str:
    data = repr(rows.shape).encode() + _quantize_rows(rows).astype(np.int8).tobytes()
    if indices is not None:
        data += indices.astype("<i4").tobytes()
    return blake2b(data, digest_size=8).hexdigest()


def _collect_indices(vectors: Sequence[SparseVector]) -> Array:
    """Return every index that occurs in a vector, sorted."""
    found: Array = np.unique(np.concatenate([each.indices for each in vectors]))
    return found


def _to_dense(vectors: Sequence[SparseVector], indices: Array) -> Vectors:
    """Convert sparse vectors to the rows of a dense array with one column per entry of `indices`."""
    rows = np.zeros((len(vectors), len(indices)), dtype=np.float32)
    for row, each in zip(rows, vectors, strict=True):
        row[np.searchsorted(indices, each.indices)] = each.values
    return rows


def _whole(answer: Any) -> Any:
    if isinstance(answer, ShoalError):
        raise answer
    return answer


__all__ = [
    "LEAST_COSINE",
    "PAIRS",
    "TEXTS",
    "ProbeScores",
    "ProbeSparseVectors",
    "ProbeVectors",
    "least_cosine",
    "probe",
    "probe_scores",
    "probe_sparse",
]
