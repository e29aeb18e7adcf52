"""The calls of a Reef server, and its errors as Shoal's."""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncGenerator
from typing import Literal, TypeVar

import msgspec

from shoal.backends.base.http_answer import Answer
from shoal.backends.base.http_client import Client
from shoal.errors import BackendError, InputRejected, Overloaded, UpstreamFailed

LIST_TIMEOUT_S = 5.0

T = TypeVar("T")


class Listed(msgspec.Struct):
    name: str
    kind: Literal["embed", "chat"]
    dimension: int = 0


class Listing(msgspec.Struct):
    models: list[Listed]


class Vectors(msgspec.Struct):
    vectors: list[list[float]]


def to_error(answer: Answer) -> BackendError | Overloaded:
    """A status other than 200. The server's words go on, its address does not."""
    if answer.status == 422:
        return InputRejected(answer.message)
    if answer.status in (429, 503):
        return Overloaded(answer.message, retry_after=1.0)
    return UpstreamFailed(f"the server answered status {answer.status}: {answer.message}")


def decode(answer: Answer, kind: type[T]) -> T:
    """Raises what `to_error` makes of the status, and UpstreamFailed for JSON of another form."""
    if answer.status != 200:
        raise to_error(answer)
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except msgspec.DecodeError as error:
        raise UpstreamFailed(f"the server's answer cannot be read: {error}") from error


async def list_models(client: Client) -> list[Listed]:
    return decode(await client.get("/models", time.monotonic() + LIST_TIMEOUT_S), Listing).models


async def stream_completion(client: Client, body: dict[str, object], deadline: float) -> AsyncGenerator[str]:
    """The text of an answer as it comes. Closing it closes the connection, which stops the server."""
    encoded = msgspec.json.encode(body)
    with await client.open_response("POST", "/complete", body=encoded, deadline=deadline) as response:
        if response.status != 200:
            raise to_error(await response.read_all(4096))
        decoder = codecs.getincrementaldecoder("utf-8")()  # a piece may end within a character
        while piece := await response.read_piece():
            if text := decoder.decode(piece):
                yield text
