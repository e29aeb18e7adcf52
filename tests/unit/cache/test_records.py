"""How cached rows are written: keys that mean the same in every process, records that notice a changed bit."""

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
from hypothesis import given, settings
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
    """What Python calls equal is one key, here as in a dictionary; True is 1 in both."""
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
    """Borders and kinds are part of the bytes."""
    assert key_bytes(one) != key_bytes(other)


def test_what_counts_as_equal() -> None:
    """Tuples with names, numbers of numpy, and texts with half a pair, which are no UTF-8."""
    assert key_bytes(Shape(None, True)) == key_bytes((None, 1))
    assert key_bytes(np.int64(5)) == key_bytes(5)
    assert key_bytes("\ud800") != key_bytes("\ud801")


@pytest.mark.parametrize("key", [1.5, frozenset({1}), ("a", (2.0,)), Path("x")])
def test_a_key_of_another_kind_has_no_bytes(key: Any) -> None:
    """Rather than bytes that could differ the next time."""
    with pytest.raises(TypeError, match="no stable form"):
        key_bytes(key)


def test_another_process_gives_the_same_bytes() -> None:
    """Whatever its seed for hashes is."""
    key = (b"\x00\xffids", 7, (None, True), "tëxt", ("query", -1))
    program = f"from shoal.cache.records import key_bytes; print(key_bytes({key!r}).hex())"
    for seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == key_bytes(key).hex()


def rows_of(found: CountedRow) -> list[Array]:
    return collect_arrays(found.row)


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
def test_rows_come_back_to_the_bit(row: Row) -> None:
    """With tokens, kinds, shapes and types, and read-only."""
    found = decode_record(encode_record(DIGEST, CountedRow(row, 7)), DIGEST)
    assert found is not None
    assert found.tokens == 7
    assert isinstance(found.row, VectorSet) == isinstance(row, VectorSet)
    for one, other in zip(collect_arrays(found.row), collect_arrays(row), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()
        assert not one.flags.writeable


RECORD = encode_record(DIGEST, CountedRow(EVERY, 7))


@given(at=st.integers(0, len(RECORD) - 1), bit=st.integers(0, 7))
def test_a_changed_bit_is_noticed(at: int, bit: int) -> None:
    """Anywhere: in the checksum, the size, the digest or the numbers."""
    changed = bytearray(RECORD)
    changed[at] ^= 1 << bit
    assert decode_record(bytes(changed), DIGEST) is None


@given(size=st.integers(0, len(RECORD) - 1))
def test_a_record_that_is_cut_off_is_noticed(size: int) -> None:
    assert decode_record(RECORD[:size], DIGEST) is None


def test_another_key_s_record_is_none() -> None:
    """A place that holds something else by now."""
    assert decode_record(RECORD, bytes(16)) is None


def whole(payload: Any) -> bytes:
    """A record with a right checksum over what may not be a row."""
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
def test_what_is_whole_and_no_row_is_none(payload: Any) -> None:
    """Written by another version, or by somebody else; no type but a row's is ever made of it."""
    assert decode_record(whole([7, True, ["<f4", [1], b"\0" * 4]]), DIGEST) is not None
    assert decode_record(whole(payload), DIGEST) is None


class TestReadingAFile:
    def listed(self, path: Path) -> list[tuple[bytes, int, int]]:
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
        """More of them than one look into the file holds."""
        digests = [number.to_bytes(16, "big") for number in range(700)]
        written = [encode_record(digest, CountedRow(np.zeros(700, np.float32), 1)) for digest in digests]
        content = MAGIC + b"".join(written)
        assert len(content) > LARGEST
        found = self.listed(self.file(tmp_path, content))
        assert [digest for digest, _, _ in found] == digests
        assert all(content[at : at + size] == one for (_, at, size), one in zip(found, written, strict=True))

    @settings(max_examples=40)
    @given(cut=st.integers(0, 2 * len(RECORD) + len(MAGIC)))
    def test_what_is_whole_before_a_cut_is_found(self, cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
        """However much of the last record was written."""
        path = self.file(tmp_path_factory.mktemp("cut"), (MAGIC + RECORD + RECORD)[:cut])
        assert len(self.listed(path)) == max(0, cut - len(MAGIC)) // len(RECORD)

    def test_a_file_of_somebody_else_has_no_records(self, tmp_path: Path) -> None:
        assert self.listed(self.file(tmp_path, b"x" * 5000)) == []
        assert self.listed(self.file(tmp_path, b"")) == []

    @pytest.mark.parametrize("size", [0, 2**32 - 1, 3 * LARGEST])
    def test_a_senseless_size_ends_it(self, tmp_path: Path, size: int) -> None:
        """What follows cannot be found any more."""
        broken = RECORD[:4] + size.to_bytes(4, "little") + RECORD[8:]
        assert len(self.listed(self.file(tmp_path, MAGIC + RECORD + broken + RECORD))) == 1
