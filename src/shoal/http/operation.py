"""An operation that has more to say in the document than most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.core.protocols import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentedOperation(Operation):
    """`query` maps parameters of the query to what they say, `needed` names those that may not be left out. `accepted`
    is the type of a 202's body. `optional`: the body may be left out. `response` may be a tuple: one of these types.
    `also`: other media types of a success, each with its type. `form`: the body may be multipart/form-data of this type
    as well.
    """

    query: Mapping[str, str] = field(default_factory=dict)
    needed: frozenset[str] = frozenset()
    accepted: Any = None
    optional: bool = False
    also: tuple[tuple[str, Any], ...] = ()
    form: Any = None
