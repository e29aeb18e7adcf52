"""`<tool_call>` with an object, and with the tags of Qwen3-Coder."""

from __future__ import annotations

import json

import pytest

from shoal.pipelines.chat.tools import tool_parser
from shoal.types import Tool, ToolDelta
from tests.unit.pipelines.chat.tools.parse_kit import ParsedAnswer, parse_all_ways, parser

PARIS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'


def test_the_first_delta_has_the_name_and_the_rest_the_arguments_as_they_come() -> None:
    reader = parser("hermes")
    assert reader.push('Well.\n<tool_call>\n{"name": "get_weather", "argu') == ("Well.", [])
    assert reader.push('ments": ') == ("", [])
    assert reader.calls == 0
    assert reader.push('{"ci') == (
        "",
        [ToolDelta(index=0, id="id0", name="get_weather"), ToolDelta(index=0, arguments='{"ci')],
    )
    assert reader.calls == 1
    assert reader.push('ty": "Par') == ("", [ToolDelta(index=0, arguments='ty": "Par')])
    assert reader.push('is"}}\n</tool') == ("", [ToolDelta(index=0, arguments='is"}')])
    assert reader.push("_call>") == ("", [])
    assert reader.flush() == ("", [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ParsedAnswer("", [])),
        ("No call at all.\n", ParsedAnswer("No call at all.\n", [])),
        ("\n\n indented", ParsedAnswer("\n\n indented", [])),
        (CALL, ParsedAnswer("", [("get_weather", PARIS)])),
        (f"{CALL}\n{CALL}\n", ParsedAnswer("", [("get_weather", PARIS)] * 2)),
        (f"\n\n{CALL}", ParsedAnswer("", [("get_weather", PARIS)])),
        (f"I look.\n\n{CALL}", ParsedAnswer("I look.", [("get_weather", PARIS)])),
        (f"I look.\n\n{CALL}\nDone. ", ParsedAnswer("I look.\nDone. ", [("get_weather", PARIS)])),
        (f"I look. {CALL}Done.", ParsedAnswer("I look. Done.", [("get_weather", PARIS)])),
        (f"{CALL}\n Done.", ParsedAnswer("Done.", [("get_weather", PARIS)])),
        (f"a {CALL} {CALL} b {CALL} c", ParsedAnswer("a b c", [("get_weather", PARIS)] * 3)),
    ],
)
def test_content_and_calls(text: str, expected: ParsedAnswer) -> None:
    assert parse_all_ways("hermes", text) == expected


ARGUMENTS = [
    "{}",
    "{ }",
    '{"a": {"b": [{"c": {}}, []]}}',
    '{"a": "}}{{ ]["}',
    '{"a": "\\"}\\\\"}',
    '{"a": "\\\\"}',
    '{"tag": "</tool_call> <tool_call>"}',
    '{"text": "Größe 東京 🌊 \\u00e9"}',
    '{\n  "a" : [1, 2.5e10, -0.1, true, false, null]\n}',
    '{"a": ' + "9" * 5000 + "}",
    '{"a": ' + "[" * 300 + "]" * 300 + "}",
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_arguments_come_to_the_character(arguments: str, key: str) -> None:
    text = f'<tool_call>{{"name":"f","{key}":{arguments}}}</tool_call>'
    assert parse_all_ways("hermes", text) == ParsedAnswer("", [("f", arguments)])
    text = f'<tool_call>{{"{key}": {arguments} , "name": "f"}}</tool_call>'
    assert parse_all_ways("hermes", text) == ParsedAnswer("", [("f", arguments)])


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"name": "f"}', ("f", "{}")),
        ('{"name": "f", "arguments": null}', ("f", "{}")),
        ('{"name": "f", "arguments": ""}', ("f", "{}")),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', ("f", '{"a": 1}')),
        ('{"arguments": "{\\"a\\": 1}", "name": "f"}', ("f", '{"a": 1}')),
        ('{"id": 7, "more": [{"x": "]"}], "name": "f", "arguments": {"a": 1}, "id": "z", "b": {}}', ("f", '{"a": 1}')),
        ('{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', ("f", '{"a": 1}')),
        ('{"type": "function", "function": "f", "parameters": {"a": 1}}', ("f", '{"a": 1}')),
        ('{"name": "f", "function": {"name": "g"}, "arguments": {"a": 1}}', ("f", '{"a": 1}')),
        ('{"name": "f", "arguments": {"a": 1}, "arguments": {"a": 2}}', ("f", '{"a": 1}')),
        ('{"arguments": {"a": 1}, "parameters": {"a": 2}, "name": "f"}', ("f", '{"a": 1}')),
        ('{"n\\u0061me": "caf\\u00e9", "arguments": {}}', ("café", "{}")),
        ('{"name": "nobody offered it", "arguments": {}}', ("nobody offered it", "{}")),
    ],
)
def test_call_forms(written: str, expected: tuple[str, str]) -> None:
    assert parse_all_ways("hermes", f"<tool_call>\n{written}\n</tool_call>") == ParsedAnswer("", [expected])


