"""Required tool calls: which tools a request allows, and the schema for backends with guided decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shoal.errors import InvalidValue
from shoal.types import Generate, Tool

DEEPEST = 64
"""Maximum nesting of a tool's schema: templates and grammars process it recursively."""
MOST_VALUES = 20_000
"""Maximum values in the schemas of all tools: a template prints them, whatever fits in the context."""

ANY_OBJECT = {"type": "object", "properties": {}}
"""The schema of a tool without one."""

_NOT_SCHEMAS = frozenset({"const", "enum", "default", "examples"})
_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose keys are names, whatever they look like."""


def select_tools(task: Generate) -> list[Tool]:
    """Return the tools of a task, or only the named one if `tool_choice` names one."""
    if task.tool_choice != "function":
        return list(task.tools)
    return [tool for tool in task.tools if tool.name == task.tool_name]


def check_depth(tools: Sequence[Tool]) -> None:
    """Raise InvalidValue if a schema nests too deeply, or all schemas together hold too many values."""
    left = MOST_VALUES
    for number, tool in enumerate(tools):
        level: list[Any] = [tool.parameters]
        for _ in range(DEEPEST):
            left -= sum(map(len, level))
            if left < 0:
                raise InvalidValue(
                    f"the parameters of the tools have more than {MOST_VALUES} values: send fewer or smaller tools",
                    param="tools",
                )
            inner = [each.values() if isinstance(each, dict) else each for each in level]
            level = [value for values in inner for value in values if isinstance(value, dict | list)]
            if not level:
                break
        else:
            raise InvalidValue(
                f"the parameters of tool {number} are nested more than {DEEPEST} levels deep: make them flatter",
                param="tools",
            )


def call_schema(tools: Sequence[Tool], key: str) -> str:
    """Return the JSON text of a schema for an object with the name of one of the tools and its arguments under
    `key`."""
    if len(tools) == 1:
        return json.dumps(_call(tools[0], key, "#"), ensure_ascii=False)
    calls = [_call(tool, key, f"#/anyOf/{at}") for at, tool in enumerate(tools)]
    return json.dumps({"anyOf": calls}, ensure_ascii=False)


def _call(tool: Tool, key: str, place: str) -> dict[str, Any]:
    parameters = tool.parameters or ANY_OBJECT
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "enum": [tool.name]},
            key: _relocate_refs(parameters, f"{place}/properties/{key}"),
        },
        "required": ["name", key],
        "additionalProperties": False,
    }


def _relocate_refs(schema: Any, place: str) -> Any:
    """Return the schema moved to another place: rewrite its references, which start at the document root."""
    if isinstance(schema, list):
        return [_relocate_refs(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            made[name] = place + value[1:]
        elif name in _NAMES and isinstance(value, dict):
            made[name] = {key: _relocate_refs(each, place) for key, each in value.items()}
        else:
            made[name] = value if name in _NOT_SCHEMAS else _relocate_refs(value, place)
    return made
