"""Decodes answers of text-embeddings-inference into arrays.

Numbers are float32 in JSON, so decoding is exact. serde_json writes NaN and infinity as `null`, which becomes NaN here
and fails its own row later. Anything but one row per input raises UpstreamFailed.

32 rows of 1,024 floats (360 kB) take 1.5 ms with a typed decoder and one conversion, and 6 ms with numpy's text reader.
Large answers are decoded in pieces, since the decoder holds the GIL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from shoal.decoding import json_decoder
from shoal.errors import UpstreamFailed
from shoal.types import Array, SparseVector, Vectors

PIECE_BYTES = 2**19
"""Bytes of an answer decoded in one step, about 2 ms."""


class _Term(msgspec.Struct, gc=False):
    index: int
    value: float | None


class _Prediction(msgspec.Struct, gc=False):
    label: str
    score: float | None


class SparseTerm(Protocol):
    """A term of a sparse vector, from HTTP or gRPC."""

    @property
    def index(self) -> int: ...

    @property
    def value(self) -> float | None: ...


class LabelScore(Protocol):
    """A label's score, from HTTP or gRPC."""

    @property
    def label(self) -> str: ...

    @property
    def score(self) -> float | None: ...


T = TypeVar("T")
Row = list[float | None]

_ROWS = json_decoder(list[msgspec.Raw])
_VECTORS = json_decoder(list[Row])
_SPARSE = json_decoder(list[list[_Term]])
_PREDICTIONS = json_decoder(list[list[_Prediction]])
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)


async def parse_vectors(body: bytes, count: int, where: str) -> Vectors:
    """Return the vectors of /embed: float32 [count, dimension]."""
    return await _parse_matrix(body, count, where, "vectors")


async def parse_token_vectors(body: bytes, count: int, where: str) -> Array:
    """Return the vectors of /embed_all: an object array [count] of float32 [tokens, dimension] of one dimension."""
    found = np.empty(count, dtype=object)
    for at, matrix in enumerate(_raw_rows(body, count, where)):
        found[at] = await _parse_matrix(bytes(matrix), None, where, "token vectors")
    if len({matrix.shape[1] for matrix in found}) > 1:
        raise UpstreamFailed(f"the server at {where} returned token vectors of different lengths")
    return found


async def parse_sparse_vectors(body: bytes, count: int, where: str) -> Array:
    """Return the vectors of /embed_sparse: an object array [count] of SparseVector."""
    found = np.empty(count, dtype=object)
    at = 0
    for piece in _decode_pieces(body, _SPARSE, count, where):
        for terms in piece:
            found[at] = to_sparse_vector(terms, where)
            at += 1
        await _yield_to_loop(len(body))
    return found


async def parse_scores(body: bytes, count: int, labels: Sequence[str], where: str) -> Vectors:
    """Return the scores of /predict, which sorts them by value, as float32 [count, labels] in the order of `labels`.
    The name of a single label is ignored."""
    places = {label: at for at, label in enumerate(labels)}
    found = np.empty((count, len(labels)), dtype=np.float32)
    at = 0
    for piece in _decode_pieces(body, _PREDICTIONS, count, where):
        for scores in piece:
            with np.errstate(over="ignore"):
                found[at] = order_scores(scores, places, where)
            at += 1
        await _yield_to_loop(len(body))
    return found


def order_scores(scores: Sequence[LabelScore], places: Mapping[str, int], where: str) -> list[float]:
    """Return a server's scores, each at its label's index in `places`. The name of a single label is ignored."""
    count = len(places)
    values = {places.get(each.label, 0 if count == 1 else -1): each.score for each in scores}
    values.pop(-1, None)
    if len(scores) != count or len(values) != count:
        raise UpstreamFailed(
            f"the server at {where} scored labels other than its model's ({', '.join([*places][:10])})"
        )
    return [_number(values[place]) for place in range(count)]


def to_sparse_vector(terms: Sequence[SparseTerm], where: str) -> SparseVector:
    """Return a sparse vector of terms in any order."""
    if any(not 0 <= term.index < 2**31 for term in terms):
        raise UpstreamFailed(f"the server at {where} returned a sparse vector with an index that is not a token id")
    indices = np.array([term.index for term in terms], dtype=np.int32)
    with np.errstate(over="ignore"):
        values = np.array([_number(term.value) for term in terms], dtype=np.float32)
    if (np.diff(indices) <= 0).any():
        order = np.argsort(indices, kind="stable")
        indices, values = indices[order], values[order]
        if (np.diff(indices) == 0).any():
            raise UpstreamFailed(f"the server at {where} returned a sparse vector with a duplicate index")
    return SparseVector(indices, values)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _array(rows: Sequence[Row]) -> Vectors:
    with np.errstate(over="ignore"):  # overflow to infinity fails only its own row
        return np.array(rows, dtype=np.float32)


async def _parse_matrix(body: bytes, count: int | None, where: str, what: str) -> Vectors:
    """Return the rows of a matrix, all of one length: float32 [count, dimension]."""
    rows: list[Vectors] = []
    lengths: set[int] = set()
    for piece in _decode_pieces(body, _VECTORS, count, where):
        lengths.update(map(len, piece))
        if len(lengths) != 1 or 0 in lengths:
            raise UpstreamFailed(f"the server at {where} returned {what} that are empty or of different lengths")
        rows.append(_array(piece))
        await _yield_to_loop(len(body))
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _decode_pieces(
    body: bytes, decoder: msgspec.json.Decoder[list[T]], count: int | None, where: str
) -> Iterator[list[T]]:
    """Yield the decoded rows of an answer in pieces of about PIECE_BYTES. Rows of a large answer are counted first."""
    try:
        if len(body) <= PIECE_BYTES:
            rows = decoder.decode(body)
            _check_count(len(rows), count, where)
            yield rows
            return
        for part in _split_rows(_raw_rows(body, count, where)):
            yield decoder.decode(b"[" + b",".join(part) + b"]")
    except _UNREADABLE as error:
        raise UpstreamFailed(f"the server at {where} returned an invalid response: {error}") from None


def _raw_rows(body: bytes, count: int | None, where: str) -> list[msgspec.Raw]:
    """Return the rows of an answer as raw JSON."""
    try:
        rows = _ROWS.decode(body)
    except _UNREADABLE as error:
        raise UpstreamFailed(f"the server at {where} returned an invalid response: {error}") from None
    _check_count(len(rows), count, where)
    return rows


def _check_count(rows: int, count: int | None, where: str) -> None:
    if count is not None and rows != count:
        raise UpstreamFailed(f"the server at {where} returned {rows} rows for {count} inputs")


def _split_rows(rows: Sequence[Any]) -> list[list[bytes]]:
    """Split rows into parts of at least one row and about PIECE_BYTES."""
    parts: list[list[bytes]] = [[]]
    size = 0
    for row in rows:
        data = bytes(row)
        if parts[-1] and size + len(data) > PIECE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(data)
        size += len(data)
    return parts


async def _yield_to_loop(size: int) -> None:
    """Let other tasks run if `size` is large."""
    if size > PIECE_BYTES:
        await asyncio.sleep(0)
