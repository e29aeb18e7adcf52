"""A Python list of calls, released call by call."""

from __future__ import annotations

import pytest

from shoal.types import ToolDelta
from tests.unit.pipelines.chat.tools.parse_kit import ParsedAnswer, parse_all_ways, parser

WEATHER = 'get_weather(city="Paris")'
PARIS = '{"city": "Paris"}'
START, END = "<|python_start|>", "<|python_end|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"[{WEATHER}]", ParsedAnswer("", [("get_weather", PARIS)])),
        (f"\n[ {WEATHER},\n {WEATHER} , ]\n", ParsedAnswer("", [("get_weather", PARIS)] * 2)),
        ("[other()]", ParsedAnswer("", [("other", "{}")])),
        (
            '[get_weather(city="Paris", unit=\'c\'), other(x=[1,2], y={"a": None})]',
            ParsedAnswer(
                "", [("get_weather", '{"city": "Paris", "unit": "c"}'), ("other", '{"x": [1, 2], "y": {"a": null}}')]
            ),
        ),
        (
            "[other(a=')]', b=\"it's (\", c='\\'[')]",
            ParsedAnswer("", [("other", '{"a": ")]", "b": "it\'s (", "c": "\'["}')]),
        ),
        (f"[{WEATHER}] So.", ParsedAnswer("So.", [("get_weather", PARIS)])),
        (f"[{WEATHER}, unknown(a=1)]", ParsedAnswer(", unknown(a=1)]", [("get_weather", PARIS)])),
        (f"{START}[unknown(a=1)]{END}", ParsedAnswer("", [("unknown", '{"a": 1}')])),
        (f"I look.\n{START}[{WEATHER}]{END}\nSo.", ParsedAnswer("I look.\nSo.", [("get_weather", PARIS)])),
        (f"{START}[{WEATHER}]", ParsedAnswer("", [("get_weather", PARIS)])),
        (f"<|python_tag|>[{WEATHER}]", ParsedAnswer("", [("get_weather", PARIS)])),
        (f"<|tool_call_start|>[{WEATHER}]<|tool_call_end|>So.", ParsedAnswer("So.", [("get_weather", PARIS)])),
        (f"[{WEATHER}]{START}[a.b-c()]{END}", ParsedAnswer("", [("get_weather", PARIS), ("a.b-c", "{}")])),
    ],
)
def test_content_and_calls(text: str, expected: ParsedAnswer) -> None:
    assert parse_all_ways("pythonic", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Nothing [to call].",
        "[1] is a footnote.",
        "[link](https://example.org)",
        "[]",
        "[unknown(a=1)]",
        f"So: [{WEATHER}]",
        WEATHER,
        "[get_weather",
        "[get_weather(city='Par",
        "[get_weather(city='Paris'",
        "[get_weather]",
        "[get_weather ('Paris')]",
        "[get_weather('Paris')]",
        "[get_weather(city=open('/etc/passwd').read())]",
        "[get_weather(city=Paris)]",
        "[get_weather(city='a' + 'b')]",
        "[get_weather(city=[1 for _ in x])]",
        "[get_weather(**{'city': 1})]",
        "[get_weather(city=1, city=2)]",
        "[get_weather(city=lambda: 1)]",
        f"{START}[1, 2]{END}",
        f"{START}print('hello'){END}",
        f"{START}[0x(a=1)]",
        START,
        "<|python_st",
        "[" + "x" * 257 + "()]",
    ],
)
def test_other_text_stays_content_unchanged(text: str) -> None:
    assert parse_all_ways("pythonic", text) == ParsedAnswer(text, [])


def test_a_call_is_emitted_when_complete() -> None:
    reader = parser("pythonic")
    assert reader.push('[get_weather(city="Paris"') == ("", [])
    assert reader.push("), oth") == (
        "",
        [ToolDelta(index=0, id="id0", name="get_weather"), ToolDelta(index=0, arguments=PARIS)],
    )
    assert reader.push("er(") == ("", [])
    assert reader.flush() == (", other(", [])


def test_a_list_that_ends_too_early_keeps_its_whole_calls() -> None:
    assert parse_all_ways("pythonic", f"[{WEATHER}, ") == ParsedAnswer("", [("get_weather", PARIS)])
    assert parse_all_ways("pythonic", f"[{WEATHER}, get_weather(") == ParsedAnswer(
        ", get_weather(", [("get_weather", PARIS)]
    )
    assert parse_all_ways("pythonic", f"[{WEATHER}]<|python") == ParsedAnswer("<|python", [("get_weather", PARIS)])


def test_without_parallel_calls_only_the_first_counts() -> None:
    assert parse_all_ways("pythonic", f"[{WEATHER}, other()]", parallel=False) == ParsedAnswer(
        "", [("get_weather", PARIS)]
    )
