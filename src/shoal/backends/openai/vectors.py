"""POST /embeddings: vectors of texts or of lists of token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from typing import Any

import msgspec
import numpy as np
import pybase64

from shoal.backends.base.http_answer import Answer
from shoal.backends.base.response_limit import MAX_VECTOR_WIDTH, ResponseLimit
from shoal.backends.openai.calls import Rows
from shoal.backends.openai.wire import VectorsWire
from shoal.decoding import json_decoder
from shoal.errors import UpstreamFailed

ROWS_AT_ONCE = 64
"""Rows decoded before the event loop runs other tasks: lists of floats take about 50 us a row."""

_VECTORS = json_decoder(VectorsWire)
_FLOATS = json_decoder(list[float])
_TEXT = json_decoder(str)


class EmbeddingCalls:
    """RouteCalls for float32 [items, dimension]. Texts and id lists go in separate calls, as OpenAI requires; options
    keep their names in Shoal. Vectors are requested as base64 until the server rejects that."""

    def __init__(self) -> None:
        self.path = "/embeddings"
        self.output = "embedding"
        self._base64 = True

    def group(self, item: Any) -> Hashable | None:
        return "text" if isinstance(item, str) else "ids"

    def body(self, model: str, items: Sequence[Any], **options: Any) -> dict[str, Any]:
        form = "base64" if self._base64 else "float"
        return {"model": model, "input": list(items), "encoding_format": form, **options}

    def response_limit(self, count: int, sent: bytes, width: int | None) -> ResponseLimit:
        return ResponseLimit.of_entries(count, width or MAX_VECTOR_WIDTH)

    def adapt_to_refusal(self, answer: Answer) -> bool:
        if not (self._base64 and "encoding_format" in answer.raw_message):
            return False
        self._base64 = False
        return True

    async def read(self, answer: Answer, items: Sequence[Any], where: str) -> Rows:
        try:
            parsed = _VECTORS.decode(answer.body)
            rows: list[bytes] = [b""] * len(items)
            for place, one in enumerate(parsed.data):
                at = place if one.index is None else one.index
                if not 0 <= at < len(rows) or rows[at]:
                    raise UpstreamFailed(
                        f"the server at {where} returned {len(parsed.data)} vectors for {len(items)} texts"
                    )
                rows[at] = _float_bytes(bytes(one.embedding))
                if place % ROWS_AT_ONCE == ROWS_AT_ONCE - 1:
                    await asyncio.sleep(0)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise UpstreamFailed(f"the server at {where} returned invalid embeddings: {error}") from None
        if len(parsed.data) != len(items):
            raise UpstreamFailed(f"the server at {where} returned {len(parsed.data)} vectors for {len(items)} texts")
        if not rows[0] or any(len(row) != len(rows[0]) for row in rows):
            raise UpstreamFailed(f"the server at {where} returned vectors that are empty or of different lengths")
        values = np.frombuffer(bytearray().join(rows), dtype="<f4").reshape(len(rows), -1)
        count = parsed.usage.input_token_count if parsed.usage is not None else 0
        return Rows(values.astype(np.float32, copy=False), count)


def _float_bytes(embedding: bytes) -> bytes:
    """Return the little-endian float32 numbers of a vector in JSON. Raises ValueError and DecodeError."""
    if embedding.startswith(b'"'):
        data = pybase64.b64decode(_TEXT.decode(embedding), validate=True)
        if len(data) % 4:
            raise ValueError("the base64 of a vector is not of whole float32 numbers")
        return data
    with np.errstate(over="ignore"):  # overflow to infinity fails only its own row
        return np.asarray(_FLOATS.decode(embedding), dtype="<f4").tobytes()
