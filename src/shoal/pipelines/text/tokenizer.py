"""Tokenize texts with a model's tokenizer.json, cut to the model's limit without reading all of a long text.

A long text is cut by characters before it is tokenized, but only where that gives the same tokens as the whole text. If
a tokenizer treats each word separately, the tokens of a text up to a space are the first tokens of the whole text. So a
piece that ends (or starts) at a space between words, and gives `MARGIN` tokens more than are kept, is as good as the
whole. Whether a tokenizer is of that kind is tested once, when it is loaded. For other tokenizers, and if no space is
found, the whole text is tokenized, up to `most_chars`: a token takes hundreds of bytes while it is made, so no client
may request millions of them.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import Regex, Tokenizer
from tokenizers.normalizers import Lowercase, Normalizer, Replace, Strip
from tokenizers.normalizers import Sequence as Normalizers

from shoal.errors import InvalidValue, ModelFileError, ShoalError, TooLong
from shoal.pipelines import probing
from shoal.specs import TextSpec
from shoal.types import Direction

CHARS_PER_TOKEN = 8
"""Characters per token of the first piece. Prose has 4 to 5, so one piece is nearly always enough."""
GROWTH = 4
MARGIN = 16
"""Extra tokens, since normalizers that collapse or prepend blanks can change tokens next to the cut."""
WINDOW = 4096
TRIES = 64
CHARS_AT_ONCE = 262_144
READ_CHARS = 65_536
"""A text up to this size is read whole if it cannot be cut, whatever the model's limit."""
_BLANKS = r"[\s\x1c-\x1f]+"
"""Python's white space; the tokenizers library omits the last four."""
DENSE = 32
SPARSE = 250
"""A longer text that cannot be cut safely is cut anywhere: after DENSE characters per token kept, or, if those are not
enough, after SPARSE, the limit of Text Embeddings Inference."""


SAMPLES = (
    "The quick brown fox jumps over the lazy dog, and unbelievably it wasn't tokenized in 1984.",
    "Où est la bibliothèque? Größe, naïve, façade, señor, Ångström.",
    "for i in range(10): print(f'{i:>3}')  # 3.14159",
    "東京 Привет мир नमस्ते",
)
"""Texts that tokenizers with a different vocabulary, case or accent handling tokenize differently."""


def most_chars(max_tokens: int) -> int:
    """Maximum characters of one text to tokenize for a model with `max_tokens`."""
    return max(READ_CHARS, max_tokens * SPARSE)


class FittedText(msgspec.Struct, frozen=True, array_like=True):
    """A text cut to a limit. `ids`: the ids kept, special tokens included. `total`: the text's tokens; a lower bound if
    not `exact`.

    A text that was not read to its end counts as too long.
    """

    ids: list[int]
    total: int
    exact: bool


def too_long_error(total: int, exact: bool, limit: int) -> TooLong:
    """Return the error for an input of `total` tokens, or of at least that many if not `exact`."""
    amount = f"{total}" if exact else f"at least {total}"
    return TooLong(
        f"the input has {amount} tokens, but the model accepts at most {limit}; shorten it, or set truncate",
        param="input",
    )


def fingerprint(folder: Path, file: str) -> str:
    """Return 16 hex digits that identify a tokenizer by the ids of a few sample texts. Raises ModelFileError.
    Blocks."""
    tokenizer = read_tokenizer(folder, file)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    found = [each.ids for each in tokenizer.encode_batch_fast(SAMPLES)]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def identify_tokenizer(tokenizer: TextTokenizer, spec: TextSpec) -> str:
    """Return 32 hex digits of all that decides which tokens a model's texts become, and more."""
    parts = (tokenizer.digest, tokenizers.__version__, spec)
    return hashlib.sha256(msgspec.msgpack.encode(parts, order="deterministic")).hexdigest()[:32]


