"""A language model's tokenizer.json: converts texts to ids, ids to texts, and gives the meaning of single tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tokenizers import Tokenizer
from tokenizers.models import BPE

from shoal.errors import InvalidValue
from shoal.pipelines.text.tokenizer import read_tokenizer

Form: TypeAlias = Literal["byte_level", "byte_fallback", "other"]

CHARS_PER_TOKEN = 8
"""A text with fewer characters per token that fits is tokenized at once; prose has 4 to 5."""
PIECE, SMALLEST = 1 << 16, 1 << 11
"""Characters of a longer text to tokenize at a time: one character takes up to 200 bytes meanwhile."""
AT_ONCE = 1 << 20
"""Maximum characters to tokenize at once before it is known that they fit."""
MARGIN = 16
"""Upper bound of the extra tokens that result from cutting a word or special token at the end of a piece."""
_OCTET = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a tokenizer's decoder joins tokens.

    "byte_level": tokens are spelled in GPT-2's 256 letters, one per byte. "byte_fallback": tokens are text in which
    `replacements` are made, or one byte spelled <0x00>; up to `strip` times, `stripped` is removed from the beginning
    of the whole text. "other": only the decoder itself knows.
    """

    form: Form
    replacements: tuple[tuple[str, str], ...] = ()
    stripped: str = " "
    strip: int = 0


