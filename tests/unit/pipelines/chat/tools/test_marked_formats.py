"""DeepSeek's, Phi-4-mini's and Gemma's calls between markers."""

from __future__ import annotations

import pytest

from shoal.pipelines.chat.tools import ParserKind
from tests.unit.pipelines.chat.tools.parse_kit import ParsedAnswer, parse_all_ways

PARIS = '{"city": "Paris"}'
OBJECT = f'{{"name": "get_weather", "arguments": {PARIS}}}'
BEGIN, END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL, SEP, STOP = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
)
V3 = f"{CALL}function{SEP}get_weather\n```json\n{PARIS}\n```{STOP}"
V31 = f"{CALL}get_weather{SEP}{PARIS}{STOP}"
GEMMA = "<start_function_call>call:"
ONE = ("get_weather", PARIS)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("deepseek", f"{BEGIN}{V31}{END}", ParsedAnswer("", [ONE])),
        ("deepseek", f"I look.{BEGIN}{V31}{V31}{END}", ParsedAnswer("I look.", [ONE] * 2)),
        ("deepseek", f"{BEGIN}{V3}\n{V3}{END} So.", ParsedAnswer("So.", [ONE] * 2)),
        ("deepseek", f"{V31}\n{V31}", ParsedAnswer("", [ONE] * 2)),
        ("deepseek", f"{BEGIN}{V31[: -len(STOP)]}", ParsedAnswer("", [ONE])),
        ("deepseek", f"{BEGIN}{V31[: -len(STOP) - 1]}", ParsedAnswer("", [(ONE[0], PARIS[:-1])])),
        ("deepseek", f"{BEGIN}{V31}```sh\nls\n```", ParsedAnswer("```sh\nls\n```", [ONE])),
        ("deepseek", f"{BEGIN}{V3}\n```sh\nls\n```", ParsedAnswer("```sh\nls\n```", [ONE])),
        ("deepseek", f"{BEGIN}{V3}\n{V31}```sh", ParsedAnswer("```sh", [ONE] * 2)),
        ("phi4", f"<|tool_call|>[{OBJECT}]<|/tool_call|>", ParsedAnswer("", [ONE])),
        ("phi4", f"Well. <|tool_call|>[{OBJECT}, {OBJECT}]<|/tool_call|> So.", ParsedAnswer("Well. So.", [ONE] * 2)),
        ("phi4", f"<|tool_call|>{OBJECT}<|/tool_call|><|tool_call|>{OBJECT}", ParsedAnswer("", [ONE] * 2)),
        ("phi4", f"<tool_call>[{OBJECT}, {OBJECT}]", ParsedAnswer("", [ONE] * 2)),
        ("phi4", f"<tool_call>[{OBJECT}]</tool_call> So.", ParsedAnswer("So.", [ONE])),
        ("phi4", f"functools[{OBJECT}]", ParsedAnswer("", [ONE])),
        ("phi4", f"<|tool_call|>[{OBJECT}", ParsedAnswer("", [ONE])),
        ("gemma", f"{GEMMA}get_weather{{city:<escape>Paris<escape>}}<end_function_call>", ParsedAnswer("", [ONE])),
        ("gemma", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>', ParsedAnswer("", [ONE])),
        (
            "gemma",
            f"{GEMMA}f{{a:None,b:[True, False],None:<escape>None<escape>}}",
            ParsedAnswer("", [("f", '{"a": null, "b": [true, false], "None": "None"}')]),
        ),
        (
            "gemma",
            f"See.{GEMMA}now{{}}<end_function_call>{GEMMA}f{{a:[1,-2.5,true,null,x],<escape>b c<escape>:{{d:<escape>}}"
            '"<escape>}}<end_function_call>\nSo.',
            ParsedAnswer(
                "See.\nSo.", [("now", "{}"), ("f", '{"a": [1, -2.5, true, null, "x"], "b c": {"d": "}\\""}}')]
            ),
        ),
    ],
)
def test_content_and_calls(kind: ParserKind, text: str, expected: ParsedAnswer) -> None:
    assert parse_all_ways(kind, text) == expected
    first = parse_all_ways(kind, text, parallel=False)
    assert first == ParsedAnswer(expected.content, expected.calls[:1])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("deepseek", BEGIN),
        ("deepseek", f"{BEGIN}{END}"),
        ("deepseek", f"{CALL}f{SEP}"),
        ("deepseek", f"{CALL}{SEP}{{}}"),
        ("deepseek", f"{CALL}f {{}}"),
        ("deepseek", f"{CALL}function{SEP}f\n```py"),
        ("deepseek", f"{CALL}{'x' * 257}{SEP}{{}}"),
        ("phi4", "Use functools, or functools[0]."),
        ("phi4", "<|tool_call|>[]<|/tool_call|>"),
        ("phi4", "<|tool_call|>none"),
        ("gemma", "<start_function_call>"),
        ("gemma", "<start_function_call>f{}"),
        ("gemma", f"{GEMMA}f[]"),
        ("gemma", f"{GEMMA}f{{a:1"),
        ("gemma", f"{GEMMA}f{{a:<escape>}}"),
        ("gemma", f"{GEMMA}f{{a}}"),
        ("gemma", f"{GEMMA}f{{a:1,}} so"),
        ("gemma", f"{GEMMA}{'x' * 257}{{}}"),
    ],
)
def test_other_text_stays_content_unchanged(kind: ParserKind, text: str) -> None:
    assert parse_all_ways(kind, text) == ParsedAnswer(text, [])
