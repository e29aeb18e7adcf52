from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import NotFinite, ShoalError
from shoal.pipelines.vectors import Shape, shape_rows
from shoal.types import Array


def rows(count: int, width: int = 8, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def good(entry: Array | ShoalError) -> Array:
    assert isinstance(entry, np.ndarray)
    return entry


def expected(row: Array, shape: Shape) -> Array:
    """The definition, in double precision."""
    wide = row.astype(np.float64)[: shape[0]]
    return wide / max(float(np.linalg.norm(wide)), 1e-12) if shape[1] else wide


@given(
    shapes=st.lists(st.tuples(st.sampled_from([None, 1, 3, 8]), st.booleans()), min_size=1, max_size=9),
    seed=st.integers(0, 99),
)
def test_each_row_is_cut_and_then_normalised(shapes: list[Shape], seed: int) -> None:
    """For any mix of shapes: each row has its own length and norm, in order, in contiguous float32."""
    source = rows(len(shapes), seed=seed)
    for row, shape, entry in zip(source, shapes, shape_rows(source, shapes), strict=True):
        vector = good(entry)
        assert vector.dtype == np.float32
        assert vector.flags.c_contiguous
        np.testing.assert_allclose(vector, expected(row, shape), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(None, True), (3, True), (3, False)])
def test_equal_shapes_share_one_array(shape: Shape) -> None:
    """The rows of a uniform batch are views of one contiguous array, so that a reply can be sent without copies."""
    vectors = [good(entry) for entry in shape_rows(rows(4), [shape] * 4)]
    base = vectors[0].base
    assert isinstance(base, np.ndarray)
    assert base.shape[0] == 4
    assert base.flags.c_contiguous
    assert all(vector.base is base for vector in vectors)


def test_the_engines_rows_are_not_changed() -> None:
    """The engine's output stays unchanged, because another item may use it."""
    source = rows(3)
    before = source.copy()
    source[1, 0] = before[1, 0] = np.nan
    shape_rows(source, [(None, True), (2, True), (None, False)])
    np.testing.assert_array_equal(source, before)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shapes", [[(None, True)] * 3, [(None, True), (2, False), (4, True)]])
def test_a_bad_row_fails_alone(poison: float, shapes: list[Shape]) -> None:
    """NaN or infinity anywhere in a row fails only that row."""
    source = rows(3)
    clean = [good(entry) for entry in shape_rows(source, shapes)]
    source[1, 7] = poison
    answers = shape_rows(source, shapes)
    assert isinstance(answers[1], NotFinite)
    for i in (0, 2):
        np.testing.assert_allclose(good(answers[i]), clean[i], rtol=1e-6)


@pytest.mark.parametrize("dimensions", [None, 3])
def test_zeros_stay_zeros(dimensions: int | None) -> None:
    """A vector of zeros has no direction: it comes back as zeros, not as NaN."""
    vector = good(shape_rows(np.zeros((1, 8), np.float32), [(dimensions, True)])[0])
    assert not vector.any()


@pytest.mark.parametrize("dimensions", [None, 3])
def test_huge_values_are_not_taken_for_infinity(dimensions: int | None) -> None:
    """Finite values whose square overflows float32 still give a unit vector."""
    vector = good(shape_rows(np.full((1, 8), 3e38, np.float32), [(dimensions, True)])[0])
    assert np.linalg.norm(vector) == pytest.approx(1.0)


def test_other_float_types_become_float32() -> None:
    """Half precision from an engine is widened before the norm is taken."""
    vector = good(shape_rows(rows(1).astype(np.float16), [(None, True)])[0])
    assert vector.dtype == np.float32
    assert np.linalg.norm(vector) == pytest.approx(1.0)