@pytest.mark.parametrize(
    "text",
    [
        "The tag <tool_call> begins a call.",
        "<tool_call>",
        "<tool_ca",
        "<tool_call>\n{",
        '<tool_call>\n{"name": "get_weather", "argum',
        '<tool_call>{"name": "get_weather", "arguments": ',
        "<tool_call>{}</tool_call>",
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": {}, "arguments": {}}</tool_call>',
        '<tool_call>{"name": null, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a\\nb", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "' + "x" * 257 + '", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "' + "[" * 20_000 + '"}</tool_call>',
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        '<tool_call>{"name" "f"}</tool_call>',
        '<tool_call>{"name": , "arguments": {}}</tool_call>',
        '<tool_call>{, "name": "f"}</tool_call>',
        '<tool_call>{"name": "f",}</tool_call>',
        "<tool_call>get_weather(city='Paris')</tool_call>",
    ],
)
def test_other_text_stays_content_unchanged(text: str) -> None:
    assert parse_all_ways("hermes", text) == ParsedAnswer(text, [])


def test_a_call_after_other_text_is_found() -> None:
    assert parse_all_ways("hermes", f"<tool_call><tool_call>?{CALL}") == ParsedAnswer(
        "<tool_call><tool_call>?", [("get_weather", PARIS)]
    )


@pytest.mark.parametrize("cut", ['{"city": "Pa', '{"city": ', "{", '{"city": "Paris\\'])
def test_a_call_that_ends_too_early_keeps_the_arguments_that_it_has(cut: str) -> None:
    """The end is not invented: a truncated command must not look complete."""
    parsed = parse_all_ways("hermes", f'<tool_call>\n{{"name": "f", "arguments": {cut}')
    assert parsed == ParsedAnswer("", [("f", cut)])


@pytest.mark.parametrize(
    ("end", "content"),
    [
        ("", ""),
        ("\n", ""),
        ("}", ""),
        ("}\n", ""),
        ("</tool_call>", ""),
        ("\n</tool_call> So.", "So."),
        ("} and more", "and more"),
        (" and more", "and more"),
        (', "id": ]}</tool_call>', "]}</tool_call>"),
        ("}</tool_c", "</tool_c"),
    ],
)
def test_a_bad_end_harms_no_whole_arguments(end: str, content: str) -> None:
    text = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}{end}'
    assert parse_all_ways("hermes", text) == ParsedAnswer(content, [("get_weather", PARIS)])


def test_several_objects_in_one_pair_of_tags() -> None:
    one = f'{{"name": "f", "arguments": {PARIS}}}'
    assert parse_all_ways("hermes", f"<tool_call>\n{one}\n{one}\n</tool_call>") == ParsedAnswer("", [("f", PARIS)] * 2)


def test_arguments_that_are_no_json_come_as_the_model_wrote_them() -> None:
    arguments = '{"a": True, "b": [1,], c: NaN}'
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert parse_all_ways("hermes", text) == ParsedAnswer("", [("f", arguments)])


def test_without_parallel_calls_only_the_first_counts() -> None:
    text = f'a{CALL}b<tool_call>{{"name": "other", "arguments": {{"x": 1}}}}</tool_call>c'
    assert parse_all_ways("hermes", text, parallel=False) == ParsedAnswer("abc", [("get_weather", PARIS)])


def tagged(body: str, name: str = "get_weather") -> str:
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("city", "\nParis\n", "Paris"),
        ("city", "Paris", "Paris"),
        ("city", "\r\nParis\r\n", "Paris"),
        ("city", "\n5\n", "5"),
        ("city", "\nnull\n", "null"),
        ("city", '\n\n  two "lines"\n<b>é\\</b>\n\n', '\n  two "lines"\n<b>é\\</b>\n'),
        ("city", "\nParis", "Paris"),
        ("city", "\n<a>\n  </parameter>\n</a>\n", "<a>\n  </parameter>\n</a>"),
        ("city", "\nx</parameter></parameter> </parameter", "x</parameter></parameter> </parameter"),
        ("city", "\n", ""),
        ("city", "", ""),
        ("place", '\n{"x": "</parameter>"}\n', {"x": "</parameter>"}),
        ("place", '{"x": "</parameter> "}', {"x": "</parameter> "}),
        ("days", "\n3\n", 3),
        ("days", "\nmany\n", "many"),
        ("days", "\nNaN\n", "NaN"),
        ("days", "\n" + "[" * 20_000 + "\n", "[" * 20_000),
        ("exact", "\nTrue\n", True),
        ("exact", "\nfalse\n", False),
        ("exact", "\nNone\n", None),
        ("unit", "\nnull\n", None),
        ("unit", "\nc\n", "c"),
        ("place", '\n{"lat": [1.5]}\n', {"lat": [1.5]}),
        ("place", "\nnull\n", None),
        ("count", "\n5\n", 5),
        ("circle", "\n5\n", "5"),
        ("loose", "\n5\n", "5"),
        ("unheard of", "\n5\n", "5"),
    ],
)
def test_tagged_parameters_have_the_type_of_their_schema(key: str, value: str, expected: object) -> None:
    parsed = parse_all_ways("hermes", tagged(f"<parameter={key}>{value}</parameter>\n"))
    assert parsed.content == ""
    assert [(name, json.loads(arguments)) for name, arguments in parsed.calls] == [("get_weather", {key: expected})]


