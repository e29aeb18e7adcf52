"""Decides whether 16 bits serve a model as well as float32: comparison figures, and the bounds that `auto` applies.

The figures measure what users would notice. Vectors are compared with others, so the figures are how far vectors move
overall (the mean, and the hundredth that moves most), and whether pairs keep their order and texts their nearest
neighbor. A single odd text must not decide: its cosine differs with the processor, the engine's version and the order
of its sums. The bounds are at least an order of magnitude away from the figures of sound models (docs/design.md lists
them), so that such differences do not change the choice. A model that 16 bits break misses them by as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from shoal.core.protocols import Tensors
from shoal.specs import Activation, TextSpec
from shoal.types import Array

MIN_FIGURES = {"mean_cosine": 0.999, "low_cosine": 0.995, "spearman": 0.995, "neighbors": 0.9}
"""Bounds for vectors; `auto` takes f32 below any of them. They are the mean cosine of a row to its f32 row, that of the
worst hundredth, the rank correlation of all pairs' similarities, and the share of rows that keep their nearest
neighbor."""

MAX_FIGURES = {"mean_difference": 0.008, "high_difference": 0.03}
"""Bounds for scores; `auto` takes f32 above any of them. They are the mean difference and that of the worst hundredth,
as fractions of the range of the scores."""

NOT_FINITE = 1e30
"""Stands for infinity in JSON, which has none."""

MAX_RANKED_ROWS = 512
"""Maximum rows of one matrix whose pairs are ranked. More rows give the same result at quadratic cost."""

MIN_NEIGHBOR_ROWS = 32
"""Minimum rows of one matrix for counting nearest neighbors. Among fewer, a single tie would weigh too much."""

MAX_COMPARE_COST = 1_000_000_000_000
"""Limit of a comparison in graph bytes times sample tokens: all samples for a graph of 100 MB."""

MIN_SAMPLES = 64
"""Minimum samples to compare, however large the graph."""


@dataclass(frozen=True, slots=True)
class PrecisionCheck:
    """The stored result of a precision check. `figures` compare `precision` with f32 over the samples. `key` names what
    they hold for: the engine, its version, the processor's arithmetic and the samples."""

    key: str
    precision: Literal["bf16", "fp16"] = "bf16"
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether `auto` takes this precision. Never true without figures."""
        return bool(self.figures) and not any(_misses(name, value) for name, value in self.figures.items())

    @property
    def reason(self) -> str:
        """Each figure with its bound, failed ones first."""
        shown = sorted(self.figures, key=lambda name: not _misses(name, self.figures[name]))
        parts = (
            f"{name.replace('_', ' ')} {self.figures[name]:.6f} {_format_bound(name, self.figures[name])}"
            for name in shown
        )
        return f"{self.precision} compared with f32: {', '.join(parts) or 'no figures'}"


def _misses(name: str, value: float) -> bool:
    return not (value >= MIN_FIGURES[name] if name in MIN_FIGURES else value <= MAX_FIGURES[name])


def _format_bound(name: str, value: float) -> str:
    if name in MIN_FIGURES:
        return f"{'<' if _misses(name, value) else '>='} {MIN_FIGURES[name]:g}"
    return f"{'>' if _misses(name, value) else '<='} {MAX_FIGURES[name]:g}"


def compare(
    exact: Sequence[Mapping[str, Array]], fast: Sequence[Mapping[str, Array]], spec: TextSpec | None
) -> dict[str, float]:
    """Return the figures of two runs over the same batches, each from `to_comparable_rows`. With several outputs, the
    worst counts."""
    if spec is not None and spec.score is not None:
        output = spec.score.output
        return compare_scores([one[output] for one in exact], [one[output] for one in fast], spec.score.activation)
    found: dict[str, float] = {}
    for name in exact[0] if exact else ():
        ranked = spec is None or spec.sparse is None or name != spec.sparse.output or spec.sparse.per != "token"
        one = compare_vectors([batch[name] for batch in exact], [batch[name] for batch in fast], ranked=ranked)
        found = {key: min(value, found.get(key, value)) for key, value in one.items()} | {
            key: value for key, value in found.items() if key not in one
        }
    return found


def compare_vectors(exact: Sequence[Array], fast: Sequence[Array], *, ranked: bool = True) -> dict[str, float]:
    """Return the figures of MIN_FIGURES over rows of vectors, all zero if a row is not finite. Two rows of zeros agree
    and are ignored; without any other rows the result is empty. `ranked`: whether rows may be compared with each
    other."""
    a, b = (_stack_rows(rows) for rows in (exact, fast))
    there = a.any(axis=-1) | b.any(axis=-1)
    a, b = a[there], b[there]
    if not len(a):
        return {}
    names = tuple(MIN_FIGURES) if ranked else ("mean_cosine", "low_cosine")
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = [np.linalg.norm(rows, axis=-1, keepdims=True) for rows in (a, b)]
        if not all(np.isfinite(length).all() and length.all() for length in lengths):
            return dict.fromkeys(names, 0.0)
        a, b = a / lengths[0], b / lengths[1]
    cosines = (a * b).sum(axis=-1)
    found = {"mean_cosine": float(cosines.mean()), "low_cosine": float(np.quantile(cosines, 0.01))}
    if not ranked:
        return found
    chosen = np.unique(np.linspace(0, len(a) - 1, min(len(a), MAX_RANKED_ROWS)).astype(int))
    alike = [rows[chosen] @ rows[chosen].T for rows in (a, b)]
    found["spearman"] = _spearman(*alike)
    return found | {"neighbors": _neighbors(*alike)} if len(chosen) >= MIN_NEIGHBOR_ROWS else found


def compare_scores(exact: Sequence[Array], fast: Sequence[Array], activation: Activation) -> dict[str, float]:
    """Return the figures of MAX_FIGURES and the worst label's `spearman` over rows of logits. Differences are those of
    the logits as fractions of their range (at least 1), or of the scores after `activation`, whichever is larger."""
    a, b = (np.concatenate(rows).astype(np.float64) for rows in (exact, fast))
    if not a.size or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return dict.fromkeys(MAX_FIGURES, NOT_FINITE)
    moved = np.abs(a - b) / max(float(a.max() - a.min()), 1.0)
    if activation != "identity":
        moved = np.maximum(moved, np.abs(_activate(a, activation) - _activate(b, activation)))
    ranks = [_correlation(_ranks(one), _ranks(other)) for one, other in zip(a.T, b.T, strict=True)]
    return {
        "mean_difference": float(moved.mean()),
        "high_difference": float(np.quantile(moved, 0.99)),
        "spearman": min(ranks),
    }


def to_comparable_rows(outputs: Mapping[str, Array], feeds: Tensors, spec: TextSpec | None) -> dict[str, Array]:
    """Return the outputs to compare, as matrices with one row per item. Padding is left out: only real tokens remain of
    three axes, and token weights of padding are zero. Token vectors that are pooled are judged by the pooled result."""
    late = spec.multi.output if spec is not None and spec.multi is not None else None
    weights = (
        spec.sparse.output if spec is not None and spec.sparse is not None and spec.sparse.per == "token" else None
    )
    rows: dict[str, Array] = {}
    for name, array in outputs.items():
        if name == late:
            rows[name] = array[feeds["attention_mask"] > 0]
        elif name == weights:
            rows[name] = array * (feeds["attention_mask"] > 0)
        elif array.ndim == 2:
            rows[name] = array
    return rows


def limit_samples(samples: Sequence[Tensors], graph_bytes: int) -> list[Tensors]:
    """Return the samples to compare for a graph of this size: all of them, or evenly spaced rows of all lengths, so
    that a large model does not start later."""
    tokens = sum(next(iter(one.values())).size for one in samples)
    rows = sum(len(next(iter(one.values()))) for one in samples)
    step = min(-(-tokens * graph_bytes // MAX_COMPARE_COST), rows // MIN_SAMPLES)
    if step <= 1:
        return list(samples)
    return [{name: array[::step] for name, array in one.items()} for one in samples]


def _stack_rows(rows: Sequence[Array]) -> Array:
    """Stack rows into one matrix. Narrower ones (one weight per token) are padded with zeros."""
    width = max((one.shape[-1] for one in rows), default=0)
    filled = [np.pad(one, ((0, 0), (0, width - one.shape[-1]))) for one in rows]
    return np.concatenate(filled).astype(np.float64) if filled else np.zeros((0, 0))


def _spearman(exact: Array, fast: Array) -> float:
    """Return the rank correlation of all pairs' similarities, 1.0 for fewer than two pairs."""
    upper = np.triu_indices(len(exact), 1)
    return _correlation(_ranks(exact[upper]), _ranks(fast[upper]))


def _ranks(values: Array) -> Array:
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


def _correlation(left: Array, right: Array) -> float:
    return float(np.corrcoef(left, right)[0, 1]) if len(left) > 1 else 1.0


def _neighbors(exact: Array, fast: Array) -> float:
    """Return the share of rows with the same nearest neighbor."""
    nearest = []
    for alike in (exact, fast):
        np.fill_diagonal(alike, -np.inf)
        nearest.append(alike.argmax(axis=-1))
    return float((nearest[0] == nearest[1]).mean())


def _activate(logits: Array, activation: Activation) -> Array:
    if activation == "sigmoid":
        scores: Array = 0.5 * (1.0 + np.tanh(0.5 * logits))
        return scores
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    scores = powers / powers.sum(axis=-1, keepdims=True)
    return scores
