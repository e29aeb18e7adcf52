"""Narrow numbers: against sentence-transformers' packing, and what the range costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shoal.surfaces.shared.quantization import Precision, quantize

KINDS: list[Precision] = ["int8", "uint8", "binary", "ubinary"]
VECTORS = st.integers(1, 40).flatmap(
    lambda width: arrays(np.float32, (3, width), elements=st.floats(-1, 1, width=32, allow_nan=False))
)


def test_by_hand() -> None:
    """Signs from the highest bit on, nought is no sign; halves of the range go to the even number."""
    row = np.array([1, -1, 0, 0.5, -0.5, 0.25, 1e-9, -1e-9, 2], dtype=np.float32)
    assert quantize(row, "ubinary").tolist() == [0b10010110, 0b10000000]
    assert quantize(row, "binary").tolist() == [0b10010110 - 128, 0]
    assert quantize(row, "int8").tolist() == [127, -127, 0, 64, -64, 32, 0, 0, 127]
    assert quantize(row, "uint8").tolist() == [255, 1, 128, 192, 64, 160, 128, 128, 255]
    assert quantize(row, "float") is row


@given(VECTORS)
def test_each_row_by_itself(vectors: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
    """Alone or among others: the same bytes, of the right type and width."""
    width = vectors.shape[1]
    for kind in KINDS:
        whole = quantize(vectors, kind)
        assert whole.dtype == (np.uint8 if kind in ("uint8", "ubinary") else np.int8)
        assert whole.shape == (3, width if "int" in kind else -(-width // 8))
        for at, row in enumerate(vectors):
            assert np.array_equal(quantize(row, kind), whole[at])


@given(VECTORS)
def test_quantized_values(vectors: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
    """int8 is within half a step of the value; the unsigned types are the signed ones and 128; bits are signs."""
    small = quantize(vectors, "int8").astype(np.float64)
    assert (np.abs(small / 127 - vectors) <= 0.5 / 127 + 1e-7).all()
    assert np.array_equal(quantize(vectors, "uint8").astype(int), small + 128)
    bits = quantize(vectors, "ubinary")
    assert np.array_equal(np.unpackbits(bits, axis=1, count=vectors.shape[1]), vectors > 0)
    assert np.array_equal(quantize(vectors, "binary").astype(int) + 128, bits)


@pytest.mark.parametrize(("width", "least"), [(384, 0.998), (1024, 0.99)])
def test_quantization_error(width: int, least: float) -> None:
    """The cosine of a vector with what int8 made of it."""
    vectors = np.random.default_rng(7).normal(size=(64, width)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    small = quantize(vectors, "int8").astype(np.float32)
    cosines = (vectors * small).sum(axis=1) / np.linalg.norm(small, axis=1)
    assert cosines.min() > least
