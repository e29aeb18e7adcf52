"""A model's tokenizer.json: texts to ids, cut to what the model takes without reading all of a long text.

A long text is cut by characters before it is tokenised, and never at the price of other tokens than the whole text
would give. Where a tokenizer treats each word on its own, the tokens of a text up to a space are the first tokens of
the whole text; so a piece that ends (or starts) at a space between words, and gives `MARGIN` tokens more than are kept,
is as good as the whole. Whether a tokenizer is of that kind is found out once, when it is loaded; for the others, and
where no space is found, all of the text is tokenised, as far as `most_chars` allows: a token costs hundreds of bytes
while it is made, so that nobody may ask for millions of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Encoding, Tokenizer
from tokenizers.normalizers import Lowercase, Normalizer
from tokenizers.normalizers import Sequence as Normalizers

from shoal.errors import ModelFileError
from shoal.types import Direction

CHARS_PER_TOKEN = 8
"""The first piece of a text: ordinary prose has 4 to 5 characters a token, so that one piece nearly always does."""
GROWTH = 4
MARGIN = 16
"""Normalizers that collapse or prepend blanks can change a token next to the cut; so many are left out of account."""
WINDOW = 4096
TRIES = 64
CHARS_AT_ONCE = 262_144
READ_CHARS = 65_536
"""A text up to this size is read whole where it must be, whatever the model takes."""
DENSE = 32
SPARSE = 250
"""What is longer, and cannot be cut well, is cut anywhere: after DENSE characters a token that is kept, and where those
are not enough after SPARSE, the bound of Text Embeddings Inference."""


def most_chars(max_tokens: int) -> int:
    """So much of one text is tokenised at most for a model that takes `max_tokens`."""
    return max(READ_CHARS, max_tokens * SPARSE)


@dataclass(frozen=True, slots=True)
class Fitted:
    """`ids`: what is kept, special tokens included. `total`: the text's tokens; a lower bound when not `exact`.

    A text that was not read to its end counts as one that is too long.
    """

    ids: list[int]
    total: int
    exact: bool


class TextTokenizer:
    """Safe to use from several threads at once; nothing changes after construction.

    `prefix` and `suffix` are the special tokens around every text. Padding and truncation of the file itself are off.
    Raises ModelFileError when the file is missing, broken, or frames texts in a way that cannot be kept when cutting.
    """

    def __init__(self, folder: Path, file: str, *, lower_case: bool = False) -> None:
        self.raw = read_tokenizer(folder, file)
        self.raw.no_padding()
        self.raw.no_truncation()
        if lower_case:
            _lower_case(self.raw)
        self.vocab_size: int = self.raw.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in self.raw.get_added_tokens_decoder().items() if token.special)
        self.prefix, self.suffix = _frame(self.raw, file)
        self.cuts_right, self.cuts_left = _words_stand_alone(self.raw)
        self._added_ends = {
            token.content[-1:] for token in self.raw.get_added_tokens_decoder().values() if token.rstrip
        }
        self._ideographs = len(_parts(self.raw, "東京")) == 2

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        return [e.ids for e in self.raw.encode_batch_fast(texts, add_special_tokens=special)]

    def fit(self, texts: Sequence[str], directions: Sequence[Direction], max_tokens: int) -> list[Fitted]:
        """The ids of each text, cut to `max_tokens` at the end that its direction names; special tokens stay."""
        size, most = max_tokens * CHARS_PER_TOKEN, max(READ_CHARS, max_tokens * DENSE)
        pieces = [
            text if len(text) <= size else self.piece(text, direction, size, most)
            for text, direction in zip(texts, directions, strict=True)
        ]
        fitted: list[Fitted] = []
        while len(fitted) < len(pieces):
            start = len(fitted)
            for i, encoding in enumerate(self.raw.encode_batch_fast(_at_once(pieces, start)), start):
                ids = encoding.ids
                if len(ids) <= max_tokens and pieces[i] is texts[i]:
                    fitted.append(Fitted(ids, len(ids), True))
                else:
                    fitted.append(self._cut(texts[i], pieces[i], ids, directions[i], max_tokens))
        return fitted

    def piece(self, text: str, direction: Direction, size: int, most: int = READ_CHARS) -> str:
        """At least `size` characters of the kept end, up to a space between words; where there is no such place within
        `most` characters, those, or `text` itself when it has no more."""
        right = direction == "right"
        if self.cuts_right if right else self.cuts_left:
            while size < min(len(text), most):
                at = self._boundary(text, size) if right else self._boundary_before(text, len(text) - size)
                if at is not None:
                    return text[:at] if right else text[at:]
                size *= GROWTH
        if len(text) <= most:
            return text
        return text[:most] if right else text[-most:]

    def chunks(self, text: str, size: int) -> Iterator[str]:
        """All of `text` in pieces of about `size` characters whose tokens, joined, are the tokens of the text."""
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
        """The first place from `at` (at least 1) on that parts words, near enough to be worth the search."""
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
        """The last place up to `at` that parts words, near enough to be worth the search."""
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
        """Whether a space after it parts words, come what may: no blank, nothing that a normalizer takes away, and not
        the end of an added token, which may take the space for itself."""
        return (char.isalnum() or "!" <= char <= "~") and char not in self._added_ends

    def _cut(self, text: str, piece: str, ids: list[int], direction: Direction, max_tokens: int) -> Fitted:
        most = most_chars(max_tokens)
        while piece is not text and len(piece) < most and len(ids) < max_tokens + MARGIN:
            size = len(piece) * GROWTH
            piece = self.piece(text, direction, size, min(most, max(READ_CHARS, size)))
            ids = self.raw.encode_batch_fast([piece])[0].ids
        exact = piece is text
        total = len(ids) if exact else max(len(ids), max_tokens + 1)
        if len(ids) <= max_tokens:
            return Fitted(ids, total, exact)
        frame = len(self.prefix) + len(self.suffix)
        room = max(max_tokens - frame, 0)
        start = len(self.prefix) if direction == "right" else len(ids) - len(self.suffix) - room
        return Fitted([*self.prefix, *ids[start : start + room], *self.suffix], total, exact)


def _at_once(pieces: list[str], start: int) -> list[str]:
    """The pieces from `start` that are tokenised in one call: nearly always the rest, and always at least one."""
    stop, size = start, 0
    while stop < len(pieces) and (stop == start or size + len(pieces[stop]) <= CHARS_AT_ONCE):
        size += len(pieces[stop])
        stop += 1
    return pieces[start:stop]


def read_tokenizer(folder: Path, file: str) -> Tokenizer:
    """The tokenizer in a model's folder, as the file has it. Raises ModelFileError."""
    path = folder / file
    if not path.is_file():
        raise ModelFileError("the file is missing; a tokenizer.json of the tokenizers library is needed", file=file)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises plain Exception for everything that is wrong in the file
        raise ModelFileError(f"the tokenizer cannot be read: {error}", file=file) from error


