"""How each dialect says what becomes of a text that is too long for the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.errors import InvalidValue, Unsupported
from shoal.types import Direction

if TYPE_CHECKING:
    from shoal.core.registry import ModelCard


def parse_truncation(asked: bool | str | None, side: str | None = None) -> tuple[bool | None, Direction]:
    """True or a word ("NONE", "START", "END") to whether to cut, and where; None leaves that to the model's setting."""
    direction: Direction = "left" if side == "left" else "right"
    if isinstance(asked, str):
        return asked != "NONE", "left" if asked == "START" else direction
    return asked, direction


def fits(card: ModelCard, limit: int) -> bool:
    """Whether a limit of that many tokens changes nothing, because the model reads no more."""
    most = card.facts.max_input_tokens if card.facts is not None else None
    return most is not None and limit >= most


def check_token_limit(card: ModelCard, limit: int | None, name: str) -> bool | None:
    """What the field `name`, a limit in tokens, says about cutting: True, or None where it is not given.

    Raises Unsupported for a limit below the model's own, which nobody applies here. -1 is the model's own.
    """
    if limit is None:
        return None
    if limit != -1 and not fits(card, limit):
        most = card.facts.max_input_tokens if card.facts is not None else None
        own = "" if most is None else f" ({most})"
        raise Unsupported(
            f"'{name}' can only be the model's own length{own} or more here: leave it out, or cut the texts before.",
            param=name,
        )
    return True


def parse_prompt_truncation(card: ModelCard, limit: int | None, side: str | None) -> tuple[bool | None, Direction]:
    """Whether to cut, and where, as vLLM's `truncate_prompt_tokens` and `truncation_side` say it."""
    return parse_truncation(check_token_limit(card, limit, "truncate_prompt_tokens"), side)


def merge_truncate_fields(truncate: bool | str | None, truncation: bool | None) -> bool | str | None:
    """What the two names of one thing say, for `parse_truncation`; a word says more than a flag that agrees with it.

    Raises InvalidValue where they differ.
    """
    cuts = None if truncate is None else truncate not in (False, "NONE")
    merge_fields(truncate=cuts, truncation=truncation)
    return truncation if truncate is None else truncate


def merge_fields(**given: object) -> object:
    """The value that the fields have, by whatever name; None where none is given. Raises InvalidValue where two of
    them say different things."""
    said = {name: value for name, value in given.items() if value is not None}
    values = list(said.values())
    if any(value != values[0] for value in values[1:]):
        names = " and ".join(f"'{name}'" for name in said)
        raise InvalidValue(f"{names} mean the same and differ; send one of them.", param=next(iter(said)))
    return values[0] if values else None