WHOLE = {"type": "object", "properties": {"k": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("parameters", "value", "expected"),
    [
        ({"allOf": [{"$ref": "#/$defs/count"}], "default": 1}, "5", 5),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": 3}, "3", 3),
        ({"$ref": "#/$defs/level"}, "2", 2),
        ({"anyOf": [{"enum": ["1", "2"]}, {"type": "null"}]}, "1", "1"),
        ({"anyOf": [{"enum": ["1", "2"]}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"allOf": [{"type": "string"}]}, {"type": "null"}]}, "12", "12"),
        ({"oneOf": [{"const": "true"}, {"type": "null"}]}, "true", "true"),
        ({"$ref": "#/$defs/circle"}, "5", 5),
        ({"anyOf": [{}] * 10_000}, "5", "5"),
        ({"items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({"additionalProperties": {}}, '{"a": 1}', {"a": 1}),
        ({"type": "array"}, "['a', None, True]", ["a", None, True]),
        ({"type": "object"}, "{'a': (1, 2)}", {"a": [1, 2]}),
        ({"type": "object"}, '{"a": "x\ny"}', {"a": "x\ny"}),
        ({"type": "array"}, "['a'", "['a'"),
        ({"type": "array"}, "f('a')", "f('a')"),
    ],
)
def test_tagged_values_have_a_type_that_their_schema_allows(
    parameters: dict[str, object], value: str, expected: object
) -> None:
    shared = {
        "count": {"type": "integer"},
        "level": {"enum": [1, 2]},
        "circle": {"anyOf": [{"$ref": "#/$defs/circle"}, {"type": "integer"}]},
    }
    assert read_value({"properties": {"k": parameters}, "$defs": shared}, value) == expected


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/whole", "$defs": {"whole": WHOLE}},
        {"allOf": [{"properties": {"other": {}}}, WHOLE]},
    ],
)
def test_schemas_of_tools_may_refer_to_others(parameters: dict[str, object]) -> None:
    assert read_value(parameters, "5") == 5


def read_value(parameters: dict[str, object], value: str) -> object:
    reader = tool_parser("hermes", [Tool(name="f", parameters=parameters)])
    _, deltas = reader.push(tagged(f"<parameter=k>\n{value}\n</parameter>\n", "f"))
    return json.loads("".join(delta.arguments for delta in deltas))["k"]


def test_several_tagged_parameters_and_calls() -> None:
    body = "<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    text = f"So.\n{tagged(body)}\n{tagged('', 'other')}\n{tagged(body, 'odd')}{tagged(body, 'unknown')}"
    untyped = '{"city": "Paris", "days": "3"}'
    assert parse_all_ways("hermes", text) == ParsedAnswer(
        "So.",
        [("get_weather", '{"city": "Paris", "days": 3}'), ("other", "{}"), ("odd", untyped), ("unknown", untyped)],
    )


def test_a_tagged_parameter_is_emitted_when_complete() -> None:
    reader = parser("hermes")
    assert reader.push("<tool_call><function=other><parameter=a>\n1") == ("", [])
    assert reader.push("\n</parameter>") == (
        "",
        [ToolDelta(index=0, id="id0", name="other"), ToolDelta(index=0, arguments='{"a": "1"')],
    )
    assert reader.push("</function>") == ("", [ToolDelta(index=0, arguments="}")])
    assert reader.flush() == ("", [])


def test_the_end_of_the_call_ends_a_tagged_function() -> None:
    assert parse_all_ways("hermes", "<tool_call><function=f><parameter=a>1</parameter></tool_call>.") == ParsedAnswer(
        ".", [("f", '{"a": "1"}')]
    )


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><func",
        "<tool_call><function=f",
        "<tool_call><function=>",
        "<tool_call><function=a\nb>",
        "<tool_call><function=" + "x" * 257 + ">",
        "<tool_call><function=f>\n<parameter=a>\n1\n</param",
        "<tool_call><function=f>\n<parameter=a",
        "<tool_call><function=f>\n words </function>",
        "<tool_call><fun>",
    ],
)
def test_tags_that_make_no_call_are_content(text: str) -> None:
    assert parse_all_ways("hermes", text) == ParsedAnswer(text, [])


def test_a_tagged_call_that_breaks_keeps_its_parameters_and_loses_no_text() -> None:
    start = "<tool_call><function=f><parameter=a>1</parameter>"
    assert parse_all_ways("hermes", f"{start}<parameter=b>2") == ParsedAnswer("<parameter=b>2", [("f", '{"a": "1"')])
    assert parse_all_ways("hermes", f"{start} what?") == ParsedAnswer("what?", [("f", '{"a": "1"')])
