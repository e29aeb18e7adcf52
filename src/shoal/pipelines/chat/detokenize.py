"""Token ids to text, a few at a time: what was given out is never taken back.

All that was pushed together gives the text of all ids at once, as `Vocabulary.decode` does. Half a character is kept
back until the rest of it is there, and becomes U+FFFD only when it cannot be one any more. Each token is looked at a
bounded number of times, however long the answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from shoal.pipelines.chat.vocabulary import Form, Spelling, Vocabulary

CONTEXT = 16
"""So many of the prompt's last tokens decide how the first token of an answer is written."""
HELD_BYTES = 96
"""A decoder with byte tokens gives U+FFFD for a whole run of them when any part of it is no UTF-8. A run is kept back
for that, but nobody waits longer than this for its characters."""
HELD_TOKENS = 16
"""A text that still ends in U+FFFD after so many tokens has one of its own."""
LONGEST = 4
"""Tokens of one character at most: its bytes."""
REPLACEMENT = "\ufffd"


class Detokenizer:
    """One answer's ids to its text.

    `skip_special_tokens` leaves out the special tokens but those in `shown`. `context`: the ids before the answer,
    where its text goes on from theirs; then a space at its beginning stays. Without, it is a text of its own.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
        context: Sequence[int] = (),
    ) -> None:
        self._hidden = vocabulary.special_ids - frozenset(shown) if skip_special_tokens else frozenset()
        forms: dict[Form, type[_Form]] = {"byte_level": _Octets, "byte_fallback": _Fallback, "other": _Window}
        self._form: _Form = forms[vocabulary.spelling.form](vocabulary)
        before = [token for token in context if token not in self._hidden][-CONTEXT:]
        if before:
            self._form.prime(before)

    def push(self, ids: Sequence[int]) -> str:
        """What can be told now."""
        return self._form.push([token for token in ids if token not in self._hidden])

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        return self._form.flush()


class _Form(Protocol):
    def __init__(self, vocabulary: Vocabulary) -> None: ...

    def prime(self, ids: Sequence[int]) -> None: ...

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class _Octets:
    """Every token is some bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._data = vocabulary.data
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prime(self, ids: Sequence[int]) -> None:
        self.push(ids)

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._data, ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _Fallback:
    """A token is a text, or a byte of a run of bytes that is UTF-8 as a whole or not at all."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._part = vocabulary.part
        self._spelling: Spelling = vocabulary.spelling
        self._strip = self._spelling.strip
        self._run = bytearray()

    def prime(self, ids: Sequence[int]) -> None:
        self.push(ids)
        self._strip = 0
        del self._run[: len(_complete_utf8(self._run))]

    def push(self, ids: Sequence[int]) -> str:
        told: list[str] = []
        for token in ids:
            part = self._part(token)
            if isinstance(part, int):
                self._run.append(part)
            elif isinstance(part, str):
                told.append(self._end_run())
                told.append(part)
        if len(self._run) > HELD_BYTES:
            whole = _complete_utf8(self._run)
            told.append(whole.decode())
            del self._run[: len(whole)]
        return self._strip_start("".join(told))

    def flush(self) -> str:
        return self._strip_start(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip_start(self, text: str) -> str:
        """`text` without what is stripped from the beginning of the answer."""
        while self._strip and text:
            if not text.startswith(self._spelling.stripped):
                self._strip = 0
            else:
                self._strip -= 1
                text = text[len(self._spelling.stripped) :]
        return text


def _complete_utf8(run: bytearray) -> bytes:
    """The beginning of `run` that is UTF-8."""
    try:
        run.decode()
    except UnicodeDecodeError as error:
        return bytes(run[: error.start])
    return bytes(run)


class _Window:
    """Any decoder: the last tokens that were told and those since are decoded together, and the difference is new.

    How a token is written may hang on whether it comes first, so that the ones before it are always decoded with it.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids: list[int] = []
        self._told = 0
        self._before = ""

    def prime(self, ids: Sequence[int]) -> None:
        self._ids, self._told = list(ids), len(ids)
        self._before = self._decode(self._ids)

    def push(self, ids: Sequence[int]) -> str:
        told: list[str] = []
        for token in ids:
            if 0 <= token < self._vocabulary.size:
                self._ids.append(token)
                told.append(self._new())
        return "".join(told)

    def flush(self) -> str:
        return self._emit(self._decode(self._ids), len(self._ids))

    def _new(self) -> str:
        text, waiting = self._decode(self._ids), len(self._ids) - self._told
        if not text.endswith(REPLACEMENT) and text.startswith(self._before):
            return self._emit(text, len(self._ids)) if len(text) > len(self._before) else self._drop(waiting)
        if waiting < HELD_TOKENS:
            return ""
        # The last tokens may yet be half a character; those before them have had their time, if what they give stays.
        for stop in range(len(self._ids) - LONGEST, self._told, -1):
            part = self._decode(self._ids[:stop])
            if text.startswith(part) and len(part) > len(self._before):
                return self._emit(part, stop)
        return self._emit(text, len(self._ids))

    def _emit(self, text: str, stop: int) -> str:
        """What the first `stop` tokens, whose text is `text`, give more than was told; they are told then."""
        told = text[len(self._before) :]
        if told:
            kept = self._ids[stop:]
            self._ids = self._ids[self._told : stop]
            self._told, self._before = len(self._ids), self._decode(self._ids)
            self._ids += kept
        return told

    def _drop(self, waiting: int) -> str:
        """Tokens without a text decide nothing any more after a while, and must not be decoded for ever."""
        if waiting >= HELD_TOKENS:
            del self._ids[self._told : -1]
        return ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._vocabulary.decode(ids, skip_special_tokens=False)
