"""JSON grammars without free whitespace, run by the library with a tiny model's random logits."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft4Validator, Draft202012Validator  # type: ignore[import-untyped]  # it has no types
from tokenizers import Tokenizer

from shoal.backends.genai.compact_schema import KEYS, write_grammar
from shoal.errors import InvalidValue
from shoal.types import Guide
from tests.unit.backends.genai.conftest import IR, Model

if find_spec("openvino_genai") is None:
    pytest.skip("needs the 'llm' extra", allow_module_level=True)

from tests.unit.backends.genai.grammar_matcher import GrammarMatcher

VALIDATOR = Draft202012Validator
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
    {
        "title": "keys that restrict values",
        "type": "object",
        "properties": {
            "day": {"type": "string", "format": "date"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}\\d{1,3}$"},
            "share": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
            "count": {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 250}]},
        },
        "required": ["day", "code", "share", "count"],
        "additionalProperties": False,
    },
]


@pytest.fixture(scope="module")
def matcher() -> GrammarMatcher:
    return GrammarMatcher()


@pytest.mark.parametrize("schema", SCHEMAS)
def test_answers_follow_the_schema(model: Model, schema: dict[str, Any]) -> None:
    """Each answer that ends is valid, with no whitespace except a space after a comma or colon."""
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
    """Answers start at once and never have two spaces in a row between tokens."""
    tokenizer = Tokenizer.from_file(str(IR / "tokenizer.json"))
    for seed in range(6):
        ids = model.answer([1, 50], temperature=1.5, seed=seed, max_tokens=60, guide=Guide(kind="json_object"))
        bare = re.sub(r'"(?:[^"\\]|\\.)*"?', '""', tokenizer.decode(ids))
        assert bare.startswith("{")
        assert not re.search(r"(?<![,:])\s|\s\s", bare), bare


VALUES: list[Any] = [None, True, 0, 1, -2, 7, 2.5, "", "a", "ab", "2024-02-29", [], [1], [1, 2], ["a", "a"]]
VALUES += [{}, {"a": 1}, {"a": "x"}, {"a": 1, "b": "x"}, {"b": 2}, {"c": None}, {"a": 1, "c": [1]}]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 7},
        {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
        {"exclusiveMinimum": 0, "minimum": -3, "type": "number", "multipleOf": 0.5, "maximum": 9},
        {"type": "string", "pattern": "a"},
        {"type": "string", "pattern": "^a", "maxLength": 1},
        {"type": ["string", "integer", "null"], "maxLength": 1, "minimum": 1},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {"a": False, "b": {}}, "minProperties": 0, "additionalProperties": False},
        {"type": "object", "required": ["a"]},
        {"type": "object", "patternProperties": {"^[ab]$": {"type": "integer"}}, "additionalProperties": False},
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "minProperties": 1, "maxProperties": 2},
        {"type": "object", "maxProperties": 0},
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "minItems": 1},
        {"type": "array", "items": [{"const": 1}, {"const": 2}], "additionalItems": {"type": "string"}, "maxItems": 2},
        {"type": "array", "items": False},
        {"type": "array", "minItems": 2.0, "uniqueItems": False},
        {"allOf": [{"enum": [0, 1, 7, "a"]}, {"type": ["integer", "null"]}, {"minimum": 1}]},
        {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {}}, "required": ["b"]}], "$defs": {"a": TREE["$defs"]}},
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": ["integer", "string"]}}, "required": ["a"]},
                {"properties": {"a": {"maximum": 1, "type": "number"}}, "additionalProperties": {"type": "string"}},
            ]
        },
        {"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"maxProperties": 0}]},
        {"anyOf": [{"type": "integer"}, {"type": "string"}], "allOf": [{"anyOf": [{"minimum": 1}, {"const": "a"}]}]},
        {"$ref": "#/$defs/a%20b", "minimum": 1, "$defs": {"a b": {"type": "integer"}}},
        {"anyOf": [False, {"const": [1, 2]}]},
        {"enum": [{"a": 1}, [], 2.5, "a"], "minLength": 1, "maximum": 2.5},
        {"const": "a", "enum": ["a", "b"], "maxLength": 1, "x-note": 1},
        {"type": "string", "format": "date"},
        {"properties": {"a": {"const": 1}}, "required": ["a"]},
    ],
)
def test_values_of_a_schema(matcher: GrammarMatcher, schema: dict[str, Any]) -> None:
    """No invalid value is accepted, at least one valid value is, and samples are valid."""
    grammar = write_grammar(json.dumps(schema))
    validator = (
        Draft4Validator if schema.get("exclusiveMinimum") is True or "additionalItems" in schema else VALIDATOR
    )(schema, format_checker=VALIDATOR.FORMAT_CHECKER)
    accepted = [value for value in VALUES if matcher.accepts(json.dumps(value, separators=(",", ":")), grammar=grammar)]
    assert accepted
    assert [value for value in accepted if not validator.is_valid(value)] == []
    for seed in range(4):
        if (drawn := matcher.sample(seed, grammar=grammar)) is not None:
            validator.validate(json.loads(drawn))


LEAVES = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("integer")}, optional={"minimum": st.integers(-9, 9), "maximum": st.integers(-9, 99)}
    ),
    st.fixed_dictionaries(
        {"type": st.just("number")},
        optional={"exclusiveMinimum": st.sampled_from([-1.5, 0, 0.25]), "maximum": st.sampled_from([1, 2.75, 1e20])},
    ),
    st.fixed_dictionaries(
        {"type": st.just("string"), "maxLength": st.integers(0, 6)},
        optional={"pattern": st.sampled_from(["^[a-z]+$", "\\d", '^é?"', "(^|,)x"]), "minLength": st.integers(0, 3)},
    ),
    st.fixed_dictionaries(
        {"type": st.just("string"), "format": st.sampled_from(["date", "time", "ipv4", "ipv6", "uuid"])}
    ),
    st.fixed_dictionaries({"enum": st.lists(st.sampled_from([1, 2.5, "a", None, "größe", [1], {"a": 1}]), min_size=1)}),
)


def _branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", "ab"])
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(names, inner, max_size=3)},
            optional={
                "required": st.lists(names, max_size=2, unique=True),
                "additionalProperties": st.booleans() | inner,
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner, "maxItems": st.integers(0, 3)},
            optional={"minItems": st.integers(0, 2), "prefixItems": st.lists(inner, max_size=2)},
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"allOf": parts}),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts}),
        st.tuples(inner, inner).map(lambda parts: {**parts[0], "allOf": [parts[1]]}),
    )


@given(schema=st.recursive(LEAVES, _branches, max_leaves=5), seed=st.integers(0, 999))
def test_what_is_written_is_valid(matcher: GrammarMatcher, schema: dict[str, Any], seed: int) -> None:
    """Any combination of keywords is enforced, or rejected with its location and a reason."""
    try:
        grammar = write_grammar(json.dumps(schema))
    except InvalidValue as error:
        assert re.match("unsupported JSON schema at #[^:]*: .+", error.message)
        return
    drawn = matcher.sample(seed, grammar=grammar)
    if drawn is not None:
        VALIDATOR(schema).validate(json.loads(drawn))


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "array", "minItems": 3, "maxItems": 2}, "#: `minItems` 3 is greater than `maxItems` 2"),
        (
            {"properties": {"a": {"items": {"type": "array", "uniqueItems": True}}}},
            "#/properties/a/items: `uniqueItems`",
        ),
        ({"not": {"type": "string"}}, "`not` is not supported"),
        ({"if": {}, "then": {}}, "`if` is not supported"),
        ({"type": "object", "dependentRequired": {}}, "`dependentRequired` is not supported"),
        ({"type": "object", "unevaluatedProperties": False}, "`unevaluatedProperties` is not supported"),
        ({"type": "object", "properties": {"a": LEVEL}, "required": [["a"]]}, "`required` must be a list of names"),
        ({"type": "object", "properties": []}, "`properties` must map names"),
        ({"type": "object", "properties": {"a": LEVEL}, "minProperties": 1}, "use `required`"),
        (
            {"type": "object", "properties": {"a": LEVEL}, "patternProperties": {"a": {}}},
            "`patternProperties` cannot be combined",
        ),
        ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "only one pattern"),
        ({"type": "object", "patternProperties": {"a": {}}, "propertyNames": {"maxLength": 1}}, "remove one of them"),
        ({"type": "object", "minProperties": 2}, "names may repeat"),
        (
            {"type": "object", "required": ["a"], "additionalProperties": False},
            "#/properties/a: `false` allows no value",
        ),
        ({"type": "array", "items": False, "minItems": 1}, "#/items: `false` allows no value"),
        ({"type": "array", "prefixItems": {}}, "`prefixItems` must be a list"),
        ({"enum": []}, "no value of `enum`"),
        ({"enum": ["a"], "pattern": "a"}, "`pattern` cannot be combined with `enum`"),
        ({"enum": 7}, "`enum` must be a list"),
        ({"anyOf": []}, "at least one schema"),
        ({"anyOf": [False, False]}, "no value satisfies"),
        ({"allOf": {}}, "`allOf` must be a list"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "no value is both"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "`pattern` differs"),
        ({"allOf": [{"const": 1}, {"const": True}]}, "two different values"),
        ({"allOf": [{"prefixItems": [{}]}, {"items": {}}]}, "`prefixItems` differs"),
        ({"allOf": [{"patternProperties": {"a": {}}}, {"properties": {"a": {}}}]}, "`patternProperties` differs"),
        ({"allOf": [{"anyOf": [{}] * 11}, {"anyOf": [{"type": "null"}] * 11}]}, "`anyOf` differs"),
        ({"$ref": "elsewhere"}, "move its target to `\\$defs`"),
        ({"$ref": "#/items/5"}, "has no target"),
        ({"$ref": "#", "maximum": 5}, "is circular"),
        (
            {"allOf": [{"$ref": "#/$defs/a"}, {}], "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {}]}}},
            "is circular",
        ),
        (
            {"$defs": {"a": {"items": {"$ref": "#/$defs/a", "minItems": 1}}}, "$ref": "#/$defs/a"},
            "nested too deeply|more than",
        ),
        ({"type": "nonsense"}, "`type` must be .*'nonsense'"),
        ({"type": "integer", "minimum": "3"}, "`minimum` must be a number .*'3'"),
        ({"type": "integer", "multipleOf": 0}, "greater than 0"),
        ({"type": "integer", "multipleOf": 3}, "power of ten"),
        ({"type": "number", "minimum": 10**500}, "no number"),
        ({"type": "string", "maxLength": -1}, "at least 0"),
        ({"type": "string", "maxLength": 1.5}, "whole number"),
        ({"type": "string", "pattern": 7}, "`pattern` must be a string"),
        ({"type": "string", "pattern": "^(?=a)"}, "lookahead"),
        (False, "`false` allows no value"),
        (7, "a schema must be an object"),
    ],
)
def test_schemas_without_a_grammar(schema: Any, why: str) -> None:
    """The error names the keyword, its location and the next step."""
    with pytest.raises(InvalidValue, match=why):
        write_grammar(json.dumps(schema))


def test_merges_without_end() -> None:
    """A schema that doubles with each reference is rejected before it exhausts memory."""
    doubled = {f"a{at}": {"allOf": [{"$ref": f"#/$defs/a{at + 1}"}] * 2} for at in range(60)}
    with pytest.raises(InvalidValue, match="more than"):
        write_grammar(json.dumps({"$ref": "#/$defs/a0", "$defs": doubled | {"a60": {"type": "null"}}}))


def test_no_json() -> None:
    for text in ("{", '{"minimum": 1e999}', '{"enum": [NaN]}'):
        with pytest.raises(InvalidValue, match="is not valid JSON"):
            write_grammar(text)
    with pytest.raises(InvalidValue, match=r"JSON|nested"):
        write_grammar('{"items":' * 20_000 + "{}" + "}" * 20_000)


@given(
    st.recursive(
        st.sampled_from([None, True, 0, -1, 2.5, "a", "#", "object"]),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(sorted(KEYS)), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_any_schema(schema: Any) -> None:
    """Any value in place of a schema is converted or rejected."""
    with suppress(InvalidValue):
        write_grammar(json.dumps(schema))


def test_characters_count_once(matcher: GrammarMatcher) -> None:
    """Surrogate halves are not escapes of a text, so lengths are those of JSON Schema."""
    grammar = write_grammar('{"type": "string", "minLength": 2, "maxLength": 2}')
    assert matcher.accepts('"\\u00e9😀"', grammar=grammar)
    assert not matcher.accepts('"\\ud83d\\ude00"', grammar=grammar)
