"""Discover by experiment how a tokenizer treats texts: which special tokens it adds and whether it splits at words."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Encoding, Tokenizer

from shoal.errors import ModelFileError

_WORDS = ("a", "1", "the")
_PROBES = (*_WORDS, *(f"{word} {word}" for word in _WORDS))
"""Includes two-word texts: a tokenizer that knows none of the words gives one token for each, so only the number
differs."""


def find_frame(raw: Tokenizer, file: str) -> tuple[list[int], list[int]]:
    """Return the special tokens before and after a text, found by tokenizing texts with and without them. Raises
    ModelFileError if they do not surround every text, or differ between texts."""
    found: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    seen: set[tuple[int, ...]] = set()
    for probe in _PROBES:
        try:
            framed: Encoding = raw.encode_batch_fast([probe])[0]
            bare = raw.encode_batch([probe], add_special_tokens=False)[0]  # the fast variant has no offsets
        except Exception:  # the library raises plain Exception on unknown words if there is no unknown token
            continue
        starts = [start for start, _ in bare.offsets]
        if starts != sorted(starts):
            raise ModelFileError("it repeats the text", file=file, key="post_processor")
        if bare.ids:
            found.add(_split_around(framed, bare.ids, file))
            seen.add(tuple(bare.ids))
    if len(found) == 1 and len(seen) > 1:
        before, after = found.pop()
        return list(before), list(after)
    raise ModelFileError("its special tokens do not surround the text", file=file, key="post_processor")


def _split_around(framed: Encoding, bare: list[int], file: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    for start in range(len(framed.ids) - len(bare) + 1):
        if framed.ids[start : start + len(bare)] == bare:
            if any(framed.type_ids):
                raise ModelFileError("segment ids other than 0 are not supported", file=file, key="post_processor")
            return tuple(framed.ids[:start]), tuple(framed.ids[start + len(bare) :])
    raise ModelFileError("it changes the text", file=file, key="post_processor")


@dataclass(frozen=True, slots=True)
class PairFrame:
    """The special tokens before, between and after the two texts of a pair, and the segment ids of all five parts: one
    per special token, and one for all tokens of a text."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    before_types: tuple[int, ...]
    first_type: int
    between_types: tuple[int, ...]
    second_type: int
    after_types: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def ids(self, first: list[int], second: list[int]) -> list[int]:
        return [*self.before, *first, *self.between, *second, *self.after]

    def types(self, first: int, second: int) -> list[int]:
        """Return the segment ids of a pair with `first` and `second` tokens."""
        return [
            *self.before_types,
            *(self.first_type,) * first,
            *self.between_types,
            *(self.second_type,) * second,
            *self.after_types,
        ]


_PAIRS = (
    *(("a", "b"), ("1", "2"), ("the", "fox")),
    *((f"{word} {word}", word) for word in _WORDS),
    *((word, f"{word} {word}") for word in _WORDS),
)
"""Pairs of different texts, and of texts of different length."""


def find_pair_frame(raw: Tokenizer, file: str) -> PairFrame:
    """Return how pairs of texts are framed, found by tokenizing pairs with and without special tokens. Raises
    ModelFileError if the second text does not follow the first, each exactly once, if the tokens of one text have more
    than one segment id, or if pairs are framed differently."""
    found: set[PairFrame | None] = set()
    seen: tuple[set[tuple[int, ...]], set[tuple[int, ...]]] = (set(), set())
    for probe in _PAIRS:
        try:
            framed: Encoding = raw.encode_batch([probe])[0]  # the fast variant has different segment ids
            bare = [e.ids for e in raw.encode_batch_fast(list(probe), add_special_tokens=False)]
        except Exception:  # as in `find_frame`: without an unknown token the library fails on unknown words
            continue
        if all(bare):
            found.add(_split_frame(framed, *bare))
            for texts, ids in zip(seen, bare, strict=True):
                texts.add(tuple(ids))
    only = found.pop() if len(found) == 1 else None
    if only is not None and all(len(texts) > 1 for texts in seen):
        return only
    raise ModelFileError(
        "it does not append the second of two texts to the first, each unchanged and in its own segment",
        file=file,
        key="post_processor",
    )


def _split_frame(framed: Encoding, first: list[int], second: list[int]) -> PairFrame | None:
    ids, types = framed.ids, framed.type_ids
    for start in range(len(ids) - len(first) - len(second) + 1):
        middle = start + len(first)
        if ids[start:middle] != first:
            continue
        for at in range(middle, len(ids) - len(second) + 1):
            end = at + len(second)
            own, other = set(types[start:middle]), set(types[at:end])
            if ids[at:end] == second and len(own) == len(other) == 1:
                return PairFrame(
                    before=tuple(ids[:start]),
                    between=tuple(ids[middle:at]),
                    after=tuple(ids[end:]),
                    before_types=tuple(types[:start]),
                    first_type=own.pop(),
                    between_types=tuple(types[middle:at]),
                    second_type=other.pop(),
                    after_types=tuple(types[end:]),
                )
    return None


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


def words_stand_alone(raw: Tokenizer) -> tuple[bool, bool]:
    """Whether the tokens of `left + right`, split at a space, start with those of `left`, and end with those of
    `right`.

    The pre-tokenizer must split words at spaces, so that the model never sees across one, and the probes must confirm
    it.
    """
    if any(" " in token.content for token in raw.get_added_tokens_decoder().values()) or not _parts_words(raw):
        return False, False
    pairs = [(left, right) for left in _LEFT for right in _RIGHT]
    probes = [*_LEFT, *_RIGHT, *(left + right for left, right in pairs)]
    try:
        encodings = raw.encode_batch_fast(probes, add_special_tokens=False)
    except Exception:  # as in `find_frame`; a tokenizer that cannot read the probes is not safe for cutting texts
        return False, False
    tokens = {probe: encoding.ids for probe, encoding in zip(probes, encodings, strict=True)}
    starts = all(tokens[a + b][: len(tokens[a])] == tokens[a] for a, b in pairs)
    ends = all(tokens[a + b][len(tokens[a + b]) - len(tokens[b]) :] == tokens[b] for a, b in pairs)
    return starts, ends


def _parts_words(raw: Tokenizer) -> bool:
    found = pre_tokenize(raw, "bb cc")
    return any("b" in part for part in found) and not any("b" in part and "c" in part for part in found)


def pre_tokenize(raw: Tokenizer, text: str) -> list[str]:
    """Split a text as the pre-tokenizer does; the model sees each part separately."""
    if raw.normalizer is not None:
        text = raw.normalizer.normalize_str(text)
    if raw.pre_tokenizer is None:
        return [text]
    return [part for part, _ in raw.pre_tokenizer.pre_tokenize_str(text)]
