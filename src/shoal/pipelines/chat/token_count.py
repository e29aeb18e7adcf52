"""Count the tokens of an answer, and how many of them are reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.pipelines.chat.segments import Segment
from shoal.pipelines.chat.vocabulary import Vocabulary

BYTES_PER_TOKEN = 4
"""Bytes per token without a tokenizer: about the average of English."""
UNSETTLED = 2048
"""Maximum characters that are counted again when a text grows."""


class TextCount:
    """Counts the tokens of a growing text: with the vocabulary, or else by its bytes."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._settled_tokens = 0
        self._text = ""
        self._octets = 0
        self._cached_value: int | None = 0

    def add(self, text: str) -> None:
        if not text:
            return
        self._cached_value = None
        if self._vocabulary is None:
            self._octets += len(text.encode("utf-8", "surrogatepass"))
            return
        self._text += text
        while len(self._text) > UNSETTLED:
            # Split at a space, where nearly every tokenizer splits words.
            at = self._text.rfind(" ", 1, UNSETTLED)
            at = at if at > 0 else UNSETTLED
            self._settled_tokens += self._vocabulary.count(self._text[:at])
            self._text = self._text[at:]

    def fitting(self, text: str, max_tokens: int) -> str:
        """Return the longest beginning of `text` that keeps the total within `max_tokens` tokens."""
        if self._vocabulary is None:
            octets = text.encode("utf-8", "surrogatepass")
            room = max(0, max_tokens * BYTES_PER_TOKEN - self._octets)
            return text if len(octets) <= room else octets[:room].decode("utf-8", "ignore")
        whole = self._text + text
        end = self._vocabulary.find_token_start(whole, max(0, max_tokens - self._settled_tokens))
        return text if end is None else whole[len(self._text) : end]

    @property
    def value(self) -> int:
        if self._cached_value is None:
            if self._vocabulary is None:
                self._cached_value = -(-self._octets // BYTES_PER_TOKEN)
            else:
                self._cached_value = self._settled_tokens + self._vocabulary.count(self._text)
        return self._cached_value


class Tally:
    """Counts as the backend does if it reports counts, by ids if it returns ids, or else by the text."""

    def __init__(self, vocabulary: Vocabulary | None, max_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self._is_full = False
        self._reported_tokens = 0
        self._reported_reasoning = 0
        self._pending_tokens = 0
        self._text = TextCount(vocabulary)
        self._reasoning_text = TextCount(vocabulary)

    @property
    def tokens(self) -> int:
        if self._is_full and self._max_tokens is not None:
            return self._max_tokens
        return self._reported_tokens + self._text.value

    def fitting(self, text: str) -> str:
        """Cut a piece without a token count at `most` tokens; once something was cut, the total is exactly `most`."""
        if self._max_tokens is None:
            return text
        kept = "" if self._is_full else self._text.fitting(text, self._max_tokens)
        self._is_full = self._is_full or len(kept) < len(text)
        return kept

    @property
    def reasoning_tokens(self) -> int:
        return min(self._reported_reasoning + self._reasoning_text.value, self.tokens)

    def add_plain(self, tokens: int | None, text: str) -> None:
        """Count a piece of an answer without reasoning, as `add` does."""
        if tokens is None:
            self._text.add(text)
        else:
            self._reported_tokens += tokens

    def add(self, tokens: int | None, text: str, segments: Sequence[Segment]) -> None:
        """Count a piece: its tokens (None: not counted), its text, and the segments it produced. Tokens that have
        produced nothing yet are attributed with the next segments."""
        thoughts = "".join(segment.text for segment in segments if segment.kind == "reasoning")
        if tokens is None:
            self._text.add(text)
            self._reasoning_text.add(thoughts)
            return
        self._reported_tokens += tokens
        self._pending_tokens += tokens
        if segments:
            whole = sum(segment.size for segment in segments)
            self._reported_reasoning += round(self._pending_tokens * len(thoughts) / whole) if whole else 0
            self._pending_tokens = 0
