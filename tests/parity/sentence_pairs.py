"""200 pairs of sentences, and the comparison of two answers for them: vectors one by one, and the order of the
pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from shoal.core.similarity import cosines, max_sims
from shoal.models.convert.samples import load_sentence_pairs
from shoal.models.convert.verify import min_cosine
from shoal.types import Array, SparseVector

PAIRS = list(load_sentence_pairs())
FIRSTS, SECONDS = [first for first, _ in PAIRS], [second for _, second in PAIRS]
GROUPS = {first: [second for _, second in pairs] for first, pairs in groupby(PAIRS, key=lambda pair: pair[0])}

VOCABULARY = 512
"""Larger than the vocabulary of every tiny model."""

TIE = 1e-6
"""Scores closer than this (times the largest one if above 1) count as ties: float32 has seven digits, and summing in
another order changes the last ones."""


@dataclass(frozen=True, eq=False)
class Answer:
    """`rows`: vectors [n, d], or scores [pairs, labels], of the first sentences and then of the second ones. `scores`
    [pairs, columns]: values that rank the pairs, each column separately; None if nothing is ranked."""

    rows: Sequence[Array]
    scores: Array | None
    vectors: bool = True


class Order(NamedTuple):
    """`exchanged`: couples of pairs with an order in the reference and another or none in the answer; `apart`: those
    that are not ties. `spearman`: of the worst column."""

    exchanged: int
    apart: int
    spearman: float


class Agreement(NamedTuple):
    """`min_cosine` is None for scores, `order` if nothing is ranked."""

    min_cosine: float | None
    max_difference: float
    order: Order | None


def agreement(got: Answer, expected: Answer) -> Agreement:
    assert [row.shape for row in got.rows] == [row.shape for row in expected.rows]
    mine, right = (np.concatenate(one.rows) for one in (got, expected))
    return Agreement(
        min_cosine=min_cosine(mine, right) if expected.vectors else None,
        max_difference=float(np.abs(mine - right).max()),
        order=None if got.scores is None or expected.scores is None else order(got.scores, expected.scores),
    )


def order(got: Array, expected: Array) -> Order:
    """Compare the orders of two sets of scores [pairs, columns]."""
    assert got.shape == expected.shape
    orders = [_order(*columns) for columns in zip(got.T, expected.T, strict=True)]
    return Order(
        sum(one.exchanged for one in orders), sum(one.apart for one in orders), min(one.spearman for one in orders)
    )


def _order(got: Array, expected: Array) -> Order:
    above = np.subtract.outer(expected, expected).astype(np.float64)
    wrong = (above > 0) & (np.subtract.outer(got, got) <= 0)
    tie = TIE * max(1.0, float(np.abs(expected).max()))
    spearman = float(np.corrcoef(_ranks(got), _ranks(expected))[0, 1])
    return Order(int(wrong.sum()), int((wrong & (above > tie)).sum()), spearman)


def _ranks(values: Array) -> Array:
    """Ranks from 1; equal values share the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Array = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def dense_answer(first: Array, second: Array) -> Answer:
    """Ranked by cosine."""
    return Answer([first, second], cosines(first, second)[:, None])


def sparse_answer(first: Sequence[SparseVector], second: Sequence[SparseVector]) -> Answer:
    """Ranked by dot product."""
    sides = [np.zeros((len(PAIRS), VOCABULARY), np.float32) for _ in range(2)]
    for side, vectors in zip(sides, (first, second), strict=True):
        for row, each in zip(side, vectors, strict=True):
            row[each.indices] = each.values
    return Answer(sides, (sides[0] * sides[1]).sum(axis=1, keepdims=True))


def multi_answer(first: Sequence[Array], second: Sequence[Array]) -> Answer:
    """Ranked by MaxSim."""
    return Answer([*first, *second], max_sims([*zip(first, second, strict=True)])[:, None])


def score_answer(scores: Array) -> Answer:
    """Ranked by each label's score."""
    return Answer([scores], scores, vectors=False)
