"""Whether 16 bits serve a model as well as float32: the figures of a comparison, and the bounds that `auto` asks for.

The question is what a user would lose. A vector is used beside others, so what counts is how far vectors move in all
(the mean, and the hundredth that moves most) and whether pairs keep their order and texts their nearest neighbor. One
odd text decides nothing: its cosine differs with the processor, the version of the engine and the order of its sums.
The bounds lie an order of magnitude and more from what sound models measure (docs/design.md has the figures), so that
none of these flips a choice; a model that 16 bits break misses them by as much.
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
"""Figures of vectors below which `auto` takes f32: the mean cosine of a row to its f32 row, that of the worst
hundredth, the rank correlation of the similarities of all pairs, and the part of rows whose nearest neighbor stays."""

MAX_FIGURES = {"mean_difference": 0.008, "high_difference": 0.03}
"""Figures of scores above which `auto` takes f32: the mean difference, and that of the worst hundredth, in parts of
the range that the scores span."""

NOT_FINITE = 1e30
"""Stands for infinity where a number is kept as JSON, which has none."""

MAX_RANKED_ROWS = 512
"""Rows of one matrix whose pairs are put in order: more say the same, and cost the square of their number."""

MIN_NEIGHBOR_ROWS = 32
"""Rows of one matrix from which on nearest neighbors are counted: among fewer, a single tie would weigh too much."""

MAX_COMPARE_COST = 1_000_000_000_000
"""Bytes of a graph times tokens of samples that are compared: all samples of a graph of 100 MB."""

MIN_SAMPLES = 64
"""Samples that are compared at least, however large the graph."""


@dataclass(frozen=True, slots=True)
class PrecisionCheck:
    """The outcome of a precision check, worth keeping: `figures` compare `precision` with f32 over the samples; `key`
    names what they hold for: the engine, its version, the processor's arithmetic and the samples."""

    key: str
    precision: Literal["bf16", "fp16"] = "bf16"
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether `auto` takes this precision: nothing of a comparison without figures says so."""
        return bool(self.figures) and not any(_misses(name, value) for name, value in self.figures.items())

    @property
    def reason(self) -> str:
        """Each figure beside its bound, those that miss it first."""
        shown = sorted(self.figures, key=lambda name: not _misses(name, self.figures[name]))
        said = (
            f"{name.replace('_', ' ')} {self.figures[name]:.6f} {_format_bound(name, self.figures[name])}"
            for name in shown
        )
        return f"{self.precision} beside f32: {', '.join(said) or 'nothing to compare'}"


def _misses(name: str, value: float) -> bool:
    return not (value >= MIN_FIGURES[name] if name in MIN_FIGURES else value <= MAX_FIGURES[name])


def _format_bound(name: str, value: float) -> str:
    if name in MIN_FIGURES:
        return f"{'<' if _misses(name, value) else '>='} {MIN_FIGURES[name]:g}"
    return f"{'>' if _misses(name, value) else '<='} {MAX_FIGURES[name]:g}"


def compare(
    exact: Sequence[Mapping[str, Array]], fast: Sequence[Mapping[str, Array]], spec: TextSpec | None
) -> dict[str, float]:
    """The figures of two runs over the same batches, each batch as `to_comparable_rows` gives it; of several outputs
    the worst."""
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
    """The figures of LEAST over rows of vectors; all zero where a row is not finite. Two rows of zeros agree, and say
    nothing: without any other there are no figures. `ranked`: rows may be compared with one another."""
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
    """The figures of MOST, and `spearman` of the worst label, over rows of logits: of the logits in parts of the range
    that they span (at least 1), and of the scores once `activation` is over them, whichever moves further."""
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
    """The outputs that are compared, as matrices of a row each. Numbers of padding are left out: of three axes the
    tokens that are none remain, and of weights a token those of the padding are zero. Token vectors that are pooled are
    judged by what is pooled of them."""
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
    """The samples that a graph of this size is compared with: all, or rows of all lengths that are evenly spaced among
    them, so that a large model does not start later for it."""
    tokens = sum(next(iter(one.values())).size for one in samples)
    rows = sum(len(next(iter(one.values()))) for one in samples)
    step = min(-(-tokens * graph_bytes // MAX_COMPARE_COST), rows // MIN_SAMPLES)
    if step <= 1:
        return list(samples)
    return [{name: array[::step] for name, array in one.items()} for one in samples]


def _stack_rows(rows: Sequence[Array]) -> Array:
    """One matrix; narrower ones (a weight for each token) are filled with zeros."""
    width = max((one.shape[-1] for one in rows), default=0)
    filled = [np.pad(one, ((0, 0), (0, width - one.shape[-1]))) for one in rows]
    return np.concatenate(filled).astype(np.float64) if filled else np.zeros((0, 0))


def _spearman(exact: Array, fast: Array) -> float:
    """Of the similarities of all pairs; 1.0 of fewer than two pairs."""
    upper = np.triu_indices(len(exact), 1)
    return _correlation(_ranks(exact[upper]), _ranks(fast[upper]))


def _ranks(values: Array) -> Array:
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


def _correlation(left: Array, right: Array) -> float:
    return float(np.corrcoef(left, right)[0, 1]) if len(left) > 1 else 1.0


def _neighbors(exact: Array, fast: Array) -> float:
    """The part of rows whose nearest neighbor is the same."""
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
