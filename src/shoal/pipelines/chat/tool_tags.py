"""Structural tags that keep tool calls valid, for backends that know these: xgrammar's tags, in which a text is free or
forced, and each call has the schema of its own tool."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.pipelines.chat.required_tools import ANY_OBJECT
from shoal.pipelines.chat.tools import ParserKind, deepseek, gemma, hermes, mistral, phi4, qwen
from shoal.pipelines.chat.tools.schema_types import argument_types, json_types, resolve
from shoal.types import Tool

_BARE_NAME = re.compile(r"[\w.-]+", re.ASCII)
_TAGGED_NAME = re.compile(r"[^<>\x00-\x1f\x7f-\U0010ffff]+")
_PLAIN = frozenset({"integer", "number", "boolean", "null"})
_TYPES = _PLAIN | {"string", "array", "object"}
_ANY_TEXT = {"type": "any_text"}
_NOTHING = {"type": "grammar", "grammar": 'root ::= ""'}
MAX_OPTIONAL = 16
"""Maximum optional arguments of a tool in Gemma's format: their commas take a grammar of quadratic size."""


@dataclass(frozen=True, kw_only=True)
class CallSpelling:
    """How a model spells its calls.

    `begin`, `separator` and `end` enclose and separate the calls of one list. Without `is_list`, `begin` and `end`
    enclose each call. `call` returns the tag of a call between two texts. `triggers` returns the texts from which on
    an answer has to be a call. `bare_names`: names are not JSON.
    """

    begin: str
    end: str
    separator: str
    call: Callable[[Tool, str, str], dict[str, Any]]
    triggers: Callable[[Sequence[Tool]], list[str]]
    is_list: bool = False
    bare_names: bool = False

    def can_tag(self, tools: Sequence[Tool]) -> bool:
        """Whether the names of the tools can be in tags."""
        return all(_BARE_NAME.fullmatch(tool.name) for tool in tools) if self.bare_names else can_tag(tools)


def can_tag(tools: Sequence[Tool]) -> bool:
    """Whether names can be in tags: the library encodes some letters beyond ASCII wrongly there."""
    return all(tool.name.isascii() for tool in tools)


def required_calls(tools: Sequence[Tool], key: str) -> str:
    """Return the JSON text of tags that force one or more calls and nothing else: objects with the name of a tool and
    its arguments under `key`, separated by "; "."""
    tags = [_object(tool, key, "{", "}") for tool in tools]
    return _format(type="tags_with_separator", tags=tags, separator="; ", at_least_one=True)


def marked_calls(spelling: CallSpelling, tools: Sequence[Tool], *, parallel: bool) -> str:
    """Return the JSON text of tags that leave the answer free up to the beginning of a call, and then force a valid
    one. `parallel` False: the answer ends after the first call."""
    if spelling.is_list:
        tags = [_join(spelling, tools, parallel)]
    else:
        tags = [spelling.call(tool, spelling.begin, spelling.end) for tool in tools]
    return _format(type="triggered_tags", triggers=spelling.triggers(tools), tags=tags, stop_after_first=not parallel)


def calls_or_answer(spelling: CallSpelling, tools: Sequence[Tool], schema: Any, *, parallel: bool) -> str:
    """Return the JSON text of tags that force an answer of the JSON `schema`, or calls as those of `marked_calls` and
    nothing else. `parallel` False: one call; also without an end marker, since the library accepts an open number of
    calls beside an answer only within a tag that has an end."""
    if spelling.is_list or (parallel and spelling.end):
        calls = [_join(spelling, tools, parallel)]
    else:
        calls = [spelling.call(tool, spelling.begin, spelling.end) for tool in tools]
    return _format(type="or", elements=[{"type": "json_schema", "json_schema": schema}, *calls])


def find_spelling(kind: ParserKind | None, template: str) -> CallSpelling | None:
    """Return how a model with this parser and chat template spells its calls; None if there is no single spelling."""
    if kind == "hermes":
        return _TAGGED if qwen.FUNCTION in template else _HERMES
    if kind == "llama3":
        return _LLAMA3
    if kind == "mistral":
        return _mistral(template)
    if kind == "deepseek":
        return _DEEPSEEK_CODE if deepseek.OPEN_CODE in template else _DEEPSEEK
    if kind == "phi4":
        if f"{phi4.WORD}[" in template:
            return _list(f"{phi4.WORD}[", "", trigger=f"{phi4.WORD}[")
        has_end = phi4.CLOSE in template or "<|tool|>" in template
        return _list(f"{phi4.OPEN}[", phi4.CLOSE if has_end else "", trigger=phi4.OPEN)
    if kind == "gemma":
        return _gemma(0 if gemma.OPEN[0] in template else 1)
    return None


