"""A Python list of calls, told call by call."""

from __future__ import annotations

import pytest

from shoal.types import ToolDelta
from tests.unit.pipelines.chat.tools.heard import Heard, hear_all_ways, parser

WEATHER = 'get_weather(city="Paris")'
PARIS = '{"city": "Paris"}'
START, END = "<|python_start|>", "<|python_end|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"[{WEATHER}]", Heard("", [("get_weather", PARIS)])),
        (f"\n[ {WEATHER},\n {WEATHER} , ]\n", Heard("", [("get_weather", PARIS)] * 2)),
        ("[other()]", Heard("", [("other", "{}")])),
        (
            '[get_weather(city="Paris", unit=\'c\'), other(x=[1,2], y={"a": None})]',
            Heard(
                "", [("get_weather", '{"city": "Paris", "unit": "c"}'), ("other", '{"x": [1, 2], "y": {"a": null}}')]
            ),
        ),
        ("[other(a=')]', b=\"it's (\", c='\\'[')]", Heard("", [("other", '{"a": ")]", "b": "it\'s (", "c": "\'["}')])),
        (f"[{WEATHER}] So.", Heard("So.", [("get_weather", PARIS)])),
        (f"[{WEATHER}, unknown(a=1)]", Heard(", unknown(a=1)]", [("get_weather", PARIS)])),
        (f"{START}[unknown(a=1)]{END}", Heard("", [("unknown", '{"a": 1}')])),
        (f"I look.\n{START}[{WEATHER}]{END}\nSo.", Heard("I look.\nSo.", [("get_weather", PARIS)])),
        (f"{START}[{WEATHER}]", Heard("", [("get_weather", PARIS)])),
        (f"<|python_tag|>[{WEATHER}]", Heard("", [("get_weather", PARIS)])),
        (f"<|tool_call_start|>[{WEATHER}]<|tool_call_end|>So.", Heard("So.", [("get_weather", PARIS)])),
        (f"[{WEATHER}]{START}[a.b-c()]{END}", Heard("", [("get_weather", PARIS), ("a.b-c", "{}")])),
    ],
)
def test_content_and_calls(text: str, expected: Heard) -> None:
    assert hear_all_ways("pythonic", text) == expected


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
def test_what_is_no_call_is_content_to_the_character(text: str) -> None:
    assert hear_all_ways("pythonic", text) == Heard(text, [])


def test_a_call_is_told_when_it_is_whole() -> None:
    reader = parser("pythonic")
    assert reader.push('[get_weather(city="Paris"') == ("", [])
    assert reader.push("), oth") == (
        "",
        [ToolDelta(index=0, id="id0", name="get_weather"), ToolDelta(index=0, arguments=PARIS)],
    )
    assert reader.push("er(") == ("", [])
    assert reader.flush() == (", other(", [])


def test_a_list_that_ends_too_early_keeps_its_whole_calls() -> None:
    assert hear_all_ways("pythonic", f"[{WEATHER}, ") == Heard("", [("get_weather", PARIS)])
    assert hear_all_ways("pythonic", f"[{WEATHER}, get_weather(") == Heard(", get_weather(", [("get_weather", PARIS)])
    assert hear_all_ways("pythonic", f"[{WEATHER}]<|python") == Heard("<|python", [("get_weather", PARIS)])


def test_without_parallel_calls_only_the_first_counts() -> None:
    assert hear_all_ways("pythonic", f"[{WEATHER}, other()]", parallel=False) == Heard("", [("get_weather", PARIS)])
