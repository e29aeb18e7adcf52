"""Server-sent events cut out of a byte stream, whole and unchanged.

Source: the WHATWG HTML standard, "Server-sent events": lines end in LF, CR or CRLF, an empty line ends an event, and a
line that begins with a colon is a comment. A byte order mark may stand before the first line.
"""

from __future__ import annotations

import re

from shoal.errors import UpstreamFailed

MAX_EVENT_BYTES = 8 * 2**20
"""Of one event: a whole answer with its log probabilities stays well below."""

_BOM = b"\xef\xbb\xbf"

# Atomic groups: a CRLF must never be taken for a CR and an LF, which would be two line ends.
_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_DATA = re.compile(rb"(?:^|[\r\n])data:?")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_DONE = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\][\r\n]")


class EventSplitter:
    """Bytes as they arrive, in pieces of any size, to whole events.

    `push` answers the events that are complete now, each with the empty line that ends it; joined with `rest` they are
    the bytes that came in, but for a byte order mark before the first. An event is told as soon as it can be: where a
    CRLF is torn apart after its CR, the LF begins the next one. Raises UpstreamFailed where an event grows past
    `max_bytes`.
    """

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._searched = 0
        self._begun = False

    def push(self, data: bytes) -> list[bytes]:
        self._buffer += data
        if not self._begun:
            if len(self._buffer) < len(_BOM) and _BOM.startswith(self._buffer):
                return []  # nothing yet, or a part of the mark
            self._begun = True
            if self._buffer.startswith(_BOM):
                del self._buffer[: len(_BOM)]
        events: list[bytes] = []
        start = 0
        for match in _END.finditer(self._buffer, self._searched):
            events.append(bytes(self._buffer[start : match.end()]))
            start = match.end()
        if start:
            del self._buffer[:start]
        if len(self._buffer) > self._max_bytes:
            raise UpstreamFailed(f"the server sent an event of more than {self._max_bytes} bytes: that is no answer")
        # A line end of up to two bytes may stand at the end of what was searched; half a boundary begins with it.
        self._searched = max(0, len(self._buffer) - 2)
        return events

    @property
    def rest(self) -> bytes:
        """What came of an event that is not complete."""
        return bytes(self._buffer)


def has_data(event: bytes) -> bool:
    """Whether an event says anything: heartbeats, which are comments alone, do not."""
    return event.startswith(b"data:") or _DATA.search(event) is not None


def is_done(event: bytes) -> bool:
    """Whether it is the `[DONE]` that ends OpenAI's streams."""
    return b"[DONE]" in event and _DONE.search(event) is not None


def payload(event: bytes) -> bytes:
    """The data of an event: its data lines without their names, joined by LF."""
    if event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2 and b"\r" not in event:
        return event[6:-2]
    lines: list[bytes] = []
    for line in _LINE_END.split(event):
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines)
