"""The interface between an engine of text-embeddings-inference and its transport, HTTP or gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from shoal.backends.base.usage import BYTES_PER_TOKEN, utf8_size
from shoal.backends.tei.info import Info
from shoal.errors import UpstreamFailed
from shoal.types import Array


class KeyRefused(UpstreamFailed):
    """The server rejects Shoal's own key, whatever the batch."""


class BatchTooLarge(Exception):
    """The server rejected a call with too many inputs: it accepts `limit`, which is fewer."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


class ExpectedShape(NamedTuple):
    """The expected shape of answer rows: the model in `info`, and the vector length `width` if known."""

    info: Info
    width: int | None


Rows = tuple[Array, list[int]]
"""One engine output as an array, and the tokens of each row."""


class TokenWire(msgspec.Struct, gc=False):
    """A token as reported by the server: `start` and `stop` are byte offsets in prompt and text."""

    id: int
    text: str
    special: bool
    start: int | None = None
    stop: int | None = None


class Link(Protocol):
    """One server. `base` is its name in messages. A `deadline` is in seconds of `time.monotonic()`.

    Every call raises TransportFailed and DeadlineExceeded, UpstreamFailed for an invalid answer, and KeyRefused. After
    `aclose` every call raises TransportFailed.
    """

    @property
    def base(self) -> str: ...

    async def info(self, deadline: float) -> Info:
        """Return the server's model and limits. Beyond the errors of every call it only raises ConfigError, for another
        kind of server or one that rejects Shoal's key."""
        ...

    async def check_health(self, seconds: float) -> Info:
        """Like `info`, but also check the server's health; raises TransportFailed if it reports a problem. `seconds` is
        the timeout of each request."""
        ...

    async def rows(
        self, name: str, items: Sequence[Any], params: Mapping[str, Any], deadline: float, shape: ExpectedShape
    ) -> Rows:
        """Return one output of the items, in one call with the options `params`. Raises the errors of Engine.infer, and
        BatchTooLarge for more items than the server accepts."""
        ...

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None, deadline: float
    ) -> list[list[TokenWire]]:
        """Tokenize texts. Raises InputRejected for a text that the server rejects."""
        ...

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool, deadline: float) -> list[str]:
        """Decode token ids. Raises InputRejected for ids that the server rejects."""
        ...

    async def aclose(self) -> None: ...


def size_in_bytes(item: Any) -> int:
    """Return the approximate size of an item, never 0: the server adds special tokens even to an empty text. Token ids
    count as the text they may stand for."""
    if isinstance(item, str):
        return utf8_size(item) + BYTES_PER_TOKEN
    if isinstance(item, tuple):
        return sum(map(utf8_size, item)) + BYTES_PER_TOKEN
    return BYTES_PER_TOKEN * len(item) + BYTES_PER_TOKEN


def estimate_tokens(size: int) -> int:
    """Estimate the tokens of an item of `size` bytes, for servers that report no count."""
    return max(1, size // BYTES_PER_TOKEN)
