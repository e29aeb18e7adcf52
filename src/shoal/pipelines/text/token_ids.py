"""Check token ids that clients send in place of a text."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import EmptyInput, InvalidValue, ShoalError


def find_unknown_id(ids: Sequence[int], vocab_size: int) -> int | None:
    """Return the first id outside the vocabulary, or None."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        return next(i for i in ids if not 0 <= i < vocab_size)
    return None


def find_ids_error(ids: Sequence[int], vocab_size: int, *, prompt_field: str | None, advice: str) -> ShoalError | None:
    """Return the error for ids that cannot be embedded, or None.

    `prompt_field`: the request field that asks for a prompt, if any. `advice`: how to go on after an id outside the
    vocabulary, with the punctuation before it.
    """
    if prompt_field is not None:
        return InvalidValue(
            f"{prompt_field} prepends a prompt to a text; token ids are used unchanged", param=prompt_field
        )
    if not ids:
        return EmptyInput("an empty list of token ids has no vector; send at least one", param="input")
    bad = find_unknown_id(ids, vocab_size)
    if bad is not None:
        return InvalidValue(
            f"token id {bad} is outside this model's vocabulary (0 to {vocab_size - 1}){advice}", param="input"
        )
    return None
