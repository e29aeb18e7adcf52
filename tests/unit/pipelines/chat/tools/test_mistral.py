"""`[TOOL_CALLS]` with an array, an object, or a name and its arguments."""

from __future__ import annotations

import pytest

from tests.unit.pipelines.chat.tools.parse_kit import ParsedAnswer, parse_all_ways

PARIS = '{"city": "Paris"}'
ONE = f'{{"name": "get_weather", "arguments": {PARIS}, "id": "123456789"}}'
MARK = "[TOOL_CALLS]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{MARK} [{ONE}]", ParsedAnswer("", [("get_weather", PARIS)])),
        (f"{MARK}[{ONE}, {ONE}]\n", ParsedAnswer("", [("get_weather", PARIS)] * 2)),
        (f"{MARK} [ {ONE} ,\n{ONE} ] So.", ParsedAnswer("So.", [("get_weather", PARIS)] * 2)),
        (f"I look.{MARK}{ONE}", ParsedAnswer("I look.", [("get_weather", PARIS)])),
        (f"{MARK}get_weather[ARGS]{PARIS}", ParsedAnswer("", [("get_weather", PARIS)])),
        (f"{MARK}get_weather{PARIS}", ParsedAnswer("", [("get_weather", PARIS)])),
        (f"{MARK} get_weather [ARGS] {PARIS}", ParsedAnswer("", [("get_weather", PARIS)])),
        (f"{MARK}get_weather[CALL_ID]abcDEF123[ARGS]{PARIS}", ParsedAnswer("", [("get_weather", PARIS)])),
        (
            f"I look.\n{MARK}a.b-c[ARGS]{{}}{MARK}d{PARIS}\nSo.",
            ParsedAnswer("I look.\nSo.", [("a.b-c", "{}"), ("d", PARIS)]),
        ),
        (f'{MARK}f[ARGS]{{"a": "{MARK}[ARGS]}}"}}', ParsedAnswer("", [("f", f'{{"a": "{MARK}[ARGS]}}"}}')])),
        (f"{MARK}f{{}}{MARK}[{ONE}]", ParsedAnswer("", [("f", "{}"), ("get_weather", PARIS)])),
    ],
)
def test_content_and_calls(text: str, expected: ParsedAnswer) -> None:
    assert parse_all_ways("mistral", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "See [1] and [TOOL].",
        "[TOOL_CAL",
        MARK,
        f"{MARK} [",
        f"{MARK} []",
        f"{MARK} [1, 2]",
        f'{MARK} [{{"name": "f", "argu',
        f'{MARK} [{{"name": 5}}]',
        f"{MARK}f",
        f"{MARK}f[AR",
        f"{MARK}f[ARGS]",
        f"{MARK}f[ARGS][1]",
        f"{MARK}f[CALL_ID]abc",
        f"{MARK}f[CALL_ID]?",
        f"{MARK}f and so on",
        f"{MARK}!",
        f"{MARK}{'x' * 257}{{}}",
    ],
)
def test_other_text_stays_content_unchanged(text: str) -> None:
    assert parse_all_ways("mistral", text) == ParsedAnswer(text, [])


def test_cut_arguments_stay_as_they_are() -> None:
    assert parse_all_ways("mistral", f"{MARK}f[ARGS]{PARIS[:-1]}") == ParsedAnswer("", [("f", PARIS[:-1])])
    assert parse_all_ways("mistral", f"{MARK} [{ONE[:46]}") == ParsedAnswer("", [("get_weather", '{"city": ')])


def test_an_array_that_breaks_keeps_its_whole_calls() -> None:
    assert parse_all_ways("mistral", f"{MARK} [{ONE}, {{}}] x") == ParsedAnswer(", {}] x", [("get_weather", PARIS)])
    assert parse_all_ways("mistral", f"{MARK} [{ONE[:-20]}]") == ParsedAnswer("", [("get_weather", PARIS)])
    assert parse_all_ways("mistral", f"{MARK} [{ONE}, ") == ParsedAnswer("", [("get_weather", PARIS)])


def test_without_parallel_calls_only_the_first_counts() -> None:
    text = f"{MARK}[{ONE}, {ONE}]{MARK}f{{}}"
    assert parse_all_ways("mistral", text, parallel=False) == ParsedAnswer("", [("get_weather", PARIS)])
