"""Parse the dialects' fields for texts that are too long for the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.errors import InvalidValue, Unsupported
from shoal.types import Direction

if TYPE_CHECKING:
    from shoal.core.registry import ModelCard


def parse_truncation(value: bool | str | None, side: str | None = None) -> tuple[bool | None, Direction]:
    """Parse a flag or a word ("NONE", "START", "END") into whether to cut, and at which end.

    None leaves it to the model's setting whether to cut.
    """
    direction: Direction = "left" if side == "left" else "right"
    if isinstance(value, str):
        return value != "NONE", "left" if value == "START" else direction
    return value, direction


def fits(card: ModelCard, limit: int) -> bool:
    """Whether a limit in tokens has no effect because the model reads no more anyway."""
    most = card.facts.max_input_tokens if card.facts is not None else None
    return most is not None and limit >= most


def check_token_limit(card: ModelCard, limit: int | None, name: str) -> bool | None:
    """Check the field `name`, a limit in tokens, and return whether to cut: True, or None if it is absent.

    -1 means the model's own limit. Raises Unsupported for a lower limit, which cannot be applied here.
    """
    if limit is None:
        return None
    if limit != -1 and not fits(card, limit):
        most = card.facts.max_input_tokens if card.facts is not None else None
        own = "" if most is None else f" ({most})"
        raise Unsupported(
            f"'{name}' cannot be less than the model's own length{own}: omit it, or shorten the texts.",
            param=name,
        )
    return True


def parse_prompt_truncation(card: ModelCard, limit: int | None, side: str | None) -> tuple[bool | None, Direction]:
    """Parse vLLM's `truncate_prompt_tokens` and `truncation_side` into whether to cut, and at which end."""
    return parse_truncation(check_token_limit(card, limit, "truncate_prompt_tokens"), side)


def merge_truncate_fields(truncate: bool | str | None, truncation: bool | None) -> bool | str | None:
    """Merge two names of the same field for `parse_truncation`. A word wins over a flag that agrees with it.

    Raises InvalidValue if they differ.
    """
    cuts = None if truncate is None else truncate not in (False, "NONE")
    merge_fields(truncate=cuts, truncation=truncation)
    return truncation if truncate is None else truncate


def merge_fields(**fields: object) -> object:
    """Merge several names of one field and return its value, or None if all are absent.

    Raises InvalidValue if two of them differ.
    """
    present = {name: value for name, value in fields.items() if value is not None}
    values = list(present.values())
    if any(value != values[0] for value in values[1:]):
        names = " and ".join(f"'{name}'" for name in present)
        raise InvalidValue(f"{names} are aliases with different values; send one of them.", param=next(iter(present)))
    return values[0] if values else None
