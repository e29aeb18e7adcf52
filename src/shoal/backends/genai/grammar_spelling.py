"""Texts that the library's grammars spell wrongly, spelt so that they come out right, or refused.

xgrammar writes a letter of U+0080 to U+00FF down as \\x and two digits, and reads a hexadecimal digit after it as a
third one: asked for "größe" it makes the model write "grö෾". Expressions are not written down that way.
"""

from __future__ import annotations

import json
import re
from typing import Any

from shoal.errors import InvalidValue

_WRONG = re.compile(r"[\x80-\xff][0-9a-fA-F]")
_PLAIN = re.compile(r'[^"\\\x00-\x1f\x7f]*')
_SPECIAL = re.compile(r"[.^$*+?()\[\]{}|]")
_LITERALS = frozenset({"begin", "end", "value", "triggers"})
"""Of a structural tag."""


def to_literals(text: str) -> str:
    """A text as literals of a grammar, one after the other. An escape by number, and a letter that is written down as
    one, end a literal."""
    escaped = re.sub(r'["\\]', r"\\\g<0>", text)
    ended = re.sub(r"[\x80-\xff]", r'\g<0>" "', escaped)
    numbered = re.sub(r"[\x00-\x1f\x7f]", lambda found: f'\\u{ord(found[0]):04x}" "', ended)
    return f'"{numbered}"'.removesuffix(' ""')


def check_grammar(text: str) -> str:
    """The grammar itself. Raises InvalidValue for one that would be misread."""
    if found := _WRONG.search(text):
        raise InvalidValue(
            f'{found[0]!r} in a literal of a grammar is misread: end the literal after the letter, as in "\xdf" "e"',
            param="response_format",
        )
    return text


def respell_schema(text: str) -> str:
    """A JSON schema in which constants are expressions where they need to be. Raises InvalidValue for other names and
    texts that would come out wrong. What is no JSON is left for the library to refuse."""
    if not _WRONG.search(text) and "\\u" not in text:
        return text
    try:
        return json.dumps(_respell(json.loads(text)), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _respell(node: Any) -> Any:
    if isinstance(node, list):
        return [_respell(one) for one in node]
    if not isinstance(node, dict):
        return node
    made = {}
    for key, value in node.items():
        if key == "properties" and isinstance(value, dict):
            for name in value:
                _check_spelling(name)
        if key in _LITERALS:
            for one in value if isinstance(value, list) else [value]:
                _check_spelling(one)
        made[key] = value if key in ("enum", "const") else _respell(value)
    constants = made.get("enum", [made["const"]] if "const" in made else [])
    if isinstance(constants, list) and any(isinstance(one, str) and _WRONG.search(one) for one in constants):
        made.pop("enum", None)
        made.pop("const", None)
        made.pop("type", None)
        made["anyOf"] = [_constant(one) for one in constants]
    return made


def _constant(value: Any) -> dict[str, Any]:
    if not isinstance(value, str) or not _WRONG.search(value):
        return {"const": value}
    if not _PLAIN.fullmatch(value):
        _check_spelling(value)
    return {"type": "string", "pattern": "^" + _SPECIAL.sub(r"\\\g<0>", value) + "$"}


def _check_spelling(text: Any) -> None:
    if isinstance(text, str) and (found := _WRONG.search(text)):
        raise InvalidValue(
            f"{text!r} would come out wrong, because of {found[0]!r}: write it without letters like \xe9 and \xdf",
            param="response_format",
        )
