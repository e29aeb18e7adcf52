"""Tags that keep tool calls valid, as the library reads them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest
from msgspec import structs

from shoal.backends.genai.sampling import structure_arguments
from shoal.backends.genai.structural_tags import write_tags
from shoal.errors import InvalidValue
from shoal.pipelines.chat.tool_tags import (
    CallSpelling,
    calls_or_answer,
    can_tag,
    find_spelling,
    marked_calls,
    required_calls,
)
from shoal.pipelines.chat.tools import ParserKind, ToolParser, tool_parser
from shoal.types import Guide, Tool

if find_spec("openvino_genai") is None:
    pytest.skip("needs the 'llm' extra", allow_module_level=True)

from tests.unit.backends.genai.grammar_matcher import GrammarMatcher

WHOLE = {"type": "integer", "minimum": 0, "maximum": 99}
NODE = {"type": "object", "properties": {"n": WHOLE}, "required": ["n"], "additionalProperties": False}
TOOLS = [
    Tool(name="add", parameters={**NODE, "properties": {"n": {"$ref": "#/$defs/whole"}}, "$defs": {"whole": WHOLE}}),
    Tool(name="add_more", parameters=NODE),
    Tool(name="now"),
]
FIRST, SECOND = ("add", '{"n": 1}'), ("add_more", '{"n": 22}')


def spelling(kind: ParserKind, template: str = "") -> CallSpelling:
    found = find_spelling(kind, template)
    assert found is not None
    return found


HERMES = spelling("hermes")


@pytest.fixture(scope="module")
def matcher() -> GrammarMatcher:
    return GrammarMatcher()


def plain(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


def marked(name: str, arguments: str) -> str:
    return f"<tool_call>\n{plain(name, arguments)}\n</tool_call>"


def calls_in(parser: ToolParser, text: str) -> list[tuple[str, str]]:
    """Return the names and arguments of the calls in a text that has nothing else."""
    content, deltas = parser.push(text)
    rest, more = parser.flush()
    assert content + rest == ""
    calls: list[tuple[str, str]] = []
    for delta in [*deltas, *more]:
        if delta.name:
            calls.append((delta.name, ""))
        calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return calls


@pytest.mark.parametrize(
    "calls", [[FIRST], [SECOND], [FIRST, SECOND, FIRST], [("now", "{}")], [("now", '{"zone": "utc"}')]]
)
def test_required_calls(matcher: GrammarMatcher, calls: list[tuple[str, str]]) -> None:
    """One or more, and the parser of plain calls reads them all."""
    text = "; ".join(plain(*call) for call in calls)
    assert matcher.accepts(text, structural_tags_config=write_tags(required_calls(TOOLS, "arguments")))
    assert calls_in(tool_parser("llama3", TOOLS), text) == calls


@pytest.mark.parametrize(
    "text",
    [
        "",
        "well",
        plain("sub", '{"n": 1}'),
        plain("add", '{"n": 100}'),
        plain("add", "{}"),
        plain("now", "[]"),
        plain(*FIRST) + "; ",
        plain(*FIRST) + plain(*SECOND),
        plain(*FIRST) + " done",
        f"well {plain(*FIRST)}",
    ],
)
def test_what_a_required_call_is_not(matcher: GrammarMatcher, text: str) -> None:
    assert not matcher.accepts(text, structural_tags_config=write_tags(required_calls(TOOLS, "arguments")))


def test_noise_becomes_valid_calls(matcher: GrammarMatcher) -> None:
    """Whatever the model prefers."""
    tags = write_tags(required_calls(TOOLS[:2], "arguments"))
    texts = [matcher.sample(seed, 400, structural_tags_config=tags) for seed in range(30)]
    assert None not in texts
    calls = [calls_in(tool_parser("llama3", TOOLS), str(text)) for text in texts]
    assert {name for each in calls for name, _ in each} == {"add", "add_more"}
    assert all(0 <= json.loads(arguments)["n"] <= 99 for each in calls for _, arguments in each)


@pytest.mark.parametrize("parallel", [True, False])
def test_marked_calls(matcher: GrammarMatcher, parallel: bool) -> None:
    """Text stays free; a call once begun is valid; without `parallel` nothing follows it."""
    tags: dict[str, Any] = {"structural_tags_config": write_tags(marked_calls(HERMES, TOOLS, parallel=parallel))}
    for text in ("", "a <tool> or { }", f"well {marked(*FIRST)}", marked("now", "{}")):
        assert matcher.accepts(text, **tags), text
    for text in (marked("sub", '{"n": 1}'), marked("add", '{"n": "x"}'), "well <tool_call>", marked(*FIRST)[:-5]):
        assert not matcher.accepts(text, **tags), text
    for text in (f"{marked(*FIRST)}\n{marked(*SECOND)}", f"{marked(*FIRST)} done"):
        assert matcher.accepts(text, **tags) == parallel, text
    both = f"{marked(*FIRST)}\n{marked(*SECOND)}"
    assert calls_in(tool_parser("hermes", TOOLS, parallel=True), both) == [FIRST, SECOND]


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_or_an_answer(matcher: GrammarMatcher, parallel: bool) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tags: dict[str, Any] = {
        "structural_tags_config": write_tags(calls_or_answer(HERMES, TOOLS, schema, parallel=parallel))
    }
    for text in ('{"city": "K\xf6ln"}', marked(*FIRST), marked("now", "{}")):
        assert matcher.accepts(text, **tags), text
    for text in ("", "well", '{"n": 1}', plain(*FIRST), marked("sub", "{}"), marked(*FIRST) + '{"city": "x"}'):
        assert not matcher.accepts(text, **tags), text
    both = f"{marked(*FIRST)}\n{marked(*SECOND)}"
    assert matcher.accepts(both, **tags) == parallel
    assert calls_in(tool_parser("hermes", TOOLS, parallel=True), both) == [FIRST, SECOND]


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_or_an_answer_of_tools_without_a_grammar(matcher: GrammarMatcher, parallel: bool) -> None:
    """Only their arguments are free; an answer's schema without a grammar is refused."""
    tools = [*TOOLS, Tool(name="free", parameters={"type": "object", "not": {}})]
    guide = Guide(kind="calls_or_answer", value=calls_or_answer(HERMES, tools, NODE, parallel=parallel))
    tags: dict[str, Any] = structure_arguments(guide)
    for text in ('{"n": 1}', marked(*FIRST), marked("free", '{"x": [1]}')):
        assert matcher.accepts(text, **tags), text
    for text in ('{"x": 1}', marked("add", '{"x": 1}'), marked("free", "1")):
        assert not matcher.accepts(text, **tags), text
    with pytest.raises(InvalidValue, match="`not` is not supported"):
        structure_arguments(structs.replace(guide, kind="structural_tag"))
    with pytest.raises(InvalidValue, match="`not` is not supported"):
        structure_arguments(
            structs.replace(guide, value=calls_or_answer(HERMES, tools, {"not": {}}, parallel=parallel))
        )


