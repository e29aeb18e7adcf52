"""Detokenize ids incrementally; emitted text is never taken back.

All pushed ids together give the text that `Vocabulary.decode` gives for all ids at once. An incomplete character is
held back until its remaining bytes arrive, and becomes U+FFFD only if it can no longer be completed. Each token is
processed a bounded number of times, however long the answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from shoal.pipelines.chat.vocabulary import Form, Spelling, Vocabulary

CONTEXT = 16
"""Number of the prompt's last tokens that affect how the first token of an answer is written."""
HELD_BYTES = 96
"""Maximum bytes of a run of byte tokens to hold back. A decoder with byte tokens gives U+FFFD for a whole run if any
part of it is not UTF-8, so runs are held back, but no longer than this."""
HELD_TOKENS = 16
"""Maximum tokens to hold back; after that, a text that still ends in U+FFFD contains a real one."""
LONGEST = 4
"""Maximum tokens per character: its bytes."""
REPLACEMENT = "\ufffd"


class Detokenizer:
    """Converts one answer's ids to text.

    `skip_special_tokens` omits special tokens except those in `shown`. `context`: the ids before the answer, if the
    answer continues their text; a space at its beginning is then kept. Without it, the answer is a text of its own.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
        context: Sequence[int] = (),
    ) -> None:
        self._hidden_ids = vocabulary.special_ids - frozenset(shown) if skip_special_tokens else frozenset()
        forms: dict[Form, type[_Form]] = {"byte_level": _Octets, "byte_fallback": _Fallback, "other": _Window}
        self._form: _Form = forms[vocabulary.spelling.form](vocabulary)
        before = [token for token in context if token not in self._hidden_ids][-CONTEXT:]
        if before:
            self._form.prime(before)

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that is certain now."""
        return self._form.push([token for token in ids if token not in self._hidden_ids])

    def flush(self) -> str:
        """Return the rest at the end of the answer."""
        return self._form.flush()


class _Form(Protocol):
    def __init__(self, vocabulary: Vocabulary) -> None: ...

    def prime(self, ids: Sequence[int]) -> None: ...

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class _Octets:
    """Decodes byte-level tokens: every token is some bytes."""

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
    """Decodes byte-fallback tokens: a token is a text, or one byte of a run that is UTF-8 as a whole or not at all."""

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
        parts: list[str] = []
        for token in ids:
            part = self._part(token)
            if isinstance(part, int):
                self._run.append(part)
            elif isinstance(part, str):
                parts.append(self._end_run())
                parts.append(part)
        if len(self._run) > HELD_BYTES:
            whole = _complete_utf8(self._run)
            parts.append(whole.decode())
            del self._run[: len(whole)]
        return self._strip_start("".join(parts))

    def flush(self) -> str:
        return self._strip_start(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip_start(self, text: str) -> str:
        """Return `text` without what is stripped from the beginning of the answer."""
        while self._strip and text:
            if not text.startswith(self._spelling.stripped):
                self._strip = 0
            else:
                self._strip -= 1
                text = text[len(self._spelling.stripped) :]
        return text


def _complete_utf8(run: bytearray) -> bytes:
    """Return the longest prefix of `run` that is UTF-8."""
    try:
        run.decode()
    except UnicodeDecodeError as error:
        return bytes(run[: error.start])
    return bytes(run)


class _Window:
    """Works with any decoder: decodes the last emitted tokens together with those since; the difference is new.

    How a token is written may depend on whether it comes first, so the tokens before it are always decoded with it.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids: list[int] = []
        self._emitted = 0
        self._emitted_text = ""

    def prime(self, ids: Sequence[int]) -> None:
        self._ids, self._emitted = list(ids), len(ids)
        self._emitted_text = self._decode(self._ids)

    def push(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token in ids:
            if 0 <= token < self._vocabulary.size:
                self._ids.append(token)
                parts.append(self._new())
        return "".join(parts)

    def flush(self) -> str:
        return self._emit(self._decode(self._ids), len(self._ids))

    def _new(self) -> str:
        text, waiting = self._decode(self._ids), len(self._ids) - self._emitted
        if not text.endswith(REPLACEMENT) and text.startswith(self._emitted_text):
            return self._emit(text, len(self._ids)) if len(text) > len(self._emitted_text) else self._drop(waiting)
        if waiting < HELD_TOKENS:
            return ""
        # The last tokens may still be an incomplete character. Emit those before them if their text is stable.
        for stop in range(len(self._ids) - LONGEST, self._emitted, -1):
            part = self._decode(self._ids[:stop])
            if text.startswith(part) and len(part) > len(self._emitted_text):
                return self._emit(part, stop)
        return self._emit(text, len(self._ids))

    def _emit(self, text: str, stop: int) -> str:
        """Emit what the text of the first `stop` tokens adds to the text emitted so far."""
        delta = text[len(self._emitted_text) :]
        if delta:
            kept = self._ids[stop:]
            self._ids = self._ids[self._emitted : stop]
            self._emitted, self._emitted_text = len(self._ids), self._decode(self._ids)
            self._ids += kept
        return delta

    def _drop(self, waiting: int) -> str:
        """Discard tokens without text after a while: they no longer affect anything and must not be decoded forever."""
        if waiting >= HELD_TOKENS:
            del self._ids[self._emitted : -1]
        return ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._vocabulary.decode(ids, skip_special_tokens=False)
