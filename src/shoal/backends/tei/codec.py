"""Exposes the tokenizer of a text-embeddings-inference server to clients."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from shoal.backends.tei.engine import TeiEngine
from shoal.backends.tei.link import TokenWire
from shoal.core.protocols import Token
from shoal.errors import InputRejected, InvalidValue, Unavailable
from shoal.types import Array

ASK_S = 30.0
"""Timeout in seconds of a call: tokenization has no deadline of its own."""

T = TypeVar("T")


class TeiCodec:
    """TextCodec over the first available server; a call has as many inputs as the server accepts.

    The server's offsets, bytes in prompt and text, become character offsets. Besides InvalidValue it raises Unavailable
    and TransportFailed while no server is available, and UpstreamFailed.
    """

    def __init__(self, engines: Sequence[TeiEngine]) -> None:
        self._engines = engines

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None
    ) -> list[list[Token]]:
        found: list[list[Token]] = []
        for some in self._split(texts):
            link = self._ready_engine().link
            call = link.tokenize(
                some, add_special_tokens=add_special_tokens, prompt_name=prompt_name, deadline=time.monotonic() + ASK_S
            )
            rows = await _await_answer(call, "inputs")
            found += [to_tokens(text, row) for text, row in zip(some, rows, strict=True)]
        return found

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        found: list[str] = []
        for some in self._split(ids):
            link = self._ready_engine().link
            call = link.decode(some, skip_special_tokens=skip_special_tokens, deadline=time.monotonic() + ASK_S)
            found += await _await_answer(call, "ids")
        return found

    def _split(self, items: Sequence[T]) -> list[list[T]]:
        most = self._ready_engine().info.max_client_batch_size
        return [list(items[at : at + most]) for at in range(0, len(items), most)]

    def _ready_engine(self) -> TeiEngine:
        found = next((engine for engine in self._engines if engine.ready()), None)
        if found is None:
            raise Unavailable("no server of the model is available: try again soon", retry_after=1.0)
        return found


async def _await_answer(call: Coroutine[Any, Any, T], param: str) -> T:
    """Await a call. A rejection by the server becomes InvalidValue: it concerns the client's input, not a batch."""
    try:
        return await call
    except InputRejected as error:
        raise InvalidValue(error.message, param=param) from None


def to_tokens(text: str, row: Sequence[TokenWire]) -> list[Token]:
    """Return a text's tokens with offsets in characters.

    A prompt that the server puts before the text is not known here. Offsets are then computed from the preceding
    tokens, counting one character per byte between tokens, which is correct for spaces.
    """
    data = text.encode()
    if len(data) == len(text) and _fits(data, row):
        return [Token(one.id, one.text, one.special, one.start, one.stop) for one in row]
    places = _char_offsets(data) if _fits(data, row) else _map_offsets(row)
    return [
        Token(
            one.id,
            one.text,
            one.special,
            None if one.start is None else int(places[one.start]),
            None if one.stop is None else int(places[one.stop]),
        )
        for one in row
    ]


def _fits(data: bytes, row: Sequence[TokenWire]) -> bool:
    """Whether the tokens are slices of the text, without a preceding prompt."""
    return all(
        0 <= one.start <= one.stop <= len(data) and data[one.start : one.stop].decode(errors="replace") == one.text
        for one in row
        if one.start is not None and one.stop is not None
    )


def _char_offsets(data: bytes) -> Array:
    """Return the index of the character that contains each byte of a UTF-8 text, followed by the character count."""
    begins = (np.frombuffer(data, dtype=np.uint8) & 0xC0) != 0x80
    return np.append(np.cumsum(begins) - 1, begins.sum())


def _map_offsets(row: Sequence[TokenWire]) -> dict[int, int]:
    places: dict[int, int] = {}
    byte = char = 0
    for one in row:
        if one.start is None or one.stop is None:
            continue
        if one.start >= byte:
            char += one.start - byte
            byte = one.start
        places.setdefault(one.start, char)
        if one.stop > byte:
            size = one.stop - one.start
            char += len(one.text) if len(one.text.encode(errors="surrogatepass")) == size else one.stop - byte
            byte = one.stop
        places.setdefault(one.stop, char)
    return places
