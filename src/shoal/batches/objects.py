"""The state of files and batches as it is kept on disk, and pages of lists. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar

import msgspec

from shoal.errors import InvalidValue

Status: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Outcome: TypeAlias = Literal["completed", "failed", "expired", "cancelled"]
ENDED: frozenset[str] = frozenset({"completed", "failed", "expired", "cancelled"})


class StoredFile(msgspec.Struct, kw_only=True):
    """A file. `created_ns` orders lists; times are seconds since 1970. `owner`: see Identity."""

    id: str
    owner: str
    bytes: int
    created_ns: int
    expires_at: int
    filename: str
    purpose: str

    @property
    def created_at(self) -> int:
        return self.created_ns // 10**9


class LineError(msgspec.Struct, kw_only=True):
    """Why a batch failed. `line` is counted from 1; None: not about a line."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Batch(msgspec.Struct, kw_only=True):
    """A batch. `client`: whose share its lines take. `outcome`: how it ends, once that is decided. `output_id` and
    `errors_id`: the files that it will have; `output_file_id` and `error_file_id`: those that it has.
    """

    id: str
    owner: str
    client: str
    endpoint: str
    input_file_id: str
    output_id: str
    errors_id: str
    created_ns: int
    expires_at: int
    completion_window: str = "24h"
    output_seconds: int
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    outcome: Outcome | None = None
    errors: list[LineError] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def created_at(self) -> int:
        return self.created_ns // 10**9

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class Listed(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=Listed)


def paginate(items: Sequence[T], after: str | None, limit: int) -> tuple[Sequence[T], bool]:
    """Return up to `limit` items after the one with the id `after` (None: from the first), and whether more follow.

    Raises InvalidValue if there is no such item.
    """
    start = 0
    if after:
        at = next((at for at, item in enumerate(items) if item.id == after), None)
        if at is None:
            raise InvalidValue(f"No object has the id {after[:100]!r}; list from the beginning.", param="after")
        start = at + 1
    return items[start : start + limit], len(items) > start + limit
