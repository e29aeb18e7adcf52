"""Structural tags as passed to the library."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from shoal.backends.genai.structural_tags import write_tags
from shoal.errors import InvalidValue

if find_spec("openvino_genai") is None:
    pytest.skip("needs the 'llm' extra", allow_module_level=True)

from tests.unit.backends.genai.grammar_matcher import GrammarMatcher


def tagged(content: dict[str, Any]) -> str:
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    return json.dumps({"type": "structural_tag", "format": tag})


def test_schemas_are_compact() -> None:
    """A schema within a tag has no free whitespace either."""
    matcher = GrammarMatcher()
    schema = {"type": "object", "properties": {"größe": {"type": "integer", "minimum": 3}}, "required": ["größe"]}
    tags = write_tags(tagged({"type": "json_schema", "json_schema": schema}))
    texts = ['{"größe":3}', '{"größe": 12}', '{"größe":2}', '{ "größe":3}', '{"größe":  3}', '{"größe":3\n}']
    accepted = [text for text in texts if matcher.accepts(f"<a>{text}</a>", structural_tags_config=tags)]
    assert accepted == texts[:2]


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, '{"type": "structural_tag", "format": {"type": "any_text"}}', "7"]
)
def test_others_stay_as_they_are(text: str) -> None:
    """Invalid JSON passes too, since the library rejects it."""
    assert write_tags(text) == text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"type": "json_schema", "json_schema": {"not": {}}}, "`not` is not supported"),
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "qwen_xml_parameter"),
        ({"type": "const_string", "value": "ann\xe9e"}, "cannot be encoded"),
        ({"begin": "\xe9e", "end": "x"}, "cannot be encoded"),
        ({"triggers": ["x", "\xe9a"]}, "cannot be encoded"),
    ],
)
def test_refusals(content: dict[str, Any], why: str) -> None:
    """Schemas without a grammar, and literals that the library misreads, are rejected by name."""
    with pytest.raises(InvalidValue, match=why):
        write_tags(tagged(content))
