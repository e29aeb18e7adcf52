"""Encodes batches as messages of text-embeddings-inference's gRPC streams, one per input, and decodes the answers.

All messages of a stream carry the same options. An invalid answer raises UpstreamFailed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import Message

from shoal.backends.base.response_limit import ANY_LABEL_BYTES, MAX_SPARSE_TERMS, MAX_VECTOR_WIDTH
from shoal.backends.tei import tei_pb2 as pb
from shoal.backends.tei.answers import order_scores, to_sparse_vector
from shoal.backends.tei.link import ExpectedShape, TokenWire, estimate_tokens, size_in_bytes
from shoal.errors import InputRejected, UpstreamFailed
from shoal.types import Array, Vectors

FLOAT_BYTES = 4

TERM_BYTES = 16
"""Bytes of a weight, a score or a token's vector in a message, without a label's name and the vector's numbers."""

SPARE_BYTES = 2**10
"""Bytes of a message without its numbers: its metadata, and fields that newer servers add."""

INPUT_BYTES = 64 * 2**10
"""Bytes for the tokens of any input, whatever its size: they include the server's own prompt."""

SIZE_BYTES = 64
"""Answer bytes per byte of text or per token id: a token's text with its offsets."""

MANY_TERMS = 2**12
"""Terms of sparse vectors converted in one step, about 2 ms."""


class Stream(NamedTuple):
    """The path of a stream and the type of its answers."""

    path: str
    answer: type[Message]


EMBED = Stream("/tei.v1.Embed/EmbedStream", pb.EmbedResponse)
EMBED_ALL = Stream("/tei.v1.Embed/EmbedAllStream", pb.EmbedAllResponse)
EMBED_SPARSE = Stream("/tei.v1.Embed/EmbedSparseStream", pb.EmbedSparseResponse)
PREDICT = Stream("/tei.v1.Predict/PredictPairStream", pb.PredictResponse)
TOKENIZE = Stream("/tei.v1.Tokenize/TokenizeStream", pb.EncodeResponse)
DECODE = Stream("/tei.v1.Tokenize/DecodeStream", pb.DecodeResponse)

STREAMS: Mapping[str, Stream] = {
    "embedding": EMBED,
    "tokens": EMBED_ALL,
    "sparse": EMBED_SPARSE,
    "scores": PREDICT,
}
"""The stream of each engine output. Pairs use Predict, whose stream accepts many queries and any kind of model."""


def build_requests(name: str, items: Sequence[Any], params: Mapping[str, Any]) -> list[Message]:
    """Return one message per item: a text, or for scores a text or a pair. Raw scores are requested, since Shoal
    applies the activation. This protocol has no unset options: None becomes the HTTP build's default, and texts are
    truncated only with `truncate`. Raises InputRejected for an item that no message can carry."""
    options: dict[str, Any] = {"truncate": bool(params.get("truncate"))}
    if params.get("truncation_direction") == "left":
        options["truncation_direction"] = pb.TRUNCATION_DIRECTION_LEFT
    try:
        if name == "scores":
            options["raw_scores"] = True
            return [
                pb.PredictPairRequest(inputs=[item] if isinstance(item, str) else item, **options) for item in items
            ]
        if params.get("prompt_name") is not None:
            options["prompt_name"] = params["prompt_name"]
        if name != "embedding":
            kind = pb.EmbedAllRequest if name == "tokens" else pb.EmbedSparseRequest
            return [kind(inputs=item, **options) for item in items]
        # Servers before 1.9 read its absence as false.
        options["normalize"] = params.get("normalize") is not False
        if params.get("dimensions") is not None:
            options["dimensions"] = params["dimensions"]
        return [pb.EmbedRequest(inputs=item, **options) for item in items]
    except (ValueError, TypeError) as error:  # a lone surrogate, or a number that is too large
        raise InputRejected(f"the input cannot be sent to the model's server: {error}") from None


async def to_array(name: str, found: Sequence[Any], shape: ExpectedShape, where: str) -> Array:
    """Return the rows in the answers of the stream for output `name`."""
    if name == "embedding":
        return _matrix([answer.embeddings for answer in found], "vectors", where)
    rows = np.empty(len(found), dtype=object)
    if name == "tokens":
        for at, answer in enumerate(found):
            rows[at] = _matrix([each.embeddings for each in answer.token_embeddings], "token vectors", where)
        if len({matrix.shape[1] for matrix in rows}) > 1:
            raise UpstreamFailed(f"the server at {where} returned token vectors of different lengths")
        return rows
    if name == "sparse":
        seen = 0
        for at, answer in enumerate(found):
            rows[at] = to_sparse_vector(answer.sparse_embeddings, where)
            seen += len(rows[at].indices)
            if seen > MANY_TERMS:
                seen = 0
                await asyncio.sleep(0)
        return rows
    places = {label: at for at, label in enumerate(shape.info.labels)}
    scores: Vectors = np.array([order_scores(answer.predictions, places, where) for answer in found], dtype=np.float32)
    return scores


def _matrix(rows: Sequence[bytes], what: str, where: str) -> Vectors:
    """Return rows of packed floats, all of one length, as a writable array float32 [rows, length]."""
    sizes = {len(row) for row in rows}
    if len(sizes) != 1 or 0 in sizes or sizes.pop() % FLOAT_BYTES:
        raise UpstreamFailed(f"the server at {where} returned {what} that are empty or of different lengths")
    return np.frombuffer(bytearray().join(rows), dtype="<f4").astype(np.float32, copy=False).reshape(len(rows), -1)


def count_tokens(found: Sequence[Any], items: Sequence[Any]) -> list[int]:
    """Return the tokens of each item, as its answer reports, or an estimate."""
    return [
        answer.metadata.compute_tokens or estimate_tokens(size_in_bytes(item))
        for answer, item in zip(found, items, strict=True)
    ]


def max_message_bytes(name: str, shape: ExpectedShape) -> int:
    """Return the maximum bytes of one answer for output `name`."""
    info, vector = shape.info, FLOAT_BYTES * (shape.width or MAX_VECTOR_WIDTH)
    if name == "embedding":
        return SPARE_BYTES + vector
    if name == "tokens":
        return SPARE_BYTES + (info.max_input_length or info.max_batch_tokens) * (vector + TERM_BYTES)
    if name == "sparse":
        return SPARE_BYTES + MAX_SPARSE_TERMS * TERM_BYTES
    if len(info.labels) == 1:
        return SPARE_BYTES + ANY_LABEL_BYTES
    return SPARE_BYTES + sum(TERM_BYTES + len(label.encode()) for label in info.labels)


def to_tokens(answer: pb.EncodeResponse) -> list[TokenWire]:
    return [
        TokenWire(
            each.id,
            each.text,
            each.special,
            each.start if each.HasField("start") else None,
            each.stop if each.HasField("stop") else None,
        )
        for each in answer.tokens
    ]


def encode(message: Message) -> bytes:
    return message.SerializeToString()
