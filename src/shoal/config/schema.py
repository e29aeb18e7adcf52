"""Describes one setting: its names in every layer, the values it accepts, and how text becomes a value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

from shoal.decoding import converter
from shoal.errors import ConfigError

ENV_PREFIX = "SHOAL_"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. `section` groups rows in the help; `per_model` rows may also appear in a model's table;
    the short help of a command shows only the `essential` rows."""

    name: str
    type: Any
    default: Any
    help: str
    section: str = ""
    secret: bool = False
    path: bool = False
    per_model: bool = False
    essential: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def kind(self) -> inspect.Type:
        """The type without its description; for an optional setting, the type other than None."""
        return _strip_metadata(inspect.type_info(self.type))

    @property
    def wording(self) -> str:
        """A description of the accepted values, for error messages."""
        return _wording(inspect.type_info(self.type))

    @property
    def choices(self) -> tuple[str, ...]:
        """The accepted words of an enumerated setting; none for any other."""
        return tuple(map(str, getattr(self.kind, "values", ())))

    @property
    def repeatable(self) -> bool:
        return isinstance(self.kind, inspect.VarTupleType)

    def mask(self, value: Any) -> Any:
        """Return `value` for display: a secret reveals neither its text nor its length."""
        if not self.secret or not value:
            return value
        return tuple("****" for _ in value) if self.repeatable else "****"


def convert(setting: Setting, value: Any, where: str) -> Any:
    """Validate one value. Text is parsed as the setting's type; enumerated words match in any case.

    Raises ConfigError with a message that starts with `where`, which is also its `param`.
    """
    if isinstance(setting.kind, inspect.LiteralType) and isinstance(value, str):
        value = {str(word).lower(): word for word in setting.kind.values}.get(value.lower(), value)
    try:
        found = converter(setting.type, strict=not isinstance(value, str))(value)
        if isinstance(found, float) and not math.isfinite(found):
            raise msgspec.ValidationError
    except msgspec.ValidationError:
        got = "" if setting.secret else f", got {value!r}"
        raise ConfigError(f"{where}: must be {setting.wording}{got}", param=where) from None
    return found


def _strip_metadata(kind: inspect.Type) -> inspect.Type:
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        kind = next(part for part in kind.types if not isinstance(part, inspect.NoneType))
    return kind


def _wording(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.Metadata) and "title" in (kind.extra_json_schema or {}):
        return str((kind.extra_json_schema or {})["title"])
    match _strip_metadata(kind):
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values):
            return "one of " + ", ".join(str(value) for value in values)
        case inspect.IntType(ge=ge, le=le):
            return f"a whole number from {ge} to {le}" if le is not None else f"a whole number of at least {ge}"
        case inspect.FloatType(ge=ge, gt=gt):
            return f"a number above {gt:g}" if gt is not None else f"a number of at least {ge:g}"
        case inspect.VarTupleType(item):
            return f"a list, each {_wording(item)}"
        case inspect.DictType(key, value):
            known = getattr(_strip_metadata(key), "values", None)
            return f"a table of {_wording(value)}" + (f" by {', '.join(sorted(known))}" if known else "")
        case _:
            return "text"
