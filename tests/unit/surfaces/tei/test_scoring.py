"""Scores of text-embeddings-inference: sigmoid, softmax, and who comes first of equals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.surfaces.tei.scoring import apply_activation, sort_descending

LOGITS = st.floats(width=32, min_value=-200, max_value=200)


@given(LOGITS)
def test_one_label_has_a_sigmoid(logit: float) -> None:
    """Also where the logit is far from 0, without a warning."""
    (score,) = apply_activation(np.array([[logit]], np.float32), raw=False)[0]
    assert score == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-5, abs=1e-37)


@given(st.lists(LOGITS, min_size=2, max_size=6))
def test_several_have_a_softmax(logits: list[float]) -> None:
    """They sum to 1, in the order of the logits; -100 beside 5 is no NaN, as it is in the original."""
    scores = apply_activation(np.array([logits], np.float32), raw=False)[0]
    powers = [math.exp(each - max(logits)) for each in logits]
    assert scores.tolist() == pytest.approx([each / sum(powers) for each in powers], rel=1e-4, abs=1e-37)
    assert float(scores.sum()) == pytest.approx(1, abs=1e-5)


def test_raw_scores_are_as_they_are() -> None:
    """The very array."""
    logits = np.array([[3.0, -4.0]], np.float32)
    assert apply_activation(logits, raw=True) is logits


@given(st.lists(st.integers(-3, 3), max_size=12))
def test_of_equal_scores_the_later_comes_first(scores: list[int]) -> None:
    """A stable ascending sort, read backwards."""
    order = sort_descending(np.array(scores, np.float32))
    assert order == sorted(range(len(scores)), key=lambda at: (scores[at], at), reverse=True)
