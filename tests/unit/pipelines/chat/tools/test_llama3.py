"""Objects after `<|python_tag|>`, and answers that are an object."""

from __future__ import annotations

import pytest

from tests.unit.pipelines.chat.tools.parse_kit import ParsedAnswer, parse_all_ways

PARIS = '{"city": "Paris"}'
OFFERED = f'{{"name": "get_weather", "parameters": {PARIS}}}'
UNKNOWN = '{"name": "unknown", "parameters": {"x": 1}}'
TAG = "<|python_tag|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OFFERED, ParsedAnswer("", [("get_weather", PARIS)])),
        (f"\n {OFFERED}\n", ParsedAnswer("", [("get_weather", PARIS)])),
        (OFFERED.replace("parameters", "arguments"), ParsedAnswer("", [("get_weather", PARIS)])),
        ('{"name": "other"}', ParsedAnswer("", [("other", "{}")])),
        (f"{OFFERED}; {OFFERED}", ParsedAnswer("", [("get_weather", PARIS)] * 2)),
        (f"{OFFERED}\n{OFFERED};", ParsedAnswer("", [("get_weather", PARIS)] * 2)),
        (f"{OFFERED}{OFFERED}, {OFFERED}", ParsedAnswer("", [("get_weather", PARIS)] * 3)),
        (f"{OFFERED}\nThat is it.", ParsedAnswer("That is it.", [("get_weather", PARIS)])),
        (f"{OFFERED}; and so on", ParsedAnswer("; and so on", [("get_weather", PARIS)])),
        (f"{OFFERED}; {UNKNOWN}", ParsedAnswer("; " + UNKNOWN, [("get_weather", PARIS)])),
        (TAG + OFFERED, ParsedAnswer("", [("get_weather", PARIS)])),
        (TAG + UNKNOWN, ParsedAnswer("", [("unknown", '{"x": 1}')])),
        (f"{TAG}{UNKNOWN}; {UNKNOWN}", ParsedAnswer("", [("unknown", '{"x": 1}')] * 2)),
        (f"I look.\n{TAG} {OFFERED};{TAG}{OFFERED}", ParsedAnswer("I look.", [("get_weather", PARIS)] * 2)),
        (f"{OFFERED}{TAG}{UNKNOWN}", ParsedAnswer("", [("get_weather", PARIS), ("unknown", '{"x": 1}')])),
        (f"<|python_start|>{UNKNOWN}<|python_end|>\nSo.", ParsedAnswer("So.", [("unknown", '{"x": 1}')])),
        (f"<|python_start|>{UNKNOWN}<|python_end|>{UNKNOWN}", ParsedAnswer(UNKNOWN, [("unknown", '{"x": 1}')])),
    ],
)
def test_content_and_calls(text: str, expected: ParsedAnswer) -> None:
    assert parse_all_ways("llama3", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello {world}.",
        UNKNOWN,
        '{"name": "Bob", "age": 30, "parameters": {}}\n',
        '{"parameters": {"a": 1}, "name": "Bob"}',
        '{"city": "Paris"}',
        "{not json}",
        '{"name": "get_wea',
        f"The answer is {OFFERED}",
        f"[{OFFERED}]",
        f"{TAG}import os\nprint(os.name)",
        f'{TAG}brave_search.call(query="x")',
        f"{TAG}[{OFFERED}]",
        "<|python_ta",
        TAG,
        f"{TAG} {{",
    ],
)
def test_other_text_stays_content_unchanged(text: str) -> None:
    assert parse_all_ways("llama3", text) == ParsedAnswer(text, [])


def test_cut_arguments_stay_as_they_are() -> None:
    assert parse_all_ways("llama3", OFFERED[:-4]) == ParsedAnswer("", [("get_weather", PARIS[:-3])])


def test_whole_arguments_survive_a_bad_end() -> None:
    assert parse_all_ways("llama3", f"{OFFERED[:-1]} ]") == ParsedAnswer("]", [("get_weather", PARIS)])
    assert parse_all_ways("llama3", f"{OFFERED}<|pyth") == ParsedAnswer("<|pyth", [("get_weather", PARIS)])


def test_without_parallel_calls_only_the_first_counts() -> None:
    assert parse_all_ways("llama3", f"{OFFERED};{OFFERED}", parallel=False) == ParsedAnswer(
        "", [("get_weather", PARIS)]
    )
