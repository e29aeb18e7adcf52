"""Replaces the JSON schemas in structural tags with compact grammars."""

from __future__ import annotations

import json
from typing import Any

from shoal.backends.genai.compact_schema import write_grammar
from shoal.backends.genai.grammar_spelling import check_literal, write_choice
from shoal.errors import InvalidValue

_LITERALS = ("begin", "end", "value", "triggers", "separator", "excludes")


def write_tags(text: str, *, any_arguments: bool = False) -> str:
    """Return the tags with grammars in place of schemas. Raises InvalidValue for schemas without a grammar and for
    literals that the library encodes wrongly. Invalid JSON is returned unchanged; the library rejects it.

    `any_arguments`: a schema without a grammar becomes the one under `otherwise` beside it, as arguments of tools have
    it."""
    try:
        return json.dumps(_rewrite(json.loads(text), any_arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _rewrite(node: Any, any_arguments: bool) -> Any:
    if isinstance(node, list):
        return [_rewrite(each, any_arguments) for each in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "json_schema" and "json_schema" in node:
        return {"type": "grammar", "grammar": _write_schema(node, any_arguments)}
    texts = node.get("values")
    if node.get("type") == "choice" and isinstance(texts, list):  # Shoal's own, since an `or` misreads common prefixes
        return {"type": "grammar", "grammar": f"root ::= {write_choice([str(text) for text in texts])}"}
    if node.get("type") == "qwen_xml_parameter":
        raise InvalidValue(
            "'qwen_xml_parameter' tags are not supported, because they allow any whitespace: use 'json_schema'",
            param="response_format",
        )
    for key in _LITERALS:
        value = node.get(key)
        for each in value if isinstance(value, list) else [value]:
            check_literal(each)
    return {key: _rewrite(value, any_arguments) for key, value in node.items()}


def _write_schema(node: dict[str, Any], any_arguments: bool) -> str:
    try:
        return write_grammar(json.dumps(node["json_schema"]))
    except InvalidValue:
        if not any_arguments or "otherwise" not in node:
            raise
        return write_grammar(json.dumps(node["otherwise"]))
