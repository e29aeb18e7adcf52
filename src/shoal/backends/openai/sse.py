"""Splits a byte stream into whole, unchanged server-sent events.

Source: the WHATWG HTML standard, "Server-sent events": lines end in LF, CR or CRLF, an empty line ends an event, and a
line that begins with a colon is a comment. A byte order mark may precede the first line.
"""

from __future__ import annotations

import re
from itertools import pairwise

from shoal.errors import UpstreamFailed

MAX_EVENT_BYTES = 8 * 2**20
"""Maximum size of one event; a whole answer with log probabilities is well below it."""

_BOM = b"\xef\xbb\xbf"

# Atomic groups, so that a CRLF never matches as a CR and an LF, which would be two line ends.
_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_WHOLE_EVENTS = re.compile(rb"[^\r\n](?:\n\n|\r\n\r\n)\Z")
_DATA = re.compile(rb"(?:^|[\r\n])data:?")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_DONE = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\][\r\n]")


class EventSplitter:
    """Splits bytes, in chunks of any size, into whole events.

    `push` returns the events completed by its chunk, each with the empty line that ends it, as one piece for
    `split_events`. All pieces and `rest` joined equal the input without its byte order mark. An event is returned as
    early as possible: if a CRLF is split across chunks, the LF begins the next event. Raises UpstreamFailed if an event
    exceeds `max_bytes`.
    """

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._search_start = 0
        self._has_started = False
        self._has_cr = False

    def push(self, data: bytes) -> bytes:
        buffer = self._buffer
        if not buffer and self._has_started and _WHOLE_EVENTS.search(data, len(data) - 5) is not None:
            return data  # as most servers send them
        buffer += data
        self._has_cr = self._has_cr or b"\r" in data
        if not self._has_started:
            if len(buffer) < len(_BOM) and _BOM.startswith(buffer):
                return b""  # nothing yet, or a part of the byte order mark
            self._has_started = True
            if buffer.startswith(_BOM):
                del buffer[: len(_BOM)]
        events = bytes(buffer[: _find_last_end(buffer, self._search_start, has_cr=self._has_cr)])
        del buffer[: len(events)]
        if len(buffer) > self._max_bytes:
            raise UpstreamFailed(f"the server sent an event of more than {self._max_bytes} bytes")
        # The searched bytes may end in a line end of up to two bytes, the first half of a boundary.
        self._search_start = max(0, len(buffer) - 2)
        return events

    @property
    def rest(self) -> bytes:
        """The bytes of the incomplete event."""
        return bytes(self._buffer)


def split_events(joined: bytes) -> list[bytes]:
    """Split whole events that were joined. Line ends behind the last one are left with it."""
    if b"\r" in joined:
        ends = [match.end() for match in _END.finditer(joined)]
        return [joined[start:end] for start, end in pairwise([0, *ends[:-1], len(joined)])]
    # Almost every server ends its lines in LF, and a plain search for two takes a quarter of the pattern's time.
    *events, rest = joined.split(b"\n\n")
    events = [event + b"\n\n" for event in events]
    if events:
        events[-1] += rest
    return events


def split_data_events(joined: bytes) -> list[bytes]:
    """Split whole events that were joined, without those that have no data."""
    return [event for event in split_events(joined) if has_data(event)]


def _find_last_end(data: bytearray, start: int, *, has_cr: bool) -> int:
    """Return the end of the last complete event, 0 if there is none."""
    if has_cr:
        return max((match.end() for match in _END.finditer(data, start)), default=0)
    end = data.rfind(b"\n\n", start) + 2
    if end < 2:
        return 0
    # Of an odd number of line ends, the last one begins the next event.
    return end - (end - len(data[:end].rstrip(b"\n"))) % 2


def has_data(event: bytes) -> bool:
    """Whether an event, or any of several, has data. Heartbeats consist of comments only and have none."""
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