def _join(spelling: CallSpelling, tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
    """Return a tag of one or more calls."""
    calls = {
        "type": "tags_with_separator",
        "tags": [spelling.call(tool, "", "") for tool in tools],
        "separator": spelling.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return _tag(spelling.begin, calls, spelling.end)


def _object(tool: Tool, key: str, begin: str, end: str) -> dict[str, Any]:
    return _tag(f'{begin}"name": {json.dumps(tool.name)}, "{key}": ', _arguments(tool), end)


def _arguments(tool: Tool) -> dict[str, Any]:
    return _schema(tool.parameters or ANY_OBJECT, ANY_OBJECT)


def _schema(schema: dict[str, Any], otherwise: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a schema. `otherwise`: the wider schema for beside a form, if this one has no grammar."""
    return {"type": "json_schema", "json_schema": schema, "otherwise": otherwise}


def _tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _optional(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": [content, _NOTHING]}


def _sequence(elements: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _constant(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _format(**fields: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": fields}, ensure_ascii=False)


def _list(begin: str, end: str, *, trigger: str) -> CallSpelling:
    """Return the spelling of an array of objects."""
    return CallSpelling(
        begin=begin,
        end=f"]{end}",
        separator=", ",
        call=lambda tool, before, after: _object(tool, "arguments", before + "{", "}" + after),
        triggers=lambda tools: [trigger],
        is_list=True,
    )


def _mistral(template: str) -> CallSpelling:
    if mistral.ARGS not in template:
        begin = f"{mistral.OPEN} [" if f"{mistral.OPEN} [" in template else f"{mistral.OPEN}["
        return _list(begin, "", trigger=mistral.OPEN)
    has_id = mistral.CALL_ID in template

    def call(tool: Tool, before: str, after: str) -> dict[str, Any]:
        if not has_id:
            return _tag(f"{before}{tool.name}{mistral.ARGS}", _arguments(tool), after)
        call_id = {"type": "regex", "pattern": "[A-Za-z0-9]{9}"}
        content = _sequence([call_id, _constant(mistral.ARGS), _arguments(tool)])
        return _tag(f"{before}{tool.name}{mistral.CALL_ID}", content, after)

    return CallSpelling(
        begin=mistral.OPEN,
        end="",
        separator=mistral.OPEN,
        call=call,
        triggers=lambda tools: [mistral.OPEN],
        bare_names=True,
    )


def _tagged_call(tool: Tool, before: str, after: str) -> dict[str, Any]:
    """Return the tag of Qwen3-Coder's call. Its arguments come in the order of the schema. A text is free, unless it is
    one of a choice; so are the arguments of a tool whose schema does not name them."""
    begin, end = f"{before}\n{qwen.FUNCTION}{tool.name}>\n", f"{qwen.END_FUNCTION}\n{after}"
    schema = tool.parameters
    properties = schema.get("properties", {})
    is_open = not isinstance(properties, dict) or (not properties and schema.get("additionalProperties") is not False)
    if is_open or not all(isinstance(key, str) and _TAGGED_NAME.fullmatch(key) for key in properties):
        return _tag(begin, _ANY_TEXT, end)
    required = schema.get("required")
    made = [_constant("\n")]
    for key in properties:
        value = _tag(f"{qwen.PARAMETER}{key}>\n", _tagged_value(schema, key), f"\n{qwen.END_PARAMETER}\n")
        made.append(value if isinstance(required, list) and key in required else _optional(value))
    return _tag(begin.removesuffix("\n"), _sequence(made), end)


def _tagged_value(schema: dict[str, Any], key: str) -> dict[str, Any]:
    types = argument_types(schema, key)
    if types and "string" not in types:
        return _value(schema, key, _typed(types))
    return _choice(schema, key, lambda text: text, "null" in types) or _ANY_TEXT


def _value(schema: dict[str, Any], key: str, otherwise: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of one argument, with what its schema refers to."""
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return _schema({**schema["properties"][key], **shared}, otherwise)


def _typed(types: set[str]) -> dict[str, Any]:
    """Return a schema of any value of these types."""
    return {"type": sorted(types)} if types <= _TYPES else {}


def _choice(
    schema: dict[str, Any], key: str, write: Callable[[str], str], can_be_null: bool = False
) -> dict[str, Any] | None:
    """Return a choice of the texts that an argument may be; None if its schema does not list them."""
    values = resolve(schema, schema["properties"][key]).get("enum")
    if not isinstance(values, list):
        return None
    texts = [value for value in values if isinstance(value, str) and value]
    if not texts or len(texts) + (None in values) < len(values):
        return None
    return {"type": "choice", "values": [*map(write, texts), *(["null"] if can_be_null else [])]}


def _gemma(number: int) -> CallSpelling:
    quote = gemma.QUOTES[number]

    def call(tool: Tool, before: str, after: str) -> dict[str, Any]:
        members = _gemma_members(tool.parameters, quote)
        begin = f"{before}{gemma.CALL}{tool.name}"
        if members is None:
            return _tag(begin + "{", _ANY_TEXT, "}" + after)
        return _tag(begin, _sequence([_constant("{"), *members]), "}" + after)

    return CallSpelling(
        begin=gemma.OPEN[number],
        end=gemma.CLOSE[number],
        separator=gemma.CLOSE[number] + gemma.OPEN[number],
        call=call,
        triggers=lambda tools: [gemma.OPEN[number]],
        bare_names=True,
    )


def _gemma_members(schema: dict[str, Any], quote: str) -> list[dict[str, Any]] | None:
    """Return the arguments as Gemma's templates order them, by name; None if they stay free."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return None
    if not properties and schema.get("additionalProperties") is not False:
        return None
    rest: list[dict[str, Any]] = []  # behind another argument
    first: list[dict[str, Any]] = []  # the same as the first ones
    optional = 0
    for key in sorted(properties, key=str.lower, reverse=True):
        value = _gemma_value(schema, key, quote)
        if value is None or not _BARE_NAME.fullmatch(key):
            return None
        here = [_constant(f"{key}:"), value, *rest]
        following = _sequence([_constant(f",{key}:"), value])
        if key in required:
            first, rest = here, [following, *rest]
            continue
        optional += 1
        if optional > MAX_OPTIONAL:
            return None
        first, rest = [_or(_sequence(here), first)], [_optional(following), *rest]
    return first


def _or(one: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "or", "elements": [one, _sequence(others)]} if others else _optional(one)


def _gemma_value(schema: dict[str, Any], key: str, quote: str) -> dict[str, Any] | None:
    types = argument_types(schema, key)
    text = _tag(quote, _ANY_TEXT, quote)
    if types <= {"string", "null"}:
        choice = _choice(schema, key, lambda each: quote + each + quote, "null" in types)
        if choice or "string" in types:
            return choice or (_or(text, [_constant("null")]) if "null" in types else text)
    if types and types <= _PLAIN:
        return _value(schema, key, _typed(types))
    items = resolve(schema, schema["properties"][key]).get("items")
    inner = json_types(schema, items) if types == {"array"} else set()
    if inner == {"string"}:
        return _tag("[", {"type": "tags_with_separator", "tags": [text], "separator": ","}, "]")
    if not inner or not inner <= _PLAIN:
        return None
    return _value(schema, key, {"type": "array", "items": _typed(inner)})


_HERMES = CallSpelling(
    begin=hermes.OPEN,
    end=hermes.CLOSE,
    separator=f"{hermes.CLOSE}\n{hermes.OPEN}",
    call=lambda tool, before, after: _object(tool, "arguments", before + "\n{", "}\n" + after),
    triggers=lambda tools: [hermes.OPEN],
)

_TAGGED = CallSpelling(
    begin=hermes.OPEN,
    end=hermes.CLOSE,
    separator=f"{hermes.CLOSE}\n{hermes.OPEN}",
    call=_tagged_call,
    triggers=lambda tools: [hermes.OPEN],
    bare_names=True,
)

_LLAMA3 = CallSpelling(
    begin="{",
    end="}",
    separator="}; {",
    call=lambda tool, before, after: _object(tool, "parameters", before, after),
    # Without a marker, only the name of a tool tells a call from an answer in JSON.
    triggers=lambda tools: [f'{{"name": {json.dumps(tool.name)}' for tool in tools],
)

_DEEPSEEK = CallSpelling(
    begin=deepseek.OPEN,
    end=deepseek.CLOSE,
    separator="",
    call=lambda tool, before, after: _tag(
        f"{before}{deepseek.OPEN_CALL}{tool.name}{deepseek.SEPARATOR}", _arguments(tool), deepseek.CLOSE_CALL + after
    ),
    triggers=lambda tools: [deepseek.OPEN],
    is_list=True,
    bare_names=True,
)

_DEEPSEEK_CODE = CallSpelling(
    begin=deepseek.OPEN,
    end=deepseek.CLOSE,
    separator="\n",
    call=lambda tool, before, after: _tag(
        f"{before}{deepseek.OPEN_CALL}function{deepseek.SEPARATOR}{tool.name}\n{deepseek.OPEN_CODE}\n",
        _arguments(tool),
        f"\n{deepseek.CLOSE_CODE}{deepseek.CLOSE_CALL}{after}",
    ),
    triggers=lambda tools: [deepseek.OPEN],
    is_list=True,
    bare_names=True,
)
