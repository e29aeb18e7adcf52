"""Vectors of tokens and vocabularies as bytes: the same as all at once, in turns with the loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shoal.surfaces.tei import token_vectors
from shoal.types import Array, SparseVector

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6)


def joined(pieces: bytes | list[bytes]) -> bytes:
    return pieces if isinstance(pieces, bytes) else b"".join(pieces)


async def count_turns(work: Awaitable[bytes | list[bytes]]) -> tuple[bytes | list[bytes], int]:
    """What it made, and how often others had their turn meanwhile."""
    count = 0

    async def ticking() -> None:
        nonlocal count
        while True:
            await asyncio.sleep(0)
            count += 1

    ticker = asyncio.create_task(ticking())
    body = await work
    ticker.cancel()
    await asyncio.gather(ticker, return_exceptions=True)
    return body, count


@given(
    st.lists(arrays.arrays(np.float32, st.tuples(st.integers(0, 5), st.integers(1, 4)), elements=FLOATS), max_size=4)
)
async def test_matrices(matrices: list[Array]) -> None:
    """Every number comes back as the float32 that it was; a matrix without rows is an empty list."""
    given_ = list(matrices)
    output = json.loads(joined(await token_vectors.encode_matrices(given_)))
    assert not any(each.size for each in given_)
    assert len(output) == len(matrices)
    for rows, matrix in zip(output, matrices, strict=True):
        assert np.array_equal(np.array(rows, np.float32).reshape(matrix.shape), matrix)


@given(st.lists(st.dictionaries(st.integers(0, 2**31 - 1), FLOATS, max_size=6), max_size=4))
async def test_sparse(vectors: list[dict[int, float]]) -> None:
    """In the order that they have; weights of zero are left out."""
    given_ = [
        SparseVector(np.array(sorted(each), np.int32), np.array([each[at] for at in sorted(each)], np.float32))
        for each in vectors
    ]
    output = json.loads(joined(await token_vectors.encode_sparse(given_)))
    expected = [{at: each[at] for at in sorted(each) if each[at] != 0} for each in vectors]
    assert [{np.int64(entry["index"]): entry["value"] for entry in each} for each in output] == [
        {at: pytest.approx(value, rel=1e-6) for at, value in each.items()} for each in expected
    ]
    assert all(list(entry) == ["index", "value"] for each in output for entry in each)


async def test_no_vectors() -> None:
    """Nothing is an empty list."""
    assert joined(await token_vectors.encode_matrices([])) == b"[]"
    assert (
        joined(await token_vectors.encode_sparse([SparseVector(np.empty(0, np.int32), np.empty(0, np.float32))]))
        == b"[[]]"
    )


async def test_large_ones_are_made_in_turns() -> None:
    """One matrix of a million numbers, one sparse vector of a vocabulary, and thousands of tiny ones."""
    matrix = np.ones((2600, 384), np.float32)
    made, count = await count_turns(token_vectors.encode_matrices([matrix]))
    assert joined(made) == json.dumps([matrix.tolist()], separators=(",", ":")).encode()
    assert count >= matrix.size // token_vectors.SLICE_NUMBERS - 1
    ids = np.arange(50_000, dtype=np.int32)
    made, count = await count_turns(token_vectors.encode_sparse([SparseVector(ids, np.ones(50_000, np.float32))]))
    assert len(json.loads(joined(made))[0]) == 50_000
    assert count >= 50_000 // token_vectors.SLICE_ENTRIES - 1
    for tiny in (
        token_vectors.encode_matrices([np.ones((1, 1), np.float32)] * 4096),
        token_vectors.encode_sparse([SparseVector(ids[:1], np.ones(1, np.float32))] * 4096),
    ):
        made, count = await count_turns(tiny)
        assert len(json.loads(joined(made))) == 4096
        assert count >= 10
