"""How many tokens an answer has, and how many of them the model only thought."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.pipelines.chat.segments import Segment
from shoal.pipelines.chat.vocabulary import Vocabulary

BYTES_PER_TOKEN = 4
"""Where there is no tokenizer: about what English has."""
UNSETTLED = 2048
"""Only so many characters are counted again when a text goes on."""


class TextCount:
    """Tokens of a growing text: as the vocabulary has it, else by its bytes."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._settled = 0
        self._text = ""
        self._octets = 0
        self._known: int | None = 0

    def add(self, text: str) -> None:
        if not text:
            return
        self._known = None
        if self._vocabulary is None:
            self._octets += len(text.encode("utf-8", "surrogatepass"))
            return
        self._text += text
        while len(self._text) > UNSETTLED:
            # At a space, where nearly every tokenizer parts words.
            at = self._text.rfind(" ", 1, UNSETTLED)
            at = at if at > 0 else UNSETTLED
            self._settled += self._vocabulary.count(self._text[:at])
            self._text = self._text[at:]

    def fitting(self, text: str, most: int) -> str:
        """The beginning of a text that can be added without more than `most` tokens in all."""
        if self._vocabulary is None:
            octets = text.encode("utf-8", "surrogatepass")
            room = max(0, most * BYTES_PER_TOKEN - self._octets)
            return text if len(octets) <= room else octets[:room].decode("utf-8", "ignore")
        whole = self._text + text
        end = self._vocabulary.find_token_start(whole, max(0, most - self._settled))
        return text if end is None else whole[len(self._text) : end]

    @property
    def value(self) -> int:
        if self._known is None:
            if self._vocabulary is None:
                self._known = -(-self._octets // BYTES_PER_TOKEN)
            else:
                self._known = self._settled + self._vocabulary.count(self._text)
        return self._known


class Tally:
    """Counts as the backend does where it tells, by ids where it gives those, else by the text."""

    def __init__(self, vocabulary: Vocabulary | None, most: int | None = None) -> None:
        self._most = most
        self._full = False
        self._told = 0
        self._thought = 0
        self._waiting = 0
        self._text = TextCount(vocabulary)
        self._thoughts = TextCount(vocabulary)

    @property
    def tokens(self) -> int:
        if self._full and self._most is not None:
            return self._most
        return self._told + self._text.value

    def fitting(self, text: str) -> str:
        """A piece that nobody counted, without what is over `most` tokens; if anything was, there are just so many."""
        if self._most is None:
            return text
        kept = "" if self._full else self._text.fitting(text, self._most)
        self._full = self._full or len(kept) < len(text)
        return kept

    @property
    def reasoning_tokens(self) -> int:
        return min(self._thought + self._thoughts.value, self.tokens)

    def add_plain(self, tokens: int | None, text: str) -> None:
        """A piece of an answer that has no thoughts, as `add` counts it."""
        if tokens is None:
            self._text.add(text)
        else:
            self._told += tokens

    def add(self, tokens: int | None, text: str, segments: Sequence[Segment]) -> None:
        """A piece: its tokens (None: nobody counted them), its text, and what came out. What nothing came out of yet
        goes with what comes next."""
        thoughts = "".join(segment.text for segment in segments if segment.kind == "reasoning")
        if tokens is None:
            self._text.add(text)
            self._thoughts.add(thoughts)
            return
        self._told += tokens
        self._waiting += tokens
        if segments:
            whole = sum(segment.size for segment in segments)
            self._thought += round(self._waiting * len(thoughts) / whole) if whole else 0
            self._waiting = 0
