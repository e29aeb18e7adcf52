"""Streams that are passed on as they came: what has to be known of them on the way, which is how they end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from shoal.backends.openai.answers import parse_usage
from shoal.backends.openai.body import ModelNameRewriter
from shoal.backends.openai.errors import failure_error
from shoal.backends.openai.sse import is_done, payload
from shoal.backends.openai.wire import EndingWire
from shoal.decoding import json_decoder
from shoal.errors import ShoalError, TransportFailed, UpstreamFailed
from shoal.types import Chunk, Usage

RESPONSES = "openai.responses"
"""The dialect whose streams end with an event of their own and not with `[DONE]`."""

_ENDING = json_decoder(EndingWire)
_WHOLE = ("response.completed", "response.incomplete")
_FAILED = "response.failed"
_ENDS = tuple(name.encode() for name in (*_WHOLE, _FAILED))
# A quote inside of a JSON string has a backslash before it, so that no text can look like this. "" is null.
_REASON = re.compile(rb'"finish_reason"[ \t\r\n]*:[ \t\r\n]*"[^"]')
_ERROR_EVENT = re.compile(rb"(?:^|[\r\n])event: ?error[\r\n]")


class PassThroughStream:
    """The events of one stream as raw chunks, with the served name in them, and the usage with the last one.

    `over`: the event that ends the answer came, and nothing is to follow. An event that tells an error is not passed
    on: `push` raises it instead, so that it ends the stream as every error does, and is told once. `key` is Shoal's
    own, which no error may repeat.
    """

    def __init__(self, dialect: str, names: ModelNameRewriter, key: bytes = b"") -> None:
        self.over = False
        self._dialect = dialect
        self._names = names
        self._key = key
        self._finished = False
        self._usage: Usage | None = None

    def push(self, events: Sequence[bytes]) -> Iterator[Chunk]:
        """One chunk of events that came together. An error among them is raised after what came before it, as
        UpstreamRefused, or UpstreamFailed where it cannot be read."""
        error: ShoalError | None = None
        taken: list[bytes] = []
        for event in events:
            error = self._read(event)
            if error is None:
                taken.append(event)
            if error is not None or self.over:
                break
        if taken:
            usage = self._usage if self.over or _is_usage_event(taken[-1]) else None
            if usage is not None:
                self._usage = None
            yield Chunk(raw=(self._dialect, b"".join(map(self._names, taken))), usage=usage)
        if error is not None:
            raise error

    def finish(self) -> Iterator[Chunk]:
        """No more events come. Raises TransportFailed where the answer is not whole."""
        if self._usage is not None:  # of a server that counts all along and ends without a word
            yield Chunk(raw=(self._dialect, b""), usage=self._usage)
        if not (self.over or self._finished):
            raise TransportFailed("the server ended its stream before the answer was whole: ask again")

    def _read(self, event: bytes) -> ShoalError | None:
        """Note what an event tells; the error, where it tells one."""
        if is_done(event):
            self.over = True
            return None
        if b'"usage"' in event and b'"usage":null' not in event and b'"usage": null' not in event:
            self._usage = parse_usage(payload(event)) or self._usage
        if self._dialect != RESPONSES:
            self._finished = self._finished or _REASON.search(event) is not None
            ends = b'"error"' in event
        else:
            ends = b'"error"' in event or any(name in event for name in _ENDS)
        named = b"error" in event and _ERROR_EVENT.search(event) is not None
        return self._read_ending(payload(event), named=named) if ends or named else None

    def _read_ending(self, body: bytes, *, named: bool) -> ShoalError | None:
        """`named`: the event calls itself an error."""
        try:
            told = _ENDING.decode(body)
            kind = told.type if self._dialect == RESPONSES else ""
            error = told.error
            if not error and (named or kind == "error"):
                error = {"message": told.message, "type": "server_error", "param": told.param, "code": told.code}
            if kind == _FAILED:
                error = (told.response.get("error") if isinstance(told.response, dict) else None) or {
                    "message": "the response failed"
                }
            if error:
                return failure_error(msgspec.json.encode({"error": error}), self._key)
        except (msgspec.DecodeError, UnicodeDecodeError):  # whatever it is, it is the client's to read
            return None
        except RecursionError:
            return UpstreamFailed("the server's error nests too deep to be read: its log says more")
        self.over = kind in _WHOLE
        return None


def _is_usage_event(event: bytes) -> bool:
    """Whether nothing can follow but `[DONE]`: the event that OpenAI's streams tell their usage with at the end."""
    return b'"choices":[]' in event or b'"choices": []' in event
