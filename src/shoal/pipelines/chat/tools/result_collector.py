"""Collects a parser's results: content, calls, and text that may still become either."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

from shoal.types import ToolDelta

MAX_BEGUN = 1 << 20
"""Maximum characters to hold back while it is undecided whether they are a call; more than any real call has."""

BLANKS = " \t\r\n"
_ALPHANUMERIC = string.ascii_letters + string.digits


def call_id() -> str:
    """Return a random call id in OpenAI's format."""
    return "call_" + secrets.token_hex(12)


def short_call_id() -> str:
    """Return a random call id of 9 letters and digits; Mistral's templates reject any other."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class DeltaCollector:
    """Collects the content and deltas of one answer, numbers the calls and strips blanks around them.

    - Use `hold_back` for text that may become a call. `give_back` returns it as content; `drop` or the call's `begin`
      discards it.
    - Blanks next to a call are not content, unless they stand between two pieces of content: then those after the call
      are kept, or if there are none those before it.
    - `parallel` False: emit only the first call and drop the others.
    """

    def __init__(self, *, parallel: bool, new_id: Callable[[], str]) -> None:
        self.calls = 0
        self.pending_size = 0
        self._parallel = parallel
        self._new_id = new_id
        self._emits_call = False
        self._pending: list[str] = []
        self._content: list[str] = []
        self._deltas: list[ToolDelta] = []
        self._arguments: list[str] = []
        self._blanks: list[str] = []
        self._after_text = False
        self._after_call = False
        self._renew = False

    def content(self, text: str) -> None:
        body = text.lstrip(BLANKS)
        self._hold(text[: len(text) - len(body)])
        if not body:
            return
        end = len(body.rstrip(BLANKS))
        if self._after_text or not self._after_call:
            self._content.extend(self._blanks)
        self._blanks.clear()
        self._content.append(body[:end])
        self._after_text, self._after_call, self._renew = True, False, False
        self._hold(body[end:])

    def hold_back(self, text: str) -> None:
        """Hold back text that belongs to a call, if it is one."""
        self._pending.append(text)
        self.pending_size += len(text)

    def give_back(self) -> None:
        """Release the text held back as content: it was not a call."""
        text = "".join(self._pending)
        self.drop()
        self.content(text)

    def drop(self) -> None:
        """Discard the text held back: it was markup of a call."""
        self._pending.clear()
        self.pending_size = 0

    def begin(self, name: str) -> None:
        """Begin the next call; the text held back belongs to it."""
        self.drop()
        self._close()
        self._after_call = self._renew = True
        self._emits_call = self._parallel or self.calls == 0
        if self._emits_call:
            self._deltas.append(ToolDelta(index=self.calls, id=self._new_id(), name=name))
            self.calls += 1

    def arguments(self, fragment: str) -> None:
        """Add to the arguments of the latest call."""
        if self._emits_call and fragment:
            self._arguments.append(fragment)

    def take(self) -> tuple[str, list[ToolDelta]]:
        """Return content and deltas since the last `take`."""
        self._close()
        content, deltas = "".join(self._content), self._deltas
        self._content, self._deltas = [], []
        return content, deltas

    def finish(self) -> None:
        """End the answer: trailing blanks are content, unless they touch a call."""
        if not self._after_call:
            self._content.extend(self._blanks)
        self._blanks.clear()

    def _hold(self, blanks: str) -> None:
        if blanks:
            if self._renew:
                self._blanks.clear()
                self._renew = False
            self._blanks.append(blanks)

    def _close(self) -> None:
        if self._arguments:
            self._deltas.append(ToolDelta(index=self.calls - 1, arguments="".join(self._arguments)))
            self._arguments = []
