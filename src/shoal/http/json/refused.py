"""Fields that are known and refused: nothing is made of their values, however large those are."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

UnreadField: TypeAlias = msgspec.Raw | msgspec.UnsetType
"""A value that is skipped over while its body is decoded."""

RefusedField: TypeAlias = Annotated[UnreadField, Meta(description="Refused.")]

_NULL = b"null"


def is_set(value: UnreadField) -> bool:
    """Null is as if it were not."""
    if value is msgspec.UNSET:
        return False
    raw = memoryview(value)
    return len(raw) != len(_NULL) or bytes(raw) != _NULL
