"""A whole answer of a server over HTTP, what it says in words, and calls that failed below HTTP.

Sources: RFC 9110 for `Retry-After`; the shapes of errors of OpenAI, FastAPI, vLLM, llama.cpp, Ollama and
text-embeddings-inference.
"""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cached_property

import aiohttp
import msgspec

from shoal.decoding import json_decoder
from shoal.errors import TransportFailed, UpstreamFailed

_RAW = json_decoder(msgspec.Raw)

LONGEST_WORDS = 400
LARGEST_WORDS = 64 * 2**10
"""Bytes of a body in which the server's words are looked for; of a larger one the beginning is shown as it is."""
LONGEST_RETRY_S = 3600.0

SHORTEST_SECRET = 8
"""Bytes of a key that is looked for in refusals; shorter ones are names such as EMPTY, for servers that ask for any."""


class RequestNotSent(TransportFailed):
    """Nothing of the request was read by the server: it may go to another one."""


@dataclass(frozen=True)
class Answer:
    """A whole answer: `body` is at most as long as was asked for, and `whole` says that nothing of it is missing.
    `key`: Shoal's own for that server."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    whole: bool = True
    key: bytes = field(default=b"", repr=False)

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")

    @property
    def has_json_body(self) -> bool:
        """The body is JSON, whatever it says of itself."""
        if not self.whole or not self.body:
            return False
        try:
            _RAW.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return True

    @property
    def quotes_key(self) -> bool:
        """The body quotes Shoal's key: no client and no log may have it."""
        return len(self.key) >= SHORTEST_SECRET and self.key in self.body.replace(b"\\/", b"/")

    @property
    def message(self) -> str:
        """What the server says went wrong, on one line; "" where it says nothing, or what nobody else may read."""
        return "" if self.quotes_key else self.raw_message

    @cached_property
    def raw_message(self) -> str:
        """The same, secret or not: to be understood, not to be told."""
        if len(self.body) <= LARGEST_WORDS and self.has_json_body:
            text = self._message()
        else:
            text = "" if "html" in self.content_type else self.body[:LARGEST_WORDS].decode(errors="replace")
        return " ".join(text.split())[:LONGEST_WORDS]

    def _message(self) -> str:
        try:
            return self._decode_message()
        except RecursionError:
            return ""

    def _decode_message(self) -> str:
        body = msgspec.json.decode(self.body)
        for name in ("error", "detail", "message"):
            if isinstance(body, dict) and body.get(name):
                body = body[name]
        if isinstance(body, list) and body and isinstance(body[0], dict):  # FastAPI's list of what is not valid
            body = body[0].get("msg", "")
        return body if isinstance(body, str) else msgspec.json.encode(body).decode()


def is_json(content_type: str) -> bool:
    """Whether a content type is JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that the server asks to wait for, from `retry-after-ms` or `retry-after` (seconds or a date); None where
    it does not say, or nothing that can be read. `now`: seconds of the Unix epoch."""
    seconds = _number(headers.get("retry-after-ms"))
    if seconds is not None:
        return min(seconds / 1e3, LONGEST_RETRY_S)
    text = headers.get("retry-after")
    seconds = _number(text)
    if seconds is None and text:
        try:
            seconds = max(0.0, parsedate_to_datetime(text).timestamp() - (time.time() if now is None else now))
        except (ValueError, OverflowError):
            return None
    return None if seconds is None else min(seconds, LONGEST_RETRY_S)


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def rejected_key_error(answer: Answer, where: str) -> UpstreamFailed | None:
    """The error for a server that does not take Shoal's own key, which is the operator's matter and none of the
    client's. The server's words stay here: they may quote the key."""
    if answer.status not in (401, 403):
        return None
    return UpstreamFailed(
        f"the server at {where} refuses Shoal's key (status {answer.status}): the operator sets upstream_api_key to one"
        " that it takes"
    )


def quote_message(answer: Answer) -> str:
    """The server's words in brackets, after a space; "" where it has none."""
    return f" ({answer.message})" if answer.message else ""


def transport_error(error: Exception, where: str) -> TransportFailed:
    """For a call that failed below HTTP."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    words = " ".join(str(cause).split())[:LONGEST_WORDS] or type(error).__name__
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return RequestNotSent(
            f"no TLS connection to {where}: check its certificate, and whether its port speaks TLS ({words})"
        )
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return RequestNotSent(f"{where} does not answer: check its address and that it runs")
    if isinstance(error, aiohttp.ClientConnectorError):
        return RequestNotSent(f"{where} is not reachable: check its address and that it runs ({words})")
    if isinstance(error, aiohttp.ClientPayloadError):  # whose own words quote the parser's, and a status 400
        words = "it ended in the middle of the answer"
    return TransportFailed(f"the connection to {where} broke: send the request again ({words})")
