"""Logits to scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import NotFinite
from shoal.pipelines.scores import apply_activation, score_rows
from shoal.specs import Activation
from shoal.types import Array

LOGITS = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=5)


@given(logits=LOGITS)
def test_softmax_is_over_the_labels(logits: list[float]) -> None:
    """Equal to the plain formula in double precision, where that does not overflow; a distribution always."""
    row = np.array([logits], dtype=np.float32)
    scores = apply_activation(row, "softmax")
    assert scores.dtype == np.float32
    assert scores.sum() == pytest.approx(1.0, abs=1e-5)
    shifted = row.astype(np.float64) - row.max()
    np.testing.assert_allclose(scores, np.exp(shifted) / np.exp(shifted).sum(), atol=1e-6)


@given(logits=LOGITS)
def test_sigmoid_is_of_each_label(logits: list[float]) -> None:
    """Of any logit, without overflow, and the complement of its opposite's."""
    row = np.array([logits], dtype=np.float32)
    scores = apply_activation(row, "sigmoid")
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-row.astype(np.float64).clip(-700, 700))), atol=1e-6)
    np.testing.assert_allclose(scores + apply_activation(-row, "sigmoid"), 1, atol=1e-6)


@pytest.mark.parametrize("activation", ["identity", "sigmoid", "softmax"])
def test_raw_rows_stay_as_they_are_beside_others(activation: Activation) -> None:
    """Each row has its own activation."""
    logits: Array = np.array([[1.0, -2.0], [1.0, -2.0]], dtype=np.float32)
    raw, scored = score_rows(logits, activation, [True, False])
    np.testing.assert_array_equal(raw, logits[0])
    np.testing.assert_array_equal(scored, apply_activation(logits, activation)[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("activation", ["identity", "sigmoid", "softmax"])
def test_a_row_that_is_no_number_fails_alone(bad: float, activation: Activation) -> None:
    """For every activation."""
    logits: Array = np.array([[1.0, 2.0], [bad, 2.0], [3.0, 4.0]], dtype=np.float16)
    first, second, third = score_rows(logits, activation, [False, True, False])
    assert isinstance(second, NotFinite)
    assert isinstance(first, np.ndarray)
    assert isinstance(third, np.ndarray)
    assert first.dtype == third.dtype == np.float32
