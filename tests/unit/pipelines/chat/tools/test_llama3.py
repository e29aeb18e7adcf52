"""Objects behind `<|python_tag|>`, and answers that are an object."""

from __future__ import annotations

import pytest

from tests.unit.pipelines.chat.tools.heard import Heard, hear_all_ways

PARIS = '{"city": "Paris"}'
OFFERED = f'{{"name": "get_weather", "parameters": {PARIS}}}'
UNKNOWN = '{"name": "unknown", "parameters": {"x": 1}}'
TAG = "<|python_tag|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OFFERED, Heard("", [("get_weather", PARIS)])),
        (f"\n {OFFERED}\n", Heard("", [("get_weather", PARIS)])),
        (OFFERED.replace("parameters", "arguments"), Heard("", [("get_weather", PARIS)])),
        ('{"name": "other"}', Heard("", [("other", "{}")])),
        (f"{OFFERED}; {OFFERED}", Heard("", [("get_weather", PARIS)] * 2)),
        (f"{OFFERED}\n{OFFERED};", Heard("", [("get_weather", PARIS)] * 2)),
        (f"{OFFERED}{OFFERED}, {OFFERED}", Heard("", [("get_weather", PARIS)] * 3)),
        (f"{OFFERED}\nThat is it.", Heard("That is it.", [("get_weather", PARIS)])),
        (f"{OFFERED}; and so on", Heard("; and so on", [("get_weather", PARIS)])),
        (f"{OFFERED}; {UNKNOWN}", Heard("; " + UNKNOWN, [("get_weather", PARIS)])),
        (TAG + OFFERED, Heard("", [("get_weather", PARIS)])),
        (TAG + UNKNOWN, Heard("", [("unknown", '{"x": 1}')])),
        (f"{TAG}{UNKNOWN}; {UNKNOWN}", Heard("", [("unknown", '{"x": 1}')] * 2)),
        (f"I look.\n{TAG} {OFFERED};{TAG}{OFFERED}", Heard("I look.", [("get_weather", PARIS)] * 2)),
        (f"{OFFERED}{TAG}{UNKNOWN}", Heard("", [("get_weather", PARIS), ("unknown", '{"x": 1}')])),
        (f"<|python_start|>{UNKNOWN}<|python_end|>\nSo.", Heard("So.", [("unknown", '{"x": 1}')])),
        (f"<|python_start|>{UNKNOWN}<|python_end|>{UNKNOWN}", Heard(UNKNOWN, [("unknown", '{"x": 1}')])),
    ],
)
def test_content_and_calls(text: str, expected: Heard) -> None:
    assert hear_all_ways("llama3", text) == expected


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
def test_what_is_no_call_is_content_to_the_character(text: str) -> None:
    assert hear_all_ways("llama3", text) == Heard(text, [])


def test_cut_arguments_stay_as_they_are() -> None:
    assert hear_all_ways("llama3", OFFERED[:-4]) == Heard("", [("get_weather", PARIS[:-3])])


def test_whole_arguments_survive_a_bad_end() -> None:
    assert hear_all_ways("llama3", f"{OFFERED[:-1]} ]") == Heard("]", [("get_weather", PARIS)])
    assert hear_all_ways("llama3", f"{OFFERED}<|pyth") == Heard("<|pyth", [("get_weather", PARIS)])


def test_without_parallel_calls_only_the_first_counts() -> None:
    assert hear_all_ways("llama3", f"{OFFERED};{OFFERED}", parallel=False) == Heard("", [("get_weather", PARIS)])
