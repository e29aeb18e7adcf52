"""What an OpenAI-compatible server answers when it fails, to what Shoal raises: one table for each of its two uses.

Sources: OpenAI's own statuses, those of vLLM, llama.cpp, Ollama and text-embeddings-inference, and RFC 9110 for
`Retry-After`.
"""

from __future__ import annotations

import math
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec

from shoal.errors import (
    EngineFailed,
    InputRejected,
    OutOfMemory,
    Overloaded,
    ShoalError,
    TransportFailed,
    UpstreamRefused,
)

LONGEST_WORDS = 400
LONGEST_RETRY_S = 3600.0

SHORTEST_SECRET = 8
"""Bytes of a key that is looked for in refusals; shorter ones are names such as EMPTY, for servers that ask for any."""

_MEMORY = ("out of memory", "bad_alloc", "failed to allocate", "cannot allocate")
_ERROR = msgspec.json.Decoder(dict[str, Any])
_NO_MODEL = re.compile(r"model.*(not found|not exist|unknown)|(unknown|no such) model|model_not_found", re.IGNORECASE)
_NO_TASK = re.compile(
    r"not support(ed)?\b.*\b(chat|completions|embeddings?)\b|\b(chat|completions|embeddings?)\b.*\bnot supported"
    r"|(cannot|does not) (generate|embed)",
    re.IGNORECASE,
)


class Unreached(TransportFailed):
    """Nothing of the request was read by the server: it may go to another one."""


@dataclass(frozen=True, slots=True)
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
    def json(self) -> bool:
        """The body is JSON, whatever it says of itself."""
        if not self.whole or not self.body:
            return False
        try:
            msgspec.json.decode(self.body, type=msgspec.Raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return True

    @property
    def secret(self) -> bool:
        """The body quotes Shoal's key: no client and no log may have it."""
        return len(self.key) >= SHORTEST_SECRET and self.key in self.body.replace(b"\\/", b"/")

    @property
    def words(self) -> str:
        """What the server says went wrong, on one line; "" where it says nothing, or what nobody else may read."""
        return "" if self.secret else self.own_words

    @property
    def own_words(self) -> str:
        """The same, secret or not: to be understood, not to be told."""
        text = (
            self._message()
            if self.json
            else ("" if "html" in self.content_type else self.body.decode(errors="replace"))
        )
        return " ".join(text.split())[:LONGEST_WORDS]

    def _message(self) -> str:
        try:
            return self._told()
        except RecursionError:
            return ""

    def _told(self) -> str:
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


def lacks_model(answer: Answer) -> bool:
    """The server is there, and the model is not: it says so with 404, or with 400 in words."""
    return answer.status in (400, 404) and _NO_MODEL.search(answer.own_words) is not None


def lacks_route(answer: Answer) -> bool:
    """The server has no such route, or cannot do for this model what it is for."""
    if answer.status in (404, 405, 501):
        return not lacks_model(answer)
    return answer.status == 400 and _NO_TASK.search(answer.own_words) is not None


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


def refused_key(answer: Answer, where: str) -> EngineFailed | None:
    """The error for a server that does not take Shoal's own key, which is the operator's matter and none of the
    client's. The server's words stay here: they may quote the key."""
    if answer.status not in (401, 403):
        return None
    return EngineFailed(
        f"the server at {where} refuses Shoal's key (status {answer.status}): the operator sets upstream_api_key to one"
        " that it takes"
    )


def refusal(answer: Answer, where: str) -> ShoalError:
    """For a generation: the server's own refusal, to be passed on as it is where it is JSON. `body` is empty for what
    cannot be, such as a proxy's page: the message stands for it."""
    if error := refused_key(answer, where):
        return error
    if 300 <= answer.status < 400:
        return EngineFailed(f"the server at {where} redirects, which is not followed: write the address where it is")
    if answer.status < 400:
        return EngineFailed(f"the server at {where} answered status {answer.status} where it should have answered 200")
    return UpstreamRefused(
        f"the server at {where} refused with status {answer.status}{said(answer)}",
        status=answer.status,
        body=_passed_on(answer) if answer.json else b"",
        retry_after=retry_after(answer.headers),
    )


def failed(body: bytes, key: bytes = b"") -> UpstreamRefused | None:
    """The failure that a whole answer of status 200 tells; None where it tells none, or is none that can be read."""
    if b'"error"' not in body:
        return None
    try:
        told = bool(_ERROR.decode(body).get("error"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return failure(body, key) if told else None


def failure(body: bytes, key: bytes = b"") -> UpstreamRefused:
    """For a JSON object with an `error` where an answer, or the rest of one, should have come. The status is 500, or
    the error's `code` where that is one; a refusal of Shoal's key is the server's failure."""
    try:
        error = _ERROR.decode(body).get("error")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        error = None
    code = error.get("code") if isinstance(error, dict) else None
    status = code if type(code) is int and 400 <= code < 600 and code not in (401, 403) else 500
    answer = Answer(status, {}, body, key=key)
    return UpstreamRefused(
        f"the server failed in the middle of its answer{said(answer)}", status=status, body=_passed_on(answer)
    )


def _passed_on(answer: Answer) -> bytes:
    """The body for the client: the server's own, or another where that one quotes the key."""
    if not answer.secret:
        return answer.body
    message = f"the server refused with status {answer.status}, in words that quote Shoal's own key: they stay here"
    return msgspec.json.encode({"error": {"message": message, "type": "upstream_error", "param": None, "code": None}})


def engine_error(answer: Answer, where: str) -> ShoalError:
    """For a batch of embeddings: the same, as an Engine may raise it."""
    status = answer.status
    if error := refused_key(answer, where):
        return error
    words = said(answer)
    if status == 413:
        return OutOfMemory(f"the batch is larger than the server at {where} takes{words}: lower max_batch_tokens")
    if status == 429 or (status == 503 and retry_after(answer.headers) is not None):
        return Overloaded(
            f"the server at {where} is too busy{words}: try again", retry_after=retry_after(answer.headers)
        )
    if status in (502, 503, 504) or lacks_model(answer):
        return TransportFailed(f"the server at {where} cannot serve the model now (status {status}){words}: try again")
    if status in (400, 422):
        return InputRejected(f"the server at {where} refused these inputs{words}")
    if any(memory in words.lower() for memory in _MEMORY):
        return OutOfMemory(f"the batch did not fit into the memory of the server at {where}{words}")
    return EngineFailed(f"the server at {where} failed with status {status}{words}; its log says more")


def said(answer: Answer) -> str:
    """The server's words in brackets, after a space; "" where it has none."""
    return f" ({answer.words})" if answer.words else ""


def transport_error(error: Exception, where: str) -> TransportFailed:
    """For a call that failed below HTTP."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    words = " ".join(str(cause).split())[:LONGEST_WORDS] or type(error).__name__
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return Unreached(
            f"no TLS connection to {where}: check its certificate, and whether its port speaks TLS ({words})"
        )
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return Unreached(f"{where} does not answer: check its address and that it runs")
    if isinstance(error, aiohttp.ClientConnectorError):
        return Unreached(f"{where} is not reachable: check its address and that it runs ({words})")
    return TransportFailed(f"the connection to {where} broke: send the request again ({words})")
