"""Fields that are known and refused: nothing is made of their values, however large those are."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

Unread: TypeAlias = msgspec.Raw | msgspec.UnsetType
"""A value that is skipped over while its body is decoded."""

Refused: TypeAlias = Annotated[Unread, Meta(description="Refused.")]

_NULL = b"null"


def is_there(value: Unread) -> bool:
    """Null is as if it were not."""
    if value is msgspec.UNSET:
        return False
    raw = memoryview(value)
    return len(raw) != len(_NULL) or bytes(raw) != _NULL