class TextTokenizer:
    """Tokenizes texts for one model; immutable after construction, so safe to use from several threads at once.

    `digest`, and `size` in bytes, are those of the file. `prefix` and `suffix` are the special tokens around every
    text. The file's own padding and truncation are disabled. `frame` False: no special tokens, whatever the file says.
    `dropped`: ids to remove from every text before counting and cutting. `cleaning` is that of a TextSpec. Raises
    ModelFileError if the file is missing, broken, or frames texts in a way that cutting would break.
    """

    def __init__(
        self,
        folder: Path,
        file: str,
        *,
        lower_case: bool = False,
        frame: bool = True,
        dropped: Sequence[int] = (),
        cleaning: str = "",
    ) -> None:
        content = _read_file(folder, file)
        self.raw = _parse_tokenizer(content, file)
        self.digest, self.size = hashlib.sha256(content).hexdigest(), len(content)
        self.raw.no_padding()
        self.raw.no_truncation()
        if cleaning:
            _clean(self.raw, cleaning)
        if lower_case:
            _lower_case(self.raw)
        self.vocab_size: int = self.raw.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in self.raw.get_added_tokens_decoder().items() if token.special)
        self.prefix, self.suffix = probing.find_frame(self.raw, file) if frame else ([], [])
        self.cuts_right, self.cuts_left = probing.words_stand_alone(self.raw)
        self._frames = frame
        self._dropped = frozenset(dropped)
        self._added_ends = {
            token.content[-1:] for token in self.raw.get_added_tokens_decoder().values() if token.rstrip
        }
        self._ideographs = len(probing.pre_tokenize(self.raw, "東京")) == 2

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        found = [e.ids for e in self.raw.encode_batch_fast(texts, add_special_tokens=special and self._frames)]
        return [self._drop_ids(ids) for ids in found] if self._dropped else found

    def fit(
        self, texts: Sequence[str], directions: Sequence[Direction], max_tokens: int, *, special: bool = True
    ) -> list[FittedText]:
        """Like `fit_each` with one limit for all texts, but raises the error of a text that cannot be read."""
        fitted: list[FittedText] = []
        for each in self.fit_each(texts, directions, [max_tokens] * len(texts), special=special):
            if isinstance(each, ShoalError):
                raise each
            fitted.append(each)
        return fitted

    def fit_each(
        self, texts: Sequence[str], directions: Sequence[Direction], limits: Sequence[int], *, special: bool = True
    ) -> list[FittedText | ShoalError]:
        """Return the ids of each text, cut to its limit in its direction; special tokens stay. A text that the
        tokenizer cannot read becomes an InvalidValue entry.

        `special` False: only the text's own tokens.
        """
        pieces = [
            text if len(text) <= max(limit, 1) * CHARS_PER_TOKEN else self._first_piece(text, direction, limit)
            for text, direction, limit in zip(texts, directions, limits, strict=True)
        ]
        fitted: list[FittedText | ShoalError] = []
        try:
            while len(fitted) < len(pieces):
                start = len(fitted)
                stop, chars = start + 1, len(pieces[start])  # one call takes nearly always all pieces
                while stop < len(pieces) and chars + len(pieces[stop]) <= CHARS_AT_ONCE:
                    chars += len(pieces[stop])
                    stop += 1
                for i, ids in enumerate(self.encode(pieces[start:stop], special=special), start):
                    if len(ids) <= limits[i] and pieces[i] is texts[i]:
                        fitted.append(FittedText(ids, len(ids), True))
                    else:
                        fitted.append(self._cut(texts[i], pieces[i], ids, directions[i], limits[i], special=special))
        except Exception as error:  # the library raises plain Exception, without saying which text failed
            if len(texts) == 1:
                return [InvalidValue(f"the model's tokenizer cannot read this text: {error}", param="input")]
            return [
                self.fit_each([text], [direction], [limit], special=special)[0]
                for text, direction, limit in zip(texts, directions, limits, strict=True)
            ]
        return fitted

    def count(self, text: str, max_chars: int) -> tuple[int, bool]:
        """Count the tokens of the first `max_chars` characters, without special ones; also return whether that is the
        whole text."""
        pieces = list(self.chunks(text[:max_chars], READ_CHARS))
        return sum(len(self.encode([piece], special=False)[0]) for piece in pieces), len(text) <= max_chars

    def piece(self, text: str, direction: Direction, size: int, max_chars: int = READ_CHARS) -> str:
        """Return at least `size` characters of the kept end, up to a space between words. If there is no such place
        within `max_chars` characters, return `max_chars` characters, or all of a shorter `text`."""
        right = direction == "right"
        if self.cuts_right if right else self.cuts_left:
            while size < min(len(text), max_chars):
                at = self._boundary(text, size) if right else self._boundary_before(text, len(text) - size)
                if at is not None:
                    return text[:at] if right else text[at:]
                size *= GROWTH
        if len(text) <= max_chars:
            return text
        return text[:max_chars] if right else text[-max_chars:]

    def _first_piece(self, text: str, direction: Direction, max_tokens: int) -> str:
        return self.piece(text, direction, max(max_tokens, 1) * CHARS_PER_TOKEN, max(READ_CHARS, max_tokens * DENSE))

    def chunks(self, text: str, size: int) -> Iterator[str]:
        """Split `text` into pieces of about `size` characters whose tokens, joined, are the tokens of the text."""
        start = 0
        if self.cuts_right and self.cuts_left:
            while len(text) - start > size:
                at, ahead = None, size
                while at is None and start + ahead < len(text):
                    at = self._boundary(text, start + ahead)
                    ahead *= GROWTH
                if at is None:
                    break
                yield text[start:at]
                start = at
        yield text[start:] if start else text

    def _boundary(self, text: str, at: int) -> int | None:
        """Return the first word boundary from `at` (at least 1) on, searching a limited distance."""
        if self._ideographs:
            for place in range(at, min(at + TRIES, len(text))):
                if _is_ideograph(text[place - 1]) and _is_ideograph(text[place]):
                    return place
        stop = at + WINDOW
        for _ in range(TRIES):
            at = text.find(" ", at, stop)
            if at < 0:
                return None
            if self._ends_word(text[at - 1]):
                return at
            at += 1
        return None

    def _boundary_before(self, text: str, at: int) -> int | None:
        """Return the last word boundary up to `at`, searching a limited distance."""
        if self._ideographs:
            for place in range(at, max(at - TRIES, 0), -1):
                if _is_ideograph(text[place - 1]) and _is_ideograph(text[place]):
                    return place
        stop = max(at - WINDOW, 1)
        at += 1
        for _ in range(TRIES):
            at = text.rfind(" ", stop, at)
            if at < 0:
                return None
            if self._ends_word(text[at - 1]):
                return at
        return None

    def _ends_word(self, char: str) -> bool:
        """Whether a space after this character always separates words: it is no blank, no normalizer removes it, and it
        does not end an added token, which may absorb the space."""
        return (char.isalnum() or "!" <= char <= "~") and char not in self._added_ends

    def _drop_ids(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i not in self._dropped]

    def _cut(
        self, text: str, piece: str, ids: list[int], direction: Direction, max_tokens: int, *, special: bool
    ) -> FittedText:
        max_chars = most_chars(max_tokens)
        while piece is not text and len(piece) < max_chars and len(ids) < max_tokens + MARGIN:
            size = len(piece) * GROWTH
            piece = self.piece(text, direction, size, min(max_chars, max(READ_CHARS, size)))
            ids = self.encode([piece], special=special)[0]
        exact = piece is text
        total = len(ids) if exact else max(len(ids), max_tokens + 1)
        if len(ids) <= max_tokens:
            return FittedText(ids, total, exact)
        prefix, suffix = (self.prefix, self.suffix) if special else ([], [])
        space = max(max_tokens - len(prefix) - len(suffix), 0)
        start = len(prefix) if direction == "right" else len(ids) - len(suffix) - space
        return FittedText([*prefix, *ids[start : start + space], *suffix], total, exact)


