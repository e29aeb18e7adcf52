"""An operation with additional facts for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.core.protocols import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentedOperation(Operation):
    """An Operation with more documentation.

    `query` maps query parameters to their descriptions; `required_query` names the required ones. `accepted` is the
    type of a 202's body. `optional`: the body may be omitted. `response` may be a tuple of alternative types.
    `other_responses`: other media types of a success, each with its type. `form`: the body may also be
    multipart/form-data of this type. `binary`: the body may also be application/octet-stream.
    """

    query: Mapping[str, str] = field(default_factory=dict)
    required_query: frozenset[str] = frozenset()
    accepted: Any = None
    optional: bool = False
    other_responses: tuple[tuple[str, Any], ...] = ()
    form: Any = None
    binary: bool = False

    @property
    def other_bodies(self) -> tuple[bytes, ...]:
        """The media types of bodies that are not JSON."""
        form = (b"multipart/form-data",) if self.form is not None else ()
        return (*form, b"application/octet-stream") if self.binary else form
