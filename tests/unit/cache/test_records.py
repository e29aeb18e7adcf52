"""The format of cached rows: keys that are equal in every process, and records that detect a flipped bit."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cache.records import LARGEST, MAGIC, decode_record, encode_record, key_bytes, read_records
from shoal.core.cache import collect_arrays
from shoal.core.protocols import CountedRow, Row, VectorSet
from shoal.types import Array, SparseVector

DIGEST = bytes(range(16))
HEAD = 24


class Shape(NamedTuple):
    dimensions: int | None
    normalize: bool


KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=8,
)


@given(one=KEYS, other=KEYS)
def test_equal_keys_and_no_others_have_equal_bytes(one: Hashable, other: Hashable) -> None:
    """Keys that Python considers equal are one key, as in a dictionary; True equals 1 in both."""
    assert (key_bytes(one) == key_bytes(other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "c"), ("a", "bc")),
        (("a",), "a"),
        ((("a",), "b"), ("a", ("b",))),
        ("1", 1),
        (b"a", "a"),
        (None, "n"),
        ((), None),
        ((1, 2), (12,)),
        ("3:abc", ("abc",)),
    ],
)
def test_keys_that_look_alike(one: Hashable, other: Hashable) -> None:
    """Lengths and types are part of the bytes."""
    assert key_bytes(one) != key_bytes(other)


def test_equality() -> None:
    """Named tuples, numpy numbers, and texts with a lone surrogate, which are not valid UTF-8."""
    assert key_bytes(Shape(None, True)) == key_bytes((None, 1))
    assert key_bytes(np.int64(5)) == key_bytes(5)
    assert key_bytes("\ud800") != key_bytes("\ud801")


@pytest.mark.parametrize("key", [1.5, frozenset({1}), ("a", (2.0,)), Path("x")])
def test_a_key_of_an_unstable_type_has_no_bytes(key: Any) -> None:
    """Its bytes could differ in another process."""
    with pytest.raises(TypeError, match="no stable form"):
        key_bytes(key)


def test_another_process_gives_the_same_bytes() -> None:
    """For any hash seed."""
    key = (b"\x00\xffids", 7, (None, True), "tëxt", ("query", -1))
    program = f"from shoal.cache.records import key_bytes; print(key_bytes({key!r}).hex())"
    for seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == key_bytes(key).hex()


def rows_of(counted: CountedRow) -> list[Array]:
    return collect_arrays(counted.row)


EVERY = VectorSet(
    dense=np.array([1.5, -2.0], np.float32),
    tokens=np.arange(6, dtype=np.float32).reshape(3, 2),
    sparse=SparseVector(np.array([3, 99], np.int32), np.array([0.5, 0.25], np.float32)),
    multi=np.ones((2, 4), np.float32),
)
ROWS: list[Row] = [
    np.linspace(-1, 1, 384, dtype=np.float32),
    np.array([0.125], np.float32),
    EVERY,
    VectorSet(sparse=SparseVector(np.zeros(0, np.int32), np.zeros(0, np.float32))),
    VectorSet(dense=np.array([1.0], np.float32)),
    np.arange(8, dtype=np.float32)[::2],
]


@pytest.mark.parametrize("row", ROWS)
def test_rows_round_trip_exactly(row: Row) -> None:
    """With tokens, kinds, shapes and types, and read-only."""
    decoded = decode_record(encode_record(DIGEST, CountedRow(row, 7)), DIGEST)
    assert decoded is not None
    assert decoded.tokens == 7
    assert isinstance(decoded.row, VectorSet) == isinstance(row, VectorSet)
    for one, other in zip(collect_arrays(decoded.row), collect_arrays(row), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()
        assert not one.flags.writeable


RECORD = encode_record(DIGEST, CountedRow(EVERY, 7))


@given(at=st.integers(0, len(RECORD) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_detected(at: int, bit: int) -> None:
    """In the checksum, the size, the digest or the numbers."""
    changed = bytearray(RECORD)
    changed[at] ^= 1 << bit
    assert decode_record(bytes(changed), DIGEST) is None


@given(size=st.integers(0, len(RECORD) - 1))
def test_a_truncated_record_is_detected(size: int) -> None:
    assert decode_record(RECORD[:size], DIGEST) is None


def test_another_key_s_record_is_a_miss() -> None:
    """For a position that was overwritten."""
    assert decode_record(RECORD, bytes(16)) is None


def make_record(payload: Any) -> bytes:
    """Return a record with a correct checksum over a payload that may not be a row."""
    body = msgspec.msgpack.encode(payload)
    tail = len(body).to_bytes(4, "little") + DIGEST + body
    return zlib.crc32(tail).to_bytes(4, "little") + tail


@pytest.mark.parametrize(
    "payload",
    [
        "text",
        [7],
        [7, True],
        [7, True, ["<f8", [1], b"\0" * 8]],
        [7, True, ["|O", [1], b"\0" * 8]],
        [7, True, ["<f4", [3], b"\0" * 8]],
        [7, True, ["<f4", ["x"], b"\0" * 4]],
        [7, True, [1, 2]],
        [7, True, 5],
    ],
)
def test_complete_records_that_are_not_rows_are_a_miss(payload: Any) -> None:
    """Records of another version or program; decoding never creates another type than a row."""
    assert decode_record(make_record([7, True, ["<f4", [1], b"\0" * 4]]), DIGEST) is not None
    assert decode_record(make_record(payload), DIGEST) is None


class TestReadingAFile:
    def read_all(self, path: Path) -> list[tuple[bytes, int, int]]:
        fd = os.open(path, os.O_RDONLY)
        try:
            return list(read_records(fd, path.stat().st_size))
        finally:
            os.close(fd)

    def file(self, tmp_path: Path, content: bytes) -> Path:
        path = tmp_path / "segment"
        path.write_bytes(content)
        return path

    def test_every_record_is_found_at_its_place(self, tmp_path: Path) -> None:
        """More of them than one read of the file holds."""
        digests = [number.to_bytes(16, "big") for number in range(700)]
        written = [encode_record(digest, CountedRow(np.zeros(700, np.float32), 1)) for digest in digests]
        content = MAGIC + b"".join(written)
        assert len(content) > LARGEST
        records = self.read_all(self.file(tmp_path, content))
        assert [digest for digest, _, _ in records] == digests
        assert all(content[at : at + size] == one for (_, at, size), one in zip(records, written, strict=True))

    @given(cut=st.integers(0, 2 * len(RECORD) + len(MAGIC)))
    def test_records_before_a_truncation_are_found(self, cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
        """For every length of the truncated last record."""
        path = self.file(tmp_path_factory.mktemp("cut"), (MAGIC + RECORD + RECORD)[:cut])
        assert len(self.read_all(path)) == max(0, cut - len(MAGIC)) // len(RECORD)

    def test_a_foreign_file_has_no_records(self, tmp_path: Path) -> None:
        assert self.read_all(self.file(tmp_path, b"x" * 5000)) == []
        assert self.read_all(self.file(tmp_path, b"")) == []

    @pytest.mark.parametrize("size", [0, 2**32 - 1, 3 * LARGEST])
    def test_an_invalid_size_ends_the_scan(self, tmp_path: Path, size: int) -> None:
        """Later records cannot be located."""
        broken = RECORD[:4] + size.to_bytes(4, "little") + RECORD[8:]
        assert len(self.read_all(self.file(tmp_path, MAGIC + RECORD + broken + RECORD))) == 1