def _lower_case(raw: Tokenizer) -> None:
    """Lower-case before all else, as sentence-transformers does for do_lower_case."""
    own = raw.normalizer
    parts: list[Normalizer] = [] if own is None else [own]
    if isinstance(own, Normalizers):
        parts = [own[i] for i in range(len(own))]
    if not any(isinstance(part, Lowercase) for part in parts):
        raw.normalizer = Normalizers([Lowercase(), *parts])


def _frame(raw: Tokenizer, file: str) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text, found by tokenising one with and without them."""
    for probe in ("a", "1", "the"):
        try:
            framed: Encoding = raw.encode_batch_fast([probe])[0]
            bare = raw.encode_batch_fast([probe], add_special_tokens=False)[0].ids
        except Exception:  # plain Exception again: without an unknown token the library fails on unknown words
            continue
        for start in range(len(framed.ids) - len(bare) + 1) if bare else ():
            if framed.ids[start : start + len(bare)] == bare:
                if any(framed.type_ids):
                    raise ModelFileError("segment ids other than 0 are not supported", file=file, key="post_processor")
                return framed.ids[:start], framed.ids[start + len(bare) :]
    raise ModelFileError("its special tokens do not stand around the text", file=file, key="post_processor")


_LEFT = (
    "word",
    "wow!",
    "f(x).",
    "! '",
    "don't stop",
    "x=1, y2",
    "Größe",
    "слово",
    "ไทย日本",
    "e\u0301tude",
    "a\tb\nc",
    "end.\n\nNext",
    "a_b  c3",
)
_RIGHT = (" word", "  two", " \tTab", " 's", " ...", " 2024-01", " 日本", " \u0301x", " \n\n")


def _words_stand_alone(raw: Tokenizer) -> tuple[bool, bool]:
    """Whether the tokens of `left + right`, cut at a space, start with those of `left`, and end with those of `right`.

    The pre-tokenizer must part words at spaces (then no model sees past one), and the probes must agree with it.
    """
    if any(" " in token.content for token in raw.get_added_tokens_decoder().values()) or not _parts_words(raw):
        return False, False
    pairs = [(left, right) for left in _LEFT for right in _RIGHT]
    probes = [*_LEFT, *_RIGHT, *(left + right for left, right in pairs)]
    try:
        encodings = raw.encode_batch_fast(probes, add_special_tokens=False)
    except Exception:  # as in _frame: a tokenizer that cannot read the probes is not known well enough to cut its texts
        return False, False
    tokens = {probe: encoding.ids for probe, encoding in zip(probes, encodings, strict=True)}
    starts = all(tokens[a + b][: len(tokens[a])] == tokens[a] for a, b in pairs)
    ends = all(tokens[a + b][len(tokens[a + b]) - len(tokens[b]) :] == tokens[b] for a, b in pairs)
    return starts, ends


def _parts_words(raw: Tokenizer) -> bool:
    parts = _parts(raw, "bb cc")
    return any("b" in part for part in parts) and not any("b" in part and "c" in part for part in parts)


def _parts(raw: Tokenizer, text: str) -> list[str]:
    """What the pre-tokenizer makes of a text; the model sees each part on its own."""
    if raw.normalizer is not None:
        text = raw.normalizer.normalize_str(text)
    if raw.pre_tokenizer is None:
        return [text]
    return [part for part, _ in raw.pre_tokenizer.pre_tokenize_str(text)]


def _is_ideograph(char: str) -> bool:
    return "\u4e00" <= char <= "\u9fff"
