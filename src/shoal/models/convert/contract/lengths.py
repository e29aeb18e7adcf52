"""Read the input lengths that a model's files state, with their place in the files, and check their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.errors import ModelFileError
from shoal.models.convert.contract.json_file import JsonFile

LONGEST = 1_048_576
"""Maximum tokens of one input: far above any model's, but low enough to limit the memory reserved for one input."""

LONGEST_QUERY = 8_192
"""Maximum tokens of a late-interaction query: a query of one character may be padded to this length."""


_TOKENIZERS_KEY = "model_max_length"
_ENDLESS = 10**9
"""transformers writes 1e30 for "no limit"; no tokenizer states a real limit near this."""


class Length(NamedTuple):
    """A length in tokens, special ones included, stated by `key` of `file`."""

    tokens: int
    file: str
    key: str


def within(tokens: int, file: str, key: str, maximum: int = LONGEST) -> int:
    """Return `tokens`. Raises ModelFileError if it is less than one or more than `maximum`."""
    if not 1 <= tokens <= maximum:
        raise ModelFileError(f"must be 1 to {maximum} tokens, not {tokens}", file=file, key=key)
    return tokens


def shortest(lengths: Sequence[Length]) -> Length:
    """Return the effective one of several stated lengths. Raises ModelFileError if it is out of bounds."""
    least = min(lengths, key=lambda length: length.tokens)
    within(*least)
    return least


def read_tokenizer_limit(settings: JsonFile) -> Length | None:
    """Return model_max_length of tokenizer_config.json, None if it is absent or no limit."""
    if _TOKENIZERS_KEY not in settings:
        return None
    stated = settings.number(_TOKENIZERS_KEY)  # a float if it is 1e30
    if stated < 1:
        raise settings.refuse(_TOKENIZERS_KEY, f"must be at least 1 token, not {stated}")
    return Length(int(stated), settings.name, _TOKENIZERS_KEY) if stated < _ENDLESS else None