def test_names_beyond_ascii() -> None:
    assert can_tag(TOOLS)
    assert not can_tag([*TOOLS, Tool(name="gr\xf6\xdfe")])


BEGIN, END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL, SEP, STOP = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
)
FORMS: dict[str, tuple[ParserKind, str, str, str, str, str, str]] = {
    "llama3": ("llama3", "", "", '{"name": "@", "parameters": #}', "; ", "", '{"name": "add", "x": 1}'),
    "mistral": (
        "mistral",
        "[TOOL_CALLS] [",
        "[TOOL_CALLS] [",
        '{"name": "@", "arguments": #}',
        ", ",
        "]",
        "[TOOL_CALLS] []",
    ),
    "mistral, tight": ("mistral", "", "[TOOL_CALLS][", '{"name": "@", "arguments": #}', ", ", "]", "[TOOL_CALLS]add{}"),
    "mistral, names": ("mistral", "[ARGS]", "", "[TOOL_CALLS]@[ARGS]#", "", "", "[TOOL_CALLS][ARGS]"),
    "mistral, ids": (
        "mistral",
        "[ARGS][CALL_ID]",
        "",
        "[TOOL_CALLS]@[CALL_ID]a1B2c3D4e[ARGS]#",
        "",
        "",
        '[TOOL_CALLS]add[ARGS]{"n": 1}',
    ),
    "phi4": (
        "phi4",
        "<|tool|>",
        "<|tool_call|>[",
        '{"name": "@", "arguments": #}',
        ", ",
        "]<|/tool_call|>",
        "<|tool_call|>",
    ),
    "granite": (
        "phi4",
        "<|tool_call|>",
        "<|tool_call|>[",
        '{"name": "@", "arguments": #}',
        ", ",
        "]",
        "<|tool_call|>x",
    ),
    "functools": ("phi4", "functools[", "functools[", '{"name": "@", "arguments": #}', ", ", "]", "functools[]"),
    "deepseek": ("deepseek", "", BEGIN, f"{CALL}@{SEP}#{STOP}", "", END, f"{BEGIN}{END}"),
    "deepseek, code": (
        "deepseek",
        "```json",
        BEGIN,
        f"{CALL}function{SEP}@\n```json\n#\n```{STOP}",
        "\n",
        END,
        f"{BEGIN}{CALL}add{SEP}",
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_in_other_formats(matcher: GrammarMatcher, form: str, parallel: bool) -> None:
    """Text stays free, a call once begun is valid, and the format's parser reads it."""
    kind, template, begin, call, separator, end, wrong = FORMS[form]

    def written(*calls: tuple[str, str]) -> str:
        return begin + separator.join(call.replace("@", name).replace("#", text) for name, text in calls) + end

    spelled = spelling(kind, template)
    marked = {"structural_tags_config": write_tags(marked_calls(spelled, TOOLS, parallel=parallel))}
    forms = {"structural_tags_config": write_tags(calls_or_answer(spelled, TOOLS, NODE, parallel=parallel))}
    for text in ("", 'a <tool> {"name": "Bob"} [1]', f"well {written(FIRST)}", written(("now", "{}"))):
        assert matcher.accepts(text, **marked), text
    for text in (wrong, written(("add", '{"n": "x"}')), written(("add", "{}"))):
        assert not matcher.accepts(text, **marked), text
    both = written(FIRST, SECOND)
    assert matcher.accepts(both, **marked) == parallel
    assert matcher.accepts(f"{written(FIRST)} done", **marked) == parallel
    assert calls_in(tool_parser(kind, TOOLS), both) == [FIRST, SECOND]
    for text in ('{"n": 1}', written(FIRST)):
        assert matcher.accepts(text, **forms), text
    for text in ("", "well", '{"n": 1} x', written(("add", "{}"))):
        assert not matcher.accepts(text, **forms), text
    assert matcher.accepts(both, **forms) == (parallel and bool(spelled.end))


MIXED = Tool(
    name="mixed",
    parameters={
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "unit": {"enum": ["c", "cm", "f"], "type": ["string", "null"]},
            "days": {"$ref": "#/$defs/whole"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["text", "days"],
        "$defs": {"whole": WHOLE},
    },
)


def tagged(name: str, *pairs: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def test_tagged_calls(matcher: GrammarMatcher) -> None:
    """Qwen3-Coder's arguments keep their schemas; texts stay free; a choice is one of its texts."""
    tools = [MIXED, *TOOLS[1:], Tool(name="none", parameters={"type": "object", "additionalProperties": False})]
    spelled = spelling("hermes", "<function=")
    tags = {"structural_tags_config": write_tags(marked_calls(spelled, tools, parallel=True))}
    text, days = ("text", 'a "b"\n</c> 5'), ("days", "12")
    whole = tagged("mixed", text, ("unit", "cm"), days, ("tags", '["x", "y"]'))
    for good in (whole, tagged("mixed", text, days), tagged("now", ("any", "x")), tagged("now"), tagged("none")):
        assert matcher.accepts(f"Well. {good}\n{good} So", **tags), good
    for bad in (
        tagged("mixed", text),
        tagged("mixed", text, ("days", "x")),
        tagged("mixed", text, ("unit", "m"), days),
        tagged("mixed", text, days, ("tags", "x")),
        tagged("none", text),
        tagged("other"),
        marked("mixed", "{}"),
    ):
        assert not matcher.accepts(bad, **tags), bad
    assert [json.loads(made) for _, made in calls_in(tool_parser("hermes", tools), whole)] == [
        {"text": text[1], "unit": "cm", "days": 12, "tags": ["x", "y"]}
    ]


@pytest.mark.parametrize(
    ("argument", "good", "bad"),
    [
        ({"anyOf": [{"type": "array", "uniqueItems": True}, {"type": "null"}]}, ["[1]", "null"], ["{}", "5"]),
        ({"anyOf": [{"type": "integer", "multipleOf": 3}, {"type": "null"}]}, ["3", "null"], ["{}", "[]"]),
        ({"$ref": "#/$defs/odd"}, ["3"], ["{}", "null"]),
        ({"$ref": "#/properties/other"}, ["3"], ["{}", "null"]),
        ({"type": "whole"}, ["3", "{}"], ["three"]),
    ],
)
def test_tagged_arguments_without_a_grammar(
    matcher: GrammarMatcher, argument: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    """Beside a form, they may be any value of their types."""
    parameters = {
        "type": "object",
        "properties": {"n": argument, "other": {"type": "integer"}},
        "required": ["n"],
        "$defs": {"odd": {"type": "integer", "not": {"const": 0}}},
    }
    tools = [Tool(name="f", parameters=parameters)]
    value = calls_or_answer(spelling("hermes", "<function="), tools, NODE, parallel=True)
    tags: dict[str, Any] = structure_arguments(Guide(kind="calls_or_answer", value=value))
    assert [each for each in [*good, *bad] if matcher.accepts(tagged("f", ("n", each)), **tags)] == good


@pytest.mark.parametrize(
    ("kind", "template", "good", "bad"),
    [
        ("mistral", "[ARGS][CALL_ID]", '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"n": [1, 1]}', ("{", "[{")),
        ("gemma", "<|tool_call>", "<|tool_call>call:f{n:[1, 1]}<tool_call|>", ("[1, 1]", '"x"')),
        ("gemma", "<|tool_call>", "<|tool_call>call:f{k:3,n:[1, 1]}<tool_call|>", ("k:3", 'k:"x"')),
    ],
)
def test_nested_arguments_without_a_grammar(
    matcher: GrammarMatcher, kind: ParserKind, template: str, good: str, bad: tuple[str, str]
) -> None:
    """A tool without a grammar does not refuse a request with a form."""
    items = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    properties = {"n": items, "k": {"type": "integer", "not": {"const": 0}}}
    tools = [Tool(name="f", parameters={"type": "object", "properties": properties, "required": ["n"]})]
    value = calls_or_answer(spelling(kind, template), tools, NODE, parallel=False)
    tags: dict[str, Any] = structure_arguments(Guide(kind="calls_or_answer", value=value))
    assert matcher.accepts(good, **tags)
    assert matcher.accepts('{"n": 1}', **tags)
    assert not matcher.accepts(good.replace(*bad), **tags)
    assert len(calls_in(tool_parser(kind, tools), good)) == 1


@pytest.mark.parametrize("quote", ["<escape>", '<|"|>'])
def test_calls_of_gemma(matcher: GrammarMatcher, quote: str) -> None:
    """Arguments are in the order of their names."""
    begin, end, template = {
        "<escape>": ("<start_function_call>call:", "<end_function_call>", "<start_function_call>"),
        '<|"|>': ("<|tool_call>call:", "<tool_call|>", "<|tool_call>"),
    }[quote]
    free = Tool(name="free", parameters={"type": "object", "properties": {"o": {"type": "object"}}})
    options = Tool(
        name="options", parameters={"type": "object", "properties": {key: {"type": "boolean"} for key in "cab"}}
    )
    tools = [MIXED, free, options, *TOOLS[1:]]
    spelled = spelling("gemma", template)
    tags = {"structural_tags_config": write_tags(marked_calls(spelled, tools, parallel=True))}

    def written(inner: str) -> str:
        return begin + inner.replace('"', quote) + end

    for good in (
        'mixed{days:12,text:"a, b}"}',
        'mixed{days:12,tags:["x","y"],text:"a",unit:"cm"}',
        'mixed{days:12,text:"a",unit:null}',
        'free{o:{"k":1}}',
        "options{}",
        "options{a:true}",
        "options{b:true,c:false}",
        "add_more{n:5}",
        "now{}",
    ):
        assert matcher.accepts(f"Well. {written(good)}{written(good)}", **tags), good
        assert len(calls_in(tool_parser("gemma", tools), written(good))) == 1
    for bad in ("mixed{days:12}", 'mixed{text:"a",days:12}', "options{,a:true}", "options{b:true,a:true}", "other{}"):
        assert not matcher.accepts(written(bad), **tags), bad


def test_names_and_formats_without_tags() -> None:
    assert find_spelling("pythonic", "") is None
    assert find_spelling(None, "<tool_call>") is None
    assert not spelling("deepseek").can_tag([Tool(name="a b")])
    assert spelling("llama3").can_tag([Tool(name="a b")])
