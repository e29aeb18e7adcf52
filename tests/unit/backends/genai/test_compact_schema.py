"""JSON without free whitespace, as the library itself generates it from a tiny model's noise."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # it has no types
from tokenizers import Tokenizer

from shoal.backends.genai.compact_schema import write_grammar
from shoal.types import Guide
from tests.unit.backends.genai.conftest import IR, Model

if find_spec("openvino_genai") is None:
    pytest.skip("needs the 'llm' extra", allow_module_level=True)

WORD = {"type": "string", "maxLength": 4}
LEVEL = {"enum": ["größe", 1, None, True]}
CALL = {"anyOf": [{"type": "object", "properties": {"f": {"const": "x"}, "a": LEVEL}, "required": ["f"]}, LEVEL]}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"n": LEVEL, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["n"],
        }
    },
}
SCHEMAS = [
    {
        "title": "all of an object",
        "type": "object",
        "properties": {
            "name": WORD,
            "tags": {"type": "array", "items": LEVEL, "maxItems": 2},
            "ok": {"type": "boolean"},
        },
        "required": ["tags"],
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"a": LEVEL, "b": LEVEL, "c": LEVEL}},
    {"type": "object", "properties": {"a": LEVEL, "b": LEVEL}, "required": ["a", "b"]},
    {"type": "array", "items": CALL, "minItems": 2, "maxItems": 3},
    {"type": ["null", "boolean"]},
    TREE,
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_answers_follow_the_schema(model: Model, schema: dict[str, Any]) -> None:
    """Each answer that ends is valid, and none has whitespace but a space after a comma or colon."""
    guide = Guide(kind="json_schema", value=json.dumps(schema))
    tokenizer = Tokenizer.from_file(str(IR / "tokenizer.json"))
    seen = set()
    for seed in range(12):
        ids = model.answer([1, 50, 60], temperature=1.5, seed=seed, max_tokens=120, guide=guide)
        text = tokenizer.decode(ids)
        bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
        assert not re.search(r"(?<![,:])\s|\s\s", bare), text
        if len(ids) < 120:
            Draft202012Validator(schema).validate(json.loads(text))
            seen.add(text)
    assert len(seen) > 1


def test_an_object_of_any_form(model: Model) -> None:
    """It begins at once and never has two blanks in a row between its parts."""
    tokenizer = Tokenizer.from_file(str(IR / "tokenizer.json"))
    for seed in range(6):
        ids = model.answer([1, 50], temperature=1.5, seed=seed, max_tokens=60, guide=Guide(kind="json_object"))
        bare = re.sub(r'"(?:[^"\\]|\\.)*"?', '""', tokenizer.decode(ids))
        assert bare.startswith("{")
        assert not re.search(r"(?<![,:])\s|\s\s", bare), bare


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 3},
        {"type": "string", "pattern": "^a$"},
        {"type": "object", "properties": {"a": LEVEL}, "additionalProperties": True},
        {"type": "object", "patternProperties": {"^a": {}}},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"type": "object", "required": ["a"]},
        {"type": "object", "properties": {"a": LEVEL}, "required": [["a"]]},
        {"allOf": [LEVEL]},
        {"enum": [{}]},
        {"$ref": "elsewhere"},
        {"$ref": "#/items/5"},
        {"type": "nonsense"},
        False,
        7,
    ],
)
def test_schemas_that_are_left_to_the_library(schema: Any) -> None:
    """It does them with whitespace of its own choice, or says what is wrong with them."""
    assert write_grammar(json.dumps(schema)) is None


def test_no_json() -> None:
    assert write_grammar("{") is None
    assert write_grammar('{"items":' * 20_000 + "{}" + "}" * 20_000) is None
