"""Merges two JSON schemas into one that requires both, for `allOf` and for keywords beside `anyOf` or `$ref`."""

from __future__ import annotations

import json
from typing import Any

from shoal.errors import InvalidValue

Schema = dict[str, Any]

MAX_BRANCHES = 100
"""Maximum branches after merging two `anyOf`."""

_HIGHEST = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_LOWEST = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})
_PROPERTIES = ("properties", "additionalProperties", "patternProperties")


class Impossible(InvalidValue):
    """No value satisfies a schema. As one of several alternatives it is dropped."""


def merge_schemas(left: Schema, right: Schema) -> Schema:
    """Return the keywords of both; a subschema in both becomes an `allOf`. Raises InvalidValue if they conflict or
    cannot be merged."""
    made = left | right
    for key in left.keys() & right.keys() - set(_PROPERTIES):
        if not is_same(left[key], right[key]):
            made[key] = _merge_values(key, left[key], right[key])
    if any(
        "prefixItems" in one and "items" in other and "prefixItems" not in other for one, other in _both(left, right)
    ):
        raise _differing_error("prefixItems")
    if any(key in schema for key in _PROPERTIES for schema in (left, right)):
        made |= _merge_properties(left, right)
    return made


def is_same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal. True differs from 1."""
    return bool(one == other) and json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _both(left: Schema, right: Schema) -> tuple[tuple[Schema, Schema], ...]:
    return (left, right), (right, left)


def _differing_error(key: str) -> InvalidValue:
    return InvalidValue(f"`{key}` differs in schemas that apply together: set it in only one of them")


def _merge_values(key: str, left: Any, right: Any) -> Any:
    match key, left, right:
        case "type", _, _:
            return _common_types(left, right)
        case "enum", list(), list():
            return [each for each in left if any(is_same(each, other) for other in right)]
        case "const", _, _:
            raise Impossible("`const` has two different values: remove one of them")
        case "required", list(), list():
            return [*left, *(name for name in right if name not in left)]
        case "anyOf" | "oneOf", list(), list() if len(left) * len(right) <= MAX_BRANCHES:
            return [{"allOf": [one, other]} for one in left for other in right]
        case "items" | "propertyNames", bool() | dict(), bool() | dict():
            return {"allOf": [left, right]}
    if key in _HIGHEST | _LOWEST and _is_number(left) and _is_number(right):
        return max(left, right) if key in _HIGHEST else min(left, right)
    raise _differing_error(key)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _common_types(left: Any, right: Any) -> list[Any]:
    names = [left] if isinstance(left, str) else left
    others = [right] if isinstance(right, str) else right
    if not isinstance(names, list) or not isinstance(others, list):
        raise _differing_error("type")
    common = [name for name in names if name in others or (name == "integer" and "number" in others)]
    common += [name for name in others if name == "integer" and name not in common and "number" in names]
    if not common:
        raise Impossible(f"no value is both {left!r} and {right!r}: change one `type`")
    return common


def _merge_properties(left: Schema, right: Schema) -> Schema:
    """Merge properties: a property named by only one schema is an additional property of the other."""
    for one, other in _both(left, right):
        patterns = one.get("patternProperties")
        neutral: Schema = {"properties": {}, "additionalProperties": True, "patternProperties": patterns}
        if patterns and any(other.get(key, value) != value for key, value in neutral.items()):
            raise _differing_error("patternProperties")
    parts = [(schema.get("properties", {}), schema.get("additionalProperties", True)) for schema in (left, right)]
    if not all(isinstance(named, dict) for named, _ in parts):
        raise InvalidValue("`properties` must map names to schemas")
    names = [*parts[0][0], *(name for name in parts[1][0] if name not in parts[0][0])]
    made: Schema = {name: _both_of(*(named.get(name, more) for named, more in parts)) for name in names}
    merged: Schema = {"properties": made}
    if any("additionalProperties" in schema for schema in (left, right)):
        merged["additionalProperties"] = _both_of(*(more for _, more in parts))
    return merged


def _both_of(left: Any, right: Any) -> Any:
    if left is True or right is True or is_same(left, right):
        return right if left is True else left
    return False if left is False or right is False else {"allOf": [left, right]}
