"""JSON schemas as grammars without free whitespace.

The library allows any number of blanks and line ends between the parts of JSON, and a small model may then write
nothing else until its tokens are spent. It has no setting for that, so the usual part of JSON Schema is written as a
grammar here, with at most one space after a comma or colon. A schema with anything else is left to the library.
"""

from __future__ import annotations

import json
from typing import Any

from shoal.backends.genai.grammar_spelling import to_literals

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$schema", "$id", "$comment", "$defs", "definitions"}
)
"""Keys that restrict nothing."""

_RULES = r"""
comma ::= "," " "?
colon ::= ":" " "?
string ::= "\"" char* "\""
char ::= [^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})
integer ::= "-"? ("0" | [1-9] [0-9]*)
number ::= integer ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
boolean ::= "true" | "false"
null ::= "null"
value ::= object | array | string | number | boolean | null
object ::= "{" (member (comma member)*)? "}"
member ::= string colon value
array ::= "[" (value (comma value)*)? "]"
"""
_SCALARS = frozenset({"integer", "number", "boolean", "null"})

OBJECT = f"root ::= object\n{_RULES}"


class _LeftToLibrary(Exception):
    """The schema has something that is left to the library."""


def write_grammar(schema: str) -> str | None:
    """The grammar of a schema, None where it is left to the library."""
    try:
        return _Writer(json.loads(schema)).write()
    except (_LeftToLibrary, ValueError, TypeError, LookupError, RecursionError):
        return None  # what is wrong with it, the library says


class _Writer:
    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._rules: list[str] = []
        self._named: dict[str, str] = {}

    def write(self) -> str:
        root = self._expression(self._schema)
        return "\n".join([f"root ::= {root}", *self._rules, _RULES])

    def _rule(self, body: str) -> str:
        name = f"rule{len(self._rules)}"
        self._rules.append(f"{name} ::= {body}")
        return name

    def _expression(self, node: Any) -> str:
        """What stands for the value in a rule: a name, or alternatives in parentheses."""
        if node is True:
            return "value"
        if not isinstance(node, dict):
            raise _LeftToLibrary
        keys = node.keys() - _ANNOTATIONS
        if not keys:
            return "value"
        if keys == {"$ref"}:
            return self._reference(node["$ref"])
        for key in ("anyOf", "oneOf"):
            if keys == {key} and isinstance(node[key], list) and node[key]:
                return self._alternatives([self._expression(each) for each in node[key]])
        if keys <= {"enum", "const", "type"} and keys & {"enum", "const"}:
            return self._constants(node["enum"] if "enum" in keys else [node["const"]])
        kind = node.get("type")
        if isinstance(kind, list) and kind:
            return self._alternatives([self._expression(node | {"type": each}) for each in kind])
        if kind in _SCALARS and keys == {"type"}:
            return str(kind)
        if kind == "string":
            return self._string(node, keys)
        if kind == "array":
            return self._array(node, keys)
        if kind == "object":
            return self._object(node, keys)
        raise _LeftToLibrary

    def _alternatives(self, choices: list[str]) -> str:
        return self._rule(" | ".join(choices)) if len(choices) > 1 else choices[0]

    def _reference(self, pointer: Any) -> str:
        """The rule of what a reference points to, which may be itself within it."""
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            raise _LeftToLibrary
        if pointer not in self._named:
            node = self._schema
            for part in pointer.removeprefix("#").split("/")[1:]:
                step = part.replace("~1", "/").replace("~0", "~")
                node = node[int(step)] if isinstance(node, list) else node.get(step) if isinstance(node, dict) else None
            name = self._named[pointer] = f"ref{len(self._named)}"
            self._rules.append(f"{name} ::= {self._expression(node)}")
        return self._named[pointer]

    def _constants(self, values: Any) -> str:
        if not isinstance(values, list) or not values or any(isinstance(each, dict | list) for each in values):
            raise _LeftToLibrary
        return self._alternatives([to_literals(json.dumps(each, ensure_ascii=False)) for each in values])

    def _string(self, node: dict[str, Any], keys: Any) -> str:
        if not keys <= {"type", "minLength", "maxLength"}:
            raise _LeftToLibrary
        if keys == {"type"}:
            return "string"
        return self._rule(f'"\\"" char{_repeat(node.get("minLength", 0), node.get("maxLength"))} "\\""')

    def _array(self, node: dict[str, Any], keys: Any) -> str:
        if not keys <= {"type", "items", "minItems", "maxItems"}:
            raise _LeftToLibrary
        item = self._expression(node.get("items", True))
        least, most = node.get("minItems", 0), node.get("maxItems")
        if most == 0 and least == 0:
            return self._rule('"[" "]"')
        more = _repeat(max(_count(least) - 1, 0), None if most is None else _count(most) - 1)
        whole = f"{item} (comma {item}){more}"
        return self._rule(f'"[" {whole} "]"' if least else f'"[" ({whole})? "]"')

    def _object(self, node: dict[str, Any], keys: Any) -> str:
        """Members in the order of `properties`; others only where none are named."""
        if not keys <= {"type", "properties", "required", "additionalProperties"}:
            raise _LeftToLibrary
        properties, required = node.get("properties", {}), node.get("required", [])
        more = node.get("additionalProperties")
        if not isinstance(properties, dict) or not isinstance(required, list) or set(required) - properties.keys():
            raise _LeftToLibrary
        if not properties:
            return self._map(more)
        if more not in (None, False):
            raise _LeftToLibrary
        members = [
            (f"{to_literals(json.dumps(name, ensure_ascii=False))} colon {self._expression(each)}", name in required)
            for name, each in properties.items()
        ]
        return self._rule(f'"{{" {self._members(members)} "}}"')

    def _map(self, more: Any) -> str:
        if more is False:
            return self._rule('"{" "}"')
        if more in (None, True):
            return "object"
        member = f"string colon {self._expression(more)}"
        return self._rule(f'"{{" ({member} (comma {member})*)? "}}"')

    def _members(self, members: list[tuple[str, bool]]) -> str:
        """A comma stands before each member but the first that is there."""
        after, first = '""', '""'  # what may follow once there is a member, and while there is none
        for member, needed in reversed(members):
            rest, name = after, self._rule(member)
            after = self._rule(f"comma {name} {rest}" if needed else f"(comma {name})? {rest}")
            first = self._rule(f"{name} {rest}" if needed else f"{name} {rest} | {first}")
        return first


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _LeftToLibrary
    return value


def _repeat(least: Any, most: Any) -> str:
    if most is None:
        return f"{{{_count(least)},}}" if least else "*"
    if _count(most) < _count(least):
        raise _LeftToLibrary
    return f"{{{least},{most}}}"
