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
    multipart/form-data of this type, or must be if there is no `request`. `other_bodies`: all media types of bodies
    that are not JSON.
    """

    query: Mapping[str, str] = field(default_factory=dict)
    required_query: frozenset[str] = frozenset()
    accepted: Any = None
    optional: bool = False
    other_responses: tuple[tuple[str, Any], ...] = ()
    form: Any = None
    other_bodies: tuple[bytes, ...] = ()
