"""Constraints that make a backend with guided decoding call a tool."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # it has no types

from shoal.errors import InvalidValue
from shoal.pipelines.chat.required_tools import DEEPEST, MOST_VALUES, call_schema, check_depth, select_tools
from shoal.types import Generate, Tool

CITY = Tool(
    name="weather",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "$ref": {"type": "string"}}}
LIST = Tool(
    name="walk",
    parameters={
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/node"}, "all": {"$ref": "#"}},
        "required": ["from"],
        "$defs": {"node": {**NODE, "additionalProperties": False, "default": {"$ref": "#/not/a/reference"}}},
    },
)


def accepts(schema: str, value: Any) -> bool:
    validator = Draft202012Validator(json.loads(schema))
    return not list(validator.iter_errors(value))


@pytest.mark.parametrize("tools", [[CITY], [LIST, CITY]])
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_a_call_of_a_tool_is_accepted_and_nothing_else(tools: list[Tool], key: str) -> None:
    schema = call_schema(tools, key)
    assert accepts(schema, {"name": "weather", key: {"city": "Köln"}})
    assert not accepts(schema, {"name": "weather", key: {}})
    assert not accepts(schema, {"name": "other", key: {"city": "Köln"}})
    assert not accepts(schema, {"name": "weather", key: {"city": "Köln"}, "more": 1})
    assert not accepts(schema, {"name": "weather"})


@pytest.mark.parametrize("tools", [[LIST], [CITY, LIST]])
def test_references_point_to_where_their_schema_went(tools: list[Tool]) -> None:
    schema = call_schema(tools, "arguments")
    good = {"from": {"next": {"next": {}}, "$ref": "x"}, "all": {"from": {}}}
    assert accepts(schema, {"name": "walk", "arguments": good})
    assert not accepts(schema, {"name": "walk", "arguments": {"from": {"next": {"prev": {}}}}})
    assert not accepts(schema, {"name": "walk", "arguments": {"from": {}, "all": {}}})
    assert '"$ref": "#/not/a/reference"' in schema


def test_a_tool_without_parameters_takes_an_object() -> None:
    schema = call_schema([Tool(name="now")], "arguments")
    assert accepts(schema, {"name": "now", "arguments": {}})
    assert not accepts(schema, {"name": "now", "arguments": []})


def test_a_named_tool_is_the_only_one_offered() -> None:
    task = Generate(model="m", tools=[CITY, LIST], tool_choice="function", tool_name="walk")
    assert select_tools(task) == [LIST]
    assert select_tools(Generate(model="m", tools=[CITY, LIST], tool_choice="required")) == [CITY, LIST]


def wide(count: int) -> Tool:
    return Tool(name="f", parameters={"type": "object", "enum": [[] for _ in range(count)]})


def test_tools_hold_no_more_values_than_anybody_means() -> None:
    """The limit applies to all tools together, and values beyond it are not read."""
    check_depth([wide(1_000)] * 19)
    for tools in ([wide(MOST_VALUES)], [wide(1_000)] * 21):
        with pytest.raises(InvalidValue, match=f"have more than {MOST_VALUES} values: send fewer") as caught:
            check_depth(tools)
        assert caught.value.param == "tools"


def test_schemas_may_nest_so_deeply_and_no_deeper() -> None:
    deep: dict[str, Any] = {}
    for _ in range(DEEPEST - 1):
        deep = {"a": deep}
    check_depth([Tool(name="f", parameters=deep)])
    with pytest.raises(InvalidValue, match=f"tool 1 are nested more than {DEEPEST}"):
        check_depth([CITY, Tool(name="f", parameters={"a": deep})])
