"""Types for known but rejected fields, whose values are never decoded, however large."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

UnreadField: TypeAlias = msgspec.Raw | msgspec.UnsetType
"""A value that is skipped while its body is decoded."""

RefusedField: TypeAlias = Annotated[UnreadField, Meta(description="Refused.")]

_NULL = b"null"


def is_set(value: UnreadField) -> bool:
    """Whether the field is present and not null."""
    if value is msgspec.UNSET:
        return False
    raw = memoryview(value)
    return len(raw) != len(_NULL) or bytes(raw) != _NULL
