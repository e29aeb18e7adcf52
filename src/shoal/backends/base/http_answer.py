"""Complete HTTP responses, their error messages, and errors for calls that failed below HTTP.

Sources: RFC 9110 for `Retry-After`; the error formats of OpenAI, FastAPI, vLLM, llama.cpp, Ollama and
text-embeddings-inference.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cached_property

import msgspec

from shoal.backends.base.http_connection import BodyCut, ConnectTimedOut, NotConnected, NotSecured
from shoal.decoding import json_decoder
from shoal.errors import TransportFailed, UpstreamFailed

_RAW = json_decoder(msgspec.Raw)

LONGEST_WORDS = 400
LARGEST_WORDS = 64 * 2**10
"""Maximum size in bytes of a body that is parsed for an error message. Of a larger body, the beginning is shown
unchanged."""
LONGEST_RETRY_S = 3600.0

SHORTEST_SECRET = 8
"""Minimum length in bytes of a key to look for in errors. Shorter ones are dummies such as EMPTY, for servers that
require any key."""


class RequestNotSent(TransportFailed):
    """The server read nothing of the request, so it may be sent to another one."""


@dataclass  # not frozen, which makes creating one three times as expensive
class Answer:
    """A complete response. `body` is cut to the requested maximum; `is_complete` is whether it is complete. `key`:
    Shoal's own key for that server."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_complete: bool = True
    key: bytes = field(default=b"", repr=False)

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")

    @property
    def has_json_body(self) -> bool:
        """Whether the body is JSON, whatever its content type says."""
        if not self.is_complete or not self.body:
            return False
        try:
            _RAW.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return True

    @property
    def quotes_key(self) -> bool:
        """Whether the body quotes Shoal's key, which no client and no log may see."""
        return len(self.key) >= SHORTEST_SECRET and self.key in self.body.replace(b"\\/", b"/")

    @property
    def message(self) -> str:
        """The server's error message on one line; "" if there is none or if it quotes Shoal's key."""
        return "" if self.quotes_key else self.raw_message

    @cached_property
    def raw_message(self) -> str:
        """The error message, even if it quotes the key. Interpret it, but never show it."""
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
        if isinstance(body, list) and body and isinstance(body[0], dict):  # FastAPI's list of validation errors
            body = body[0].get("msg", "")
        return body if isinstance(body, str) else msgspec.json.encode(body).decode()


def is_json(content_type: str) -> bool:
    """Return whether a content type is JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Return the seconds to wait from `retry-after-ms` or `retry-after` (seconds or a date). Returns None if both are
    missing or unreadable. `now`: seconds since the Unix epoch."""
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
    """Return the error for a server that rejects Shoal's own key, or None. The operator must fix this, not the client.
    The server's message is left out because it may quote the key."""
    if answer.status not in (401, 403):
        return None
    return UpstreamFailed(
        f"the server at {where} rejects Shoal's key (status {answer.status}): the operator must set upstream_api_key to"
        " a valid key"
    )


def quote_message(answer: Answer) -> str:
    """Return the server's message in parentheses after a space, or "" if it has none."""
    return f" ({answer.message})" if answer.message else ""


def transport_error(error: OSError, where: str) -> TransportFailed:
    """Return the error for a call that failed below HTTP."""
    words = " ".join(str(error).split())[:LONGEST_WORDS] or type(error).__name__
    if isinstance(error, NotSecured):
        return RequestNotSent(
            f"no TLS connection to {where}: check its certificate, and whether its port speaks TLS ({words})"
        )
    if isinstance(error, ConnectTimedOut):
        return RequestNotSent(f"{where} does not answer: check its address and that it runs")
    if isinstance(error, NotConnected):
        return RequestNotSent(f"{where} is not reachable: check its address and that it runs ({words})")
    if isinstance(error, BodyCut):
        words = "it ended before the answer was complete"
    return TransportFailed(f"the connection to {where} broke: send the request again ({words})")