class Vocabulary:
    """A tokenizer with its special tokens. Safe to use from several threads at once: it only adds to a cache.

    `size` is one more than the largest id. `eos_ids`, including that of `eos_token`, end an answer. `special_ids` are
    the tokens that are not text. `bos_id` begins a text; `adds_bos`: plain texts get it here. The file's own padding
    and truncation are disabled. Raises ModelFileError if the file is missing or broken.
    """

    def __init__(
        self,
        folder: Path,
        file: str = "tokenizer.json",
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        self.raw = read_tokenizer(folder, file)
        self.raw.no_padding()
        self.raw.no_truncation()
        words = self.raw.get_vocab(with_added_tokens=True)
        self.size = 1 + max(words.values(), default=-1)
        self.special_ids = frozenset(i for i, token in self.raw.get_added_tokens_decoder().items() if token.special)
        self._octets_per_token = max((len(word.encode()) for word in words), default=1) * shrinkage(self.raw)
        eos = self.raw.token_to_id(eos_token) if eos_token else None
        self.eos_ids = frozenset(eos_ids) | ({eos} if eos is not None else frozenset())
        self.spelling = _spelling(self.raw)
        first = next(iter(self.raw.encode_batch_fast([""])[0].ids), None)
        self.bos_id: int | None = self.raw.token_to_id(bos_token) if bos_token else None
        if self.bos_id is None and first in self.special_ids - self.eos_ids:
            self.bos_id = first
        self.adds_bos = self.bos_id is not None and first == self.bos_id
        self._parts: dict[int, int | str | bytes | None] = {}

    def encode(self, text: str, *, special: bool, param: str = "prompt") -> list[int]:
        """Return the ids of a text; `special`: with the tokens that the tokenizer itself adds around it.

        Text spelled like a special token becomes that token, so that a rendered template is read as intended. A text
        that already begins with the first token does not get it twice. Raises InvalidValue, with `param`, for a text
        that the tokenizer cannot read.
        """
        try:
            ids = self.raw.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except Exception as error:  # of the library: a word without a token, or invalid Unicode
            check_letters(text, param)
            raise InvalidValue(f"the model's tokenizer cannot read this text: {error}", param=param) from error
        if special and self.adds_bos and ids[:2] == [self.bos_id, self.bos_id]:
            del ids[0]
        return ids

    def fit(
        self, text: str, *, special: bool, limit: int | None, param: str = "prompt"
    ) -> tuple[list[int] | None, int]:
        """Return the ids, as `encode` does, and their number. A text certain to exceed `limit` tokens is not read to
        its end: it gets no ids, and the number is a lower bound.

        A text is certain to exceed it if it has more characters than `limit` of the longest tokens have bytes (see
        `shrinkage`), or if its pieces have twice as many tokens in total; pieces that end at spaces need hardly more
        than `limit`. A token takes hundreds of bytes while it is made, so no request may waste millions of them.
        """
        if limit is not None and len(text) > min(limit * CHARS_PER_TOKEN, AT_ONCE):
            if len(text) > limit * self._octets_per_token:
                return None, max(limit + 1, len(text) // self._octets_per_token)
            least = self._min_tokens(text, limit, param)
            if least > limit:
                return None, least
        ids = self.encode(text, special=special, param=param)
        return ids, len(ids)

    def _min_tokens(self, text: str, limit: int, param: str) -> int:
        """Return a lower bound of a text's tokens if it exceeds `limit`; otherwise the result is meaningless."""
        least = 0
        for piece, whole in _split_pieces(text, limit):
            if least > limit:
                break
            # A word that is cut may have more tokens than the whole.
            found = len(self.encode(piece, special=False, param=param)) - MARGIN
            least += max(0, found if whole else found // 2)
        return least

    def estimate(self, text: str, limit: int, param: str = "messages") -> int:
        """Estimate the tokens of a text, from its beginning of about four times `limit` tokens if it is longer: the
        work for a text of any length is bounded."""
        chars = tokens = 0
        for piece, _ in _split_pieces(text, limit):
            chars += len(piece)
            tokens += len(self.encode(piece, special=False, param=param))
            if tokens > 4 * limit:
                break
        return tokens * len(text) // chars if chars else 0

    def count(self, text: str) -> int:
        """Count the tokens of a text, without any around it."""
        return len(self.raw.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def find_token_start(self, text: str, number: int) -> int | None:
        """Return where token `number`, counted from 0, begins in a text, before the character that it is part of. None
        if there are fewer tokens."""
        if len(text.encode("utf-8", "surrogatepass")) <= number:
            return None  # a token has at least one byte
        offsets = self.raw.encode_batch([text], add_special_tokens=False)[0].offsets
        return offsets[number][0] if number < len(offsets) else None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids to text, omitting unknown ids. An incomplete character becomes U+FFFD."""
        return self.raw.decode(ids, skip_special_tokens=skip_special_tokens)

    def check(self, ids: Sequence[int], param: str = "prompt") -> None:
        """Raises InvalidValue for an id outside this vocabulary."""
        for each in (min(ids), max(ids)) if ids else ():
            if not 0 <= each < self.size:
                raise InvalidValue(
                    f"{each} is not a token of this model; ids are between 0 and {self.size - 1}", param=param
                )

    def part(self, token: int) -> int | str | bytes | None:
        """Return what an id stands for within a text: bytes for a byte-level tokenizer, else one byte as its number, or
        a text. None: no such token."""
        if token in self._parts:
            return self._parts[token]
        text = self.raw.id_to_token(token) if 0 <= token < self.size else None
        if text is None:
            return None
        part = _octets(text) if self.spelling.form == "byte_level" else self._decode_spelling(text)
        self._parts[token] = part
        return part

    def data(self, token: int) -> bytes:
        """Return the bytes of one token, for a special token those of its spelling; empty for an unknown id."""
        part = self.part(token)
        if isinstance(part, int):
            return bytes([part])
        return part if isinstance(part, bytes) else (part or "").encode()

    def piece(self, token: int) -> str:
        """Return one token as text; incomplete characters become U+FFFD."""
        return self.data(token).decode("utf-8", "replace")

    def _decode_spelling(self, text: str) -> int | str:
        if self.spelling.form == "other":
            return text.replace("▁", " ")
        for pattern, content in self.spelling.replacements:
            text = text.replace(pattern, content)
        found = _OCTET.match(text)
        return int(found[1], 16) if found else text


def _split_pieces(text: str, limit: int) -> Iterator[tuple[str, bool]]:
    """Split a text at spaces, where nearly every tokenizer splits words. A piece of False ends inside of a word."""
    start = 0
    while start < len(text):
        end = min(start + max(SMALLEST, min(limit * CHARS_PER_TOKEN // 2, PIECE)), len(text))
        space = text.rfind(" ", (start + end) // 2, end) if end < len(text) else end
        whole = space > start
        end = space if whole else end
        yield text[start:end], whole
        start = end


def check_letters(text: str, param: str) -> None:
    """Raise InvalidValue for a text with an unpaired surrogate, which no encoding can represent."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidValue(
            f"a text contains half of a character, \\u{ord(text[error.start]):04x}: send the other half with it, or "
            "remove it",
            param=param,
        ) from error


_KEPT = {"ByteLevel": 1, "Prepend": 1, "NFD": 1, "NFKD": 8, "NFC": 4, "NFKC": 8, "Lowercase": 3}
"""How many times shorter, in bytes, a normalizer can make a text."""
_PARTING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Split", "Punctuation"})
"""Pre-tokenizers that drop nothing unless configured to."""
DROPS = 64


def shrinkage(raw: Tokenizer) -> int:
    """Return how many times more bytes a text may have than its tokens. `DROPS` for a tokenizer that may drop any
    number of them (blanks, accents, unknown words): nothing is certain then, and `DROPS` is generous."""
    state: list[dict[str, Any]] = []
    for part in (raw.normalizer, raw.pre_tokenizer):
        one: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {"type": "Prepend"}
        state.append({"type": "Sequence", "steps": one.get("normalizers") or one.get("pretokenizers") or [one]})
    before, parting = (each["steps"] for each in state)
    kept = 1
    for step in before:
        if step["type"] == "Replace" and "String" in step["pattern"]:
            pattern, content = step["pattern"]["String"].encode(), step["content"].encode()
            kept *= -(-len(pattern) // len(content)) if content else DROPS
        else:
            kept *= _KEPT.get(step["type"], DROPS)
    if any(step["type"] not in _PARTING | {"Prepend"} or step.get("behavior") == "Removed" for step in parting):
        return DROPS
    if any(token.lstrip or token.rstrip for token in raw.get_added_tokens_decoder().values()):
        return DROPS
    spelt = any(step["type"] == "ByteLevel" for step in [*before, *parting])
    octets = _LETTERS if spelt else [f"<0x{octet:02X}>" for octet in range(256)]
    model = raw.model
    if isinstance(model, BPE):
        known = (spelt or model.byte_fallback) and not (model.continuing_subword_prefix or model.end_of_word_suffix)
    else:
        known = bool(getattr(model, "byte_fallback", False))
    return min(kept, DROPS) if known and all(raw.token_to_id(each) is not None for each in octets) else DROPS


def _spelling(raw: Tokenizer) -> Spelling:
    """Detect the spelling from the decoder's own description; anything but the two known forms is "other"."""
    if raw.decoder is None:
        return Spelling("other")
    state: dict[str, Any] = json.loads(raw.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state.get("type") == "Sequence" else [state]
    names = [step.get("type") for step in steps]
    if names == ["ByteLevel"]:
        return Spelling("byte_level")
    replacements: list[tuple[str, str]] = []
    while names[:1] == ["Replace"] and "String" in steps[0]["pattern"]:
        replacements.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        names, steps = names[1:], steps[1:]
    if names == ["ByteFallback", "Fuse"]:
        return Spelling("byte_fallback", tuple(replacements))
    if names == ["ByteFallback", "Fuse", "Strip"] and steps[2]["stop"] == 0:
        return Spelling("byte_fallback", tuple(replacements), steps[2]["content"], steps[2]["start"])
    return Spelling("other")


def _letters() -> dict[str, int]:
    """Return GPT-2's letter for each byte: the byte itself if it is visible in Latin-1, else the next one from U+0100
    on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [octet for octet in range(256) if octet not in visible]
    return {chr(octet): octet for octet in visible} | {chr(256 + i): octet for i, octet in enumerate(hidden)}


_LETTERS = _letters()


def _octets(token: str) -> bytes:
    """Convert a token to bytes. A token with any other letter was added to the vocabulary as plain text."""
    try:
        return bytes([_LETTERS[letter] for letter in token])
    except KeyError:
        return token.encode()
