"""Server-sent events, read as they arrive: the `data` of each event, and nothing else of them.

Source: the event stream format of the HTML standard. Comments and other fields are passed over.
"""

from __future__ import annotations

DONE = b"[DONE]"


class Events:
    """Cuts a stream of bytes, in parts of any size, into events."""

    def __init__(self) -> None:
        self._partial_line = b""
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> list[bytes]:
        """The data of the events that this part completes; several `data` lines of one event are joined by LF."""
        lines = (self._partial_line + part).split(b"\n")
        self._partial_line = lines.pop()
        found = []
        for line in (each.removesuffix(b"\r") for each in lines):
            if not line:
                if self._data:
                    found.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return found
