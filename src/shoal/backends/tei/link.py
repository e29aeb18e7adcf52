"""The seam between an engine of text-embeddings-inference and how its server is reached: over HTTP or over gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from shoal.backends.base.usage import BYTES_PER_TOKEN, utf8_size
from shoal.backends.tei.info import Info
from shoal.errors import UpstreamFailed
from shoal.types import Array


class KeyRefused(UpstreamFailed):
    """The server does not take Shoal's own key: no batch can help."""


class BatchTooLarge(Exception):
    """The server refused a call for its number of inputs: it takes `limit`, which is less."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


class ExpectedShape(NamedTuple):
    """What an answer's rows should be: of the model of `info`, and vectors of `width` numbers where that is known."""

    info: Info
    width: int | None


Rows = tuple[Array, list[int]]
"""An array as the engine's output of that name, and the tokens of each row."""


class TokenWire(msgspec.Struct, gc=False):
    """A token as the server tells it: `start` and `stop` are bytes of prompt and text."""

    id: int
    text: str
    special: bool
    start: int | None = None
    stop: int | None = None


class Link(Protocol):
    """One server. `base` is what messages call it. A `deadline` is in seconds of `time.monotonic()`.

    Every call raises TransportFailed and DeadlineExceeded, UpstreamFailed for an answer that is none, and KeyRefused.
    After `aclose` every call raises TransportFailed.
    """

    @property
    def base(self) -> str: ...

    async def info(self, deadline: float) -> Info:
        """What the server says of its model and limits. Raises ConfigError for a server of another kind, or one that
        refuses Shoal's key, and no other than the errors of every call."""
        ...

    async def check_health(self, seconds: float) -> Info:
        """As `info`, of a server that says that it is well; TransportFailed for one that says it is not. Each question
        has so much time."""
        ...

    async def rows(
        self, name: str, items: Sequence[Any], params: Mapping[str, Any], deadline: float, shape: ExpectedShape
    ) -> Rows:
        """One output of at most so many items as the server takes at once: a call, with the options `params`. Raises
        what Engine.infer may raise, and BatchTooLarge."""
        ...

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None, deadline: float
    ) -> list[list[TokenWire]]:
        """InputRejected for what it refuses."""
        ...

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool, deadline: float) -> list[str]:
        """InputRejected for what it refuses."""
        ...

    async def aclose(self) -> None: ...


def size_in_bytes(item: Any) -> int:
    """About the bytes of an item, never 0: the server frames the shortest text with tokens, too. A list of ids is read
    as text by the server, so it counts as that may have been."""
    if isinstance(item, str):
        return utf8_size(item) + BYTES_PER_TOKEN
    if isinstance(item, tuple):
        return sum(map(utf8_size, item)) + BYTES_PER_TOKEN
    return BYTES_PER_TOKEN * len(item) + BYTES_PER_TOKEN


def estimate_tokens(size: int) -> int:
    """The tokens of an item of that size, where the server does not count."""
    return max(1, size // BYTES_PER_TOKEN)
