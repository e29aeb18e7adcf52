"""Separate reasoning from the answer: `<think>...</think>` before the answer, as DeepSeek-R1 and Qwen3 write it."""

from __future__ import annotations

from typing import Literal, TypeAlias

from shoal.pipelines.chat.tools.reader import overlap

Kind: TypeAlias = Literal["reasoning", "text"]

OPEN = "<think>"
CLOSE = "</think>"
_BLANKS = " \t\r\n"
_MAX_BLANKS = 64


class ReasoningSplit:
    """Splits one answer, a fragment at a time, into pieces of reasoning and of text.

    - `opened`: the prompt ended inside the reasoning, so the answer begins there; a `<think>` that the model repeats is
      dropped.
    - Otherwise the opening tag counts only at the beginning of the answer (after at most 64 blanks, which are dropped
      with it): an answer about such tags is unchanged.
    - Line ends right after either tag are dropped. Without an end tag, all the rest is reasoning. After the first end
      tag, all the rest is text, whatever tags it contains.
    - Joined by kind, the pieces are the same however the answer is split into fragments.
    """

    def __init__(self, opened: bool = False) -> None:
        self._kind: Kind = "reasoning" if opened else "text"
        self._beginning = True
        self._trim = opened
        self._pending = ""

    def push(self, text: str) -> list[tuple[Kind, str]]:
        """Return the pieces that are certain now; hold back a possible beginning of a tag."""
        text = self._pending + text
        self._pending = ""
        if self._beginning:
            body = text.lstrip(_BLANKS)
            few = len(text) - len(body) <= _MAX_BLANKS
            if few and len(body) < len(OPEN) and OPEN.startswith(body):
                self._pending = text
                return []
            self._beginning = False
            if few and body.startswith(OPEN):
                self._kind, self._trim = "reasoning", True
                text = body[len(OPEN) :]
        pieces: list[tuple[Kind, str]] = []
        if self._kind == "reasoning":
            text = self._take_reasoning(text, pieces)
        if self._kind == "text":
            self._add(pieces, text)
        return pieces

    def flush(self) -> list[tuple[Kind, str]]:
        """Return the text held back, at the end of the answer."""
        pieces: list[tuple[Kind, str]] = []
        self._add(pieces, self._pending)
        self._pending = ""
        return pieces

    def _take_reasoning(self, text: str, pieces: list[tuple[Kind, str]]) -> str:
        """Consume the reasoning and return the text after its end tag."""
        at = text.find(CLOSE)
        if at < 0:
            size = overlap(text, 0, (CLOSE,))
            self._pending = text[len(text) - size :]
            self._add(pieces, text[: len(text) - size])
            return ""
        self._add(pieces, text[:at])
        self._kind, self._trim = "text", True
        return text[at + len(CLOSE) :]

    def _add(self, pieces: list[tuple[Kind, str]], text: str) -> None:
        if self._trim:
            text = text.lstrip("\r\n")
        if text:
            self._trim = False
            pieces.append((self._kind, text))
