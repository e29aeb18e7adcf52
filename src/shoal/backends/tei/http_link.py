"""Link to a text-embeddings-inference server over HTTP."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from shoal.backends.base.http_answer import Answer, quote_message
from shoal.backends.base.http_client import Client
from shoal.backends.base.response_limit import ResponseLimit
from shoal.backends.base.usage import split_proportionally
from shoal.backends.tei import answers
from shoal.backends.tei.calls import ROUTES, build_body
from shoal.backends.tei.errors import engine_error, parse_batch_limit
from shoal.backends.tei.info import Info, parse_info
from shoal.backends.tei.link import (
    BatchTooLarge,
    ExpectedShape,
    KeyRefused,
    Rows,
    TokenWire,
    estimate_tokens,
    size_in_bytes,
)
from shoal.decoding import json_decoder
from shoal.errors import ShoalError, TransportFailed, UpstreamFailed

TOKENS = "x-compute-tokens"

INPUT_BYTES = 64 * 2**10
"""Bytes for the answer of any input, whatever its size: it includes the server's own prompt."""

SIZE_BYTES = 256
"""Answer bytes per byte of text or per token id: a token's text with keys, offsets and escapes."""

T = TypeVar("T")

_TOKENS = json_decoder(list[list[TokenWire]])
_TEXTS = json_decoder(list[str])


class HttpLink:
    """Link over the routes of the HTTP build. The token count of a call (`x-compute-tokens`) is divided in proportion
    to its input sizes."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.base = client.base

    async def info(self, deadline: float) -> Info:
        return parse_info(await self.client.get("/info", deadline), self.base)

    async def check_health(self, seconds: float) -> Info:
        answer = await self.client.get("/health", time.monotonic() + seconds)
        if answer.status >= 500:
            raise TransportFailed(f"{self.base}/health returns status {answer.status}{quote_message(answer)}")
        return await self.info(time.monotonic() + seconds)

    async def rows(
        self, name: str, items: Sequence[Any], params: Mapping[str, Any], deadline: float, shape: ExpectedShape
    ) -> Rows:
        count, route = len(items), ROUTES[name]
        limit = _response_limit(name, count, shape)
        answer = await self.client.post(route, build_body(route, items, params), deadline, max_bytes=limit.size)
        if answer.status != 200:
            raise self._to_error(answer, count)
        body, where = answer.body, self.base
        limit.check(body, where)
        if "html" in answer.content_type:
            raise UpstreamFailed(
                f"{where} answers with a web page: check the address, and any proxy in front of the server"
            )
        if name == "embedding":
            array = await answers.parse_vectors(body, count, where)
        elif name == "tokens":
            array = await answers.parse_token_vectors(body, count, where)
        elif name == "sparse":
            array = await answers.parse_sparse_vectors(body, count, where)
        else:
            array = await answers.parse_scores(body, count, shape.info.labels, where)
        return array, _count_tokens(answer, items)

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None, deadline: float
    ) -> list[list[TokenWire]]:
        options = {"add_special_tokens": add_special_tokens} | ({"prompt_name": prompt_name} if prompt_name else {})
        body = msgspec.json.encode({"inputs": texts, **options})
        return await self._post_and_decode("/tokenize", body, _TOKENS, len(texts), deadline)

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool, deadline: float) -> list[str]:
        body = msgspec.json.encode({"ids": ids, "skip_special_tokens": skip_special_tokens})
        return await self._post_and_decode("/decode", body, _TEXTS, len(ids), deadline)

    async def aclose(self) -> None:
        await self.client.aclose()

    async def _post_and_decode(
        self, path: str, body: bytes, decoder: msgspec.json.Decoder[list[T]], count: int, deadline: float
    ) -> list[T]:
        max_bytes = INPUT_BYTES * count + SIZE_BYTES * len(body)
        answer = await self.client.post(path, body, deadline, max_bytes=max_bytes)
        if answer.status != 200:
            raise engine_error(answer, self.base)
        try:
            rows = decoder.decode(answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UpstreamFailed(f"the server at {self.base} returned invalid tokens: {error}") from None
        if len(rows) != count:
            raise UpstreamFailed(f"the server at {self.base} returned {len(rows)} rows for {count} inputs")
        return rows

    def _to_error(self, answer: Answer, count: int) -> ShoalError | BatchTooLarge:
        limit = parse_batch_limit(answer)
        if limit is not None and limit < count:
            return BatchTooLarge(limit)
        error = engine_error(answer, self.base)
        return KeyRefused(error.message) if answer.status in (401, 403) else error


def _response_limit(name: str, count: int, shape: ExpectedShape) -> ResponseLimit:
    """Return the maximum size of an answer of `count` rows."""
    info = shape.info
    if name == "embedding":
        return ResponseLimit.of_vectors(count, shape.width)
    if name == "tokens":
        return ResponseLimit.of_tokens(count, info.max_input_length or info.max_batch_tokens, shape.width)
    return ResponseLimit.of_sparse(count) if name == "sparse" else ResponseLimit.of_scores(count, info.labels)


def _count_tokens(answer: Answer, items: Sequence[Any]) -> list[int]:
    """Return the tokens of each item: the call's count divided by size, or an estimate if the server reports none."""
    header = answer.headers.get(TOKENS, "")
    known = header.isascii() and header.isdigit() and 0 < len(header) < 16
    if known and len(items) == 1:
        return [int(header)]
    sizes = [size_in_bytes(item) for item in items]
    return split_proportionally(int(header), sizes) if known else [estimate_tokens(size) for size in sizes]
