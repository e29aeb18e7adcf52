"""Read from a tool's JSON schema which types its arguments have, for formats that write values without their types."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any

MAX_REFERENCES = 8
"""Maximum references from one to the next: they may form a circle."""
MAX_PARTS = 64
"""Maximum schemas read for one argument."""

_COMBINED = ("anyOf", "oneOf", "allOf")
_JSON_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    NoneType: "null",
}


def argument_types(schema: dict[str, Any], key: str) -> set[str]:
    """Return the JSON types that a tool's schema allows for an argument; empty if it does not say."""
    named = [part.get("properties") for part in _parts(schema, [schema])]
    return _types(schema, [each.get(key) for each in named if isinstance(each, dict)])


def json_types(root: dict[str, Any], part: Any) -> set[str]:
    """Return the JSON types that a part of a schema allows; empty if it does not say."""
    return _types(root, [part])


def _types(root: dict[str, Any], places: Sequence[Any]) -> set[str]:
    found: set[str] = set()
    for schema in _parts(root, places):
        kind = schema.get("type")
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(kind, str):
            found.add(kind)
        elif isinstance(kind, list):
            found.update(one for one in kind if isinstance(one, str))
        elif isinstance(values, list):
            found.update(_JSON_TYPES[type(one)] for one in values if type(one) in _JSON_TYPES)
        elif "properties" in schema or "additionalProperties" in schema:
            found.add("object")
        elif "items" in schema or "prefixItems" in schema:
            found.add("array")
    return found


def _parts(root: dict[str, Any], places: Sequence[Any]) -> list[dict[str, Any]]:
    """Return parts of a schema and those that they combine, at most MAX_PARTS."""
    found: dict[int, dict[str, Any]] = {}
    waiting = list(places)
    for part in waiting:
        schema = resolve(root, part)
        if id(schema) in found:
            continue
        found[id(schema)] = schema
        if len(found) == MAX_PARTS:
            break
        for key in _COMBINED:
            choices = schema.get(key)
            waiting += choices[:MAX_PARTS] if isinstance(choices, list) else ()
    return list(found.values())


def resolve(root: dict[str, Any], part: Any) -> dict[str, Any]:
    """Return a part of a schema, or what it refers to; empty if that is no schema."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(part, dict):
            return {}
        place = part.get("$ref")
        if not isinstance(place, str) or not place.startswith("#/"):
            return part
        part = root
        for name in place[2:].split("/"):
            part = part.get(name) if isinstance(part, dict) else None
    return {}
