"""Splits a byte stream into whole, unchanged server-sent events.

Source: the WHATWG HTML standard, "Server-sent events": lines end in LF, CR or CRLF, an empty line ends an event, and a
line that begins with a colon is a comment. A byte order mark may precede the first line.
"""

from __future__ import annotations

import re

from shoal.errors import UpstreamFailed

MAX_EVENT_BYTES = 8 * 2**20
"""Maximum size of one event; a whole answer with log probabilities is well below it."""

_BOM = b"\xef\xbb\xbf"

# Atomic groups, so that a CRLF never matches as a CR and an LF, which would be two line ends.
_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_DATA = re.compile(rb"(?:^|[\r\n])data:?")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_DONE = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\][\r\n]")


class EventSplitter:
    """Splits bytes, in chunks of any size, into whole events.

    `push` returns the events completed by its chunk, each with the empty line that ends it. All events joined with
    `rest` equal the input without its byte order mark. An event is returned as early as possible: if a CRLF is split
    across chunks, the LF begins the next event. Raises UpstreamFailed if an event exceeds `max_bytes`.
    """

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._search_start = 0
        self._has_started = False
        self._has_cr = False

    def push(self, data: bytes) -> list[bytes]:
        self._buffer += data
        self._has_cr = self._has_cr or b"\r" in data
        if not self._has_started:
            if len(self._buffer) < len(_BOM) and _BOM.startswith(self._buffer):
                return []  # nothing yet, or a part of the byte order mark
            self._has_started = True
            if self._buffer.startswith(_BOM):
                del self._buffer[: len(_BOM)]
        events: list[bytes] = []
        start = 0
        for end in self._find_ends():
            events.append(bytes(self._buffer[start:end]))
            start = end
        if start:
            del self._buffer[:start]
        if len(self._buffer) > self._max_bytes:
            raise UpstreamFailed(f"the server sent an event of more than {self._max_bytes} bytes")
        # The searched bytes may end in a line end of up to two bytes, the first half of a boundary.
        self._search_start = max(0, len(self._buffer) - 2)
        return events

    def _find_ends(self) -> list[int]:
        """Return the ends of the complete events. Almost every server ends its lines in LF, and a plain search for two
        of them takes a quarter of the time of the pattern."""
        if self._has_cr:
            return [match.end() for match in _END.finditer(self._buffer, self._search_start)]
        ends = []
        at = self._search_start
        while (found := self._buffer.find(b"\n\n", at)) >= 0:
            at = found + 2
            ends.append(at)
        return ends

    @property
    def rest(self) -> bytes:
        """The bytes of the incomplete event."""
        return bytes(self._buffer)


def has_data(event: bytes) -> bool:
    """Whether an event has data. Heartbeats consist of comments only and have none."""
    return event.startswith(b"data:") or _DATA.search(event) is not None


def is_done(event: bytes) -> bool:
    """Whether the event is the `[DONE]` that ends OpenAI's streams."""
    return b"[DONE]" in event and _DONE.search(event) is not None


def payload(event: bytes) -> bytes:
    """Return the data of an event: the values of its `data` lines, joined by LF."""
    if event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2 and b"\r" not in event:
        return event[6:-2]
    lines: list[bytes] = []
    for line in _LINE_END.split(event):
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines)
