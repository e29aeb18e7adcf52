"""Vectors to bytes."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import orjson
import pytest

from shoal.surfaces.shared import vector_encoding


def matrix(rows: int, columns: int = 3) -> Any:
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns) / 7


def entry(index: int, row: Any) -> bytes:
    return b"[%d,%b]" % (index, vector_encoding.encode_numbers(row))


def whole(body: bytes | list[bytes]) -> Any:
    return orjson.loads(body if isinstance(body, bytes) else b"".join(body))


@pytest.mark.parametrize("rows", [0, 1, 2, 63, 64, 65, 128, 129, 300])
async def test_no_row_is_lost_between_slices(rows: int) -> None:
    """Every count of rows gives all of them, in order, as valid JSON, by either way of joining."""
    vectors = matrix(rows)
    expected = orjson.loads(orjson.dumps(vectors, option=orjson.OPT_SERIALIZE_NUMPY))
    joined = await vector_encoding.encode_rows(vectors, entry, b'{"rows":[', b"]}")
    assert whole(joined) == {"rows": [[at, row] for at, row in enumerate(expected)]}
    array = await vector_encoding.encode_array(
        rows, lambda start, stop: vector_encoding.encode_numbers(vectors[start:stop])
    )
    assert whole(array) == expected


def test_base64_is_exact() -> None:
    """The bytes of little-endian float32, for any float32."""
    row = np.array([1.5, -0.0, 3.4e38, 1e-45], dtype=np.float32)
    assert (
        base64.b64decode(vector_encoding.encode_base64(vector_encoding.to_contiguous(row[None])[0]))
        == row.astype("<f4").tobytes()
    )


def test_numbers_are_exact() -> None:
    """Shortest decimals that read back as the same float32."""
    row = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    assert (np.array(orjson.loads(vector_encoding.encode_numbers(row)), dtype=np.float32) == row).all()


def test_contiguous_copies_only_when_it_must() -> None:
    """The usual array passes as it is; a transposed, wider or foreign one is made right."""
    vectors = matrix(4)
    assert vector_encoding.to_contiguous(vectors) is vectors
    for other in (vectors.T, vectors.astype(np.float64), vectors.astype(">f4"), vectors[:, ::2]):
        contiguous = vector_encoding.to_contiguous(other)
        assert contiguous.flags.c_contiguous
        assert contiguous.dtype.str == "<f4"
        assert np.allclose(contiguous, other)


async def test_the_loop_is_free_between_slices() -> None:
    """Other tasks get their turn after every 64 rows."""
    iterations = 0

    async def other() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await vector_encoding.encode_rows(matrix(64 * 5), entry, b"[", b"]")
    task.cancel()
    assert iterations == 4


@pytest.mark.parametrize(
    "lists",
    [
        [],
        [[]],
        [[1], [], [2, 3]],
        [list(range(3 * vector_encoding.ELEMENTS))],
        [[7] * (vector_encoding.ELEMENTS + 1), [], [8]],
    ],
)
async def test_arrays_of(lists: list[list[int]]) -> None:
    """The JSON of the whole, in pieces of some thousand elements at most, with the loop free between them."""
    pieces = await vector_encoding.encode_arrays(lists, orjson.dumps)
    assert orjson.loads(b"".join(pieces)) == lists
    assert len(pieces) == 1 + sum(map(len, lists)) // vector_encoding.ELEMENTS