def read_tokenizer(folder: Path, file: str) -> Tokenizer:
    """Load the tokenizer of a model's folder, unchanged. Raises ModelFileError."""
    return _parse_tokenizer(_read_file(folder, file), file)


def _read_file(folder: Path, file: str) -> bytes:
    path = folder / file
    if not path.is_file():
        raise ModelFileError("the file is missing; a tokenizer.json of the tokenizers library is needed", file=file)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"the tokenizer cannot be read: {error}", file=file) from error


def _parse_tokenizer(content: bytes, file: str) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # the tokenizers library raises plain Exception for everything that is wrong in the file
        raise ModelFileError(f"the tokenizer cannot be read: {error}", file=file) from error


def _clean(raw: Tokenizer, cleaning: str) -> None:
    """Add the cleaning that SiglipTokenizer does before its sentencepiece model reads a text."""
    if cleaning != "canonical":
        raise ModelFileError(f"unknown cleaning {cleaning!r}; fetch the model again", file="tokenizer_config.json")
    punctuation = Replace(Regex(f"[{re.escape(string.punctuation)}]"), "")
    raw.normalizer = Normalizers([punctuation, Replace(Regex(_BLANKS), " "), Strip(), *_normalizers(raw)])


def _normalizers(raw: Tokenizer) -> list[Normalizer]:
    own = raw.normalizer
    if isinstance(own, Normalizers):
        return [own[i] for i in range(len(own))]
    return [] if own is None else [own]


def _lower_case(raw: Tokenizer) -> None:
    """Lowercase before everything else, as sentence-transformers does for do_lower_case."""
    parts = _normalizers(raw)
    if not any(isinstance(part, Lowercase) for part in parts):
        raw.normalizer = Normalizers([Lowercase(), *parts])


def _is_ideograph(char: str) -> bool:
    return "\u4e00" <= char <= "\u9fff"
