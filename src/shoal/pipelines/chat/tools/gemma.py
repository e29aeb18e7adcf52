"""Parser of Google's format: `<start_function_call>call:name{city:<escape>Paris<escape>,days:3}<end_function_call>`,
and in Gemma 4 `<|tool_call>call:name{city:<|"|>Paris<|"|>,days:3}<tool_call|>`.

Source of the format: the chat templates of FunctionGemma and Gemma 4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from shoal.pipelines.chat.tools.literals import WORDS
from shoal.pipelines.chat.tools.reader import NameReader, overlap
from shoal.pipelines.chat.tools.result_collector import BLANKS, DeltaCollector
from shoal.types import Tool

OPEN = ("<start_function_call>", "<|tool_call>")
CLOSE = ("<end_function_call>", "<tool_call|>")
QUOTES = ("<escape>", '<|"|>')
CALL = "call:"

_TOKENS = re.compile(r"[{}\[\],:]|[^{}\[\],:]+")
_BRACKETS = r"[{}\[\]]"
_OUTSIDE = {quote: re.compile(f"{_BRACKETS}|{re.escape(quote)}") for quote in QUOTES}
_OUTSIDE[""] = re.compile("|".join([_BRACKETS, *map(re.escape, QUOTES)]))


class GemmaParser(NameReader):
    """Parses one call after each marker. A call is emitted once its arguments are complete, since their JSON is built
    from them. Tolerates a missing end marker."""

    _marks = OPEN
    _closes = CLOSE
    markup = (*OPEN, *CLOSE, *QUOTES)

    def __init__(self, out: DeltaCollector, tools: Sequence[Tool]) -> None:
        super().__init__(out, tools)
        self._quote = ""
        self._quoted = False
        self._depth = 0
        self._arguments: list[str] = []

    def _between_calls(self) -> bool:
        return self._step == self._read_closing

    def _read_opening(self, text: str, at: int) -> int | None:
        mark = self._hold_mark(text, at, (CALL,))
        if mark:
            self._begin_name(self._behind_name)
        return None if mark is None else at + len(mark)

    def _behind_name(self, text: str, at: int) -> int | None:
        if text[at] == "{":
            self._quote, self._quoted, self._depth, self._arguments = "", False, 0, []
            self._step = self._read_arguments
        else:
            self._give_back()
        return at

    def _read_arguments(self, text: str, at: int) -> int | None:
        """Read as far as the next quote or bracket. The first quote decides which one the answer has."""
        quotes = (self._quote,) if self._quote else QUOTES
        if self._quoted:
            place = text.find(self._quote, at)
            found, after = (self._quote, place + len(self._quote)) if place >= 0 else ("", 0)
        else:
            match = _OUTSIDE[self._quote].search(text, at)
            found, after = (match[0], match.end()) if match else ("", 0)
        if not found:
            after = len(text) - overlap(text, at, quotes)
        self._take(text, at, after)
        if found in QUOTES:
            self._quote, self._quoted = found, not self._quoted
        elif found:
            self._depth += 1 if found in "{[" else -1
            if self._depth <= 0:
                self._end_arguments()
        return after if after > at else None

    def _take(self, text: str, at: int, after: int) -> None:
        self._arguments.append(text[at:after])
        self._out.hold_back(text[at:after])

    def _end_arguments(self) -> None:
        found = _to_json("".join(self._arguments), self._quote)
        self._arguments = []
        if found is None:
            self._give_back()
            return
        self._out.begin(self._to_name(self._name))
        self._out.arguments(found)
        self._step = self._read_closing


def _to_json(text: str, quote: str) -> str | None:
    """Return arguments as the JSON text of an object; None if they are not one. A word that is neither JSON nor
    Python's, as Gemma 4's template writes null, is a string."""
    parts: list[str] = []
    for number, part in enumerate(text.split(quote) if quote else [text]):
        if number % 2:
            parts.append(_quote_json(part))
            continue
        tokens = [token.strip(BLANKS) for token in _TOKENS.findall(part)]
        tokens = [token for token in tokens if token]
        for word, following in zip(tokens, [*tokens[1:], ""], strict=True):
            token = word if following == ":" else WORDS.get(word, word)
            bare = token in "{}[],:" or (following != ":" and _is_scalar(token))
            parts.append(token + (" " if token in ",:" else "") if bare else _quote_json(token))
    made = "".join(parts)
    try:
        return made if isinstance(json.loads(made), dict) else None
    except (ValueError, RecursionError):
        return None


def _is_scalar(token: str) -> bool:
    try:
        json.loads(token, parse_constant=_quote_json)
    except ValueError:
        return False
    return token[0] != '"' and token not in ("NaN", "Infinity", "-Infinity")


def _quote_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
