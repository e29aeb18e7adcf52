"""Token vectors to sentence vectors, compared with the reference for verification."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ModelFileError
from shoal.models.convert.graphs import head
from shoal.models.convert.reference import _pool
from shoal.pipelines.pooling import MODES, check_modes, pool
from shoal.types import Array

WIDTH = 5


def tokens(rows: int, length: int, *, seed: int = 0, width: int = WIDTH) -> Array:
    return np.random.default_rng(seed).normal(size=(rows, length, width)).astype(np.float32)


def test_the_modes_are_those_of_the_graphs() -> None:
    """The modes of graphs and of this module are the same."""
    assert set(MODES) == set(head._POOLINGS)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 11)), min_size=1, max_size=5),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 99),
    half=st.booleans(),
)
def test_every_mode_is_the_references(sizes: list[tuple[int, int]], mode: str, seed: int, half: bool) -> None:
    """For any lengths and skips, also past the end; computed in float32 from any type; padding holds NaN."""
    values = tokens(len(sizes), 9, seed=seed).astype(np.float16 if half else np.float32)
    for row, (length, _) in enumerate(sizes):
        values[row, length:] = np.nan
    lengths, skips = [length for length, _ in sizes], [skip for _, skip in sizes]
    pooled = pool(values, lengths, skips, mode)
    assert pooled.dtype == np.float32
    assert pooled.shape == (len(sizes), WIDTH)
    for row, (length, skip) in enumerate(sizes):
        expected = _pool(mode, values[row, :length].astype(np.float32), skip)
        np.testing.assert_allclose(pooled[row], expected, rtol=1e-6, atol=1e-6)


def test_several_modes_stand_side_by_side() -> None:
    """In the order given, as the graphs concatenate them."""
    values = tokens(2, 4)
    pooled = pool(values, [4, 2], [0, 1], "max+cls")
    np.testing.assert_array_equal(pooled[:, :WIDTH], pool(values, [4, 2], [0, 1], "max"))
    np.testing.assert_array_equal(pooled[:, WIDTH:], pool(values, [4, 2], [0, 1], "cls"))


def test_padding_rows_are_left_out() -> None:
    """The result has one row per text, whatever the size of the engine's batch."""
    assert pool(tokens(4, 3), [3, 3], [0, 0], "mean").shape == (2, WIDTH)


@pytest.mark.parametrize("mode", MODES)
def test_half_precision_sums_do_not_overflow(mode: str) -> None:
    """Sums of float16 values beyond 65504 are taken in float32."""
    values = np.full((1, 64, WIDTH), 30_000, dtype=np.float16)
    expected = _pool(mode, values[0].astype(np.float32), 0)
    np.testing.assert_allclose(pool(values, [64], [0], mode)[0], expected, rtol=1e-6)


def test_memory_stays_small() -> None:
    """One text at a time is converted to float32, never the batch."""
    values = tokens(64, 128, width=64).astype(np.float16)
    tracemalloc.start()
    try:
        pool(values, [128] * 64, [0] * 64, "mean")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < values.nbytes / 4


@pytest.mark.parametrize("pooling", ["median", "mean+", "", "cls+median"])
def test_unknown_modes_are_refused(pooling: str) -> None:
    """The error lists the known modes."""
    with pytest.raises(ModelFileError, match="Shoal knows cls, max, mean"):
        check_modes(pooling)
