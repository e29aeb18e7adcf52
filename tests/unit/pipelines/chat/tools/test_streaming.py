"""Properties of every parser: results do not depend on cuts, no text is lost, work is linear in the text."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.pipelines.chat.tools import ParserKind, call_object
from shoal.pipelines.chat.tools.reader import BLANK_RUN, Reader, begins, overlap
from shoal.pipelines.chat.tools.result_collector import MAX_BEGUN
from tests.unit.pipelines.chat.tools.parse_kit import ParsedAnswer, cuts, parse, parser

KINDS: tuple[ParserKind, ...] = get_args(ParserKind)
MARKUP = [
    "<tool_call>",
    "</tool_call>",
    "<function=other>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|tool_call|>",
    "<|/tool_call|>",
    "functools",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "```json",
    "<start_function_call>",
    "<end_function_call>",
    "<|tool_call>",
    "<tool_call|>",
    "call:other{",
    "<escape>",
    '<|"|>',
    '{"name": "other", "arguments": {"a": "\\"}"}}',
    '{"name": "other", "arguments": {',
    '{"parameters": {}, "name": "get_weather"}',
    "get_weather(city='Paris', days=3)",
    "other(",
    "other",
    '"name": ',
    '"unknown"',
    "\\",
    *"<>[](){},;:\"' \n|=a1é",
]
PARTS = st.lists(st.sampled_from(MARKUP), max_size=16).map("".join)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), VALUES, max_size=4)
PROSE = st.sampled_from(["", "Let me see. ", "\n\n", "Größe 🌊: 5 < 6\n", "Say hello.\n"])


@pytest.mark.parametrize("kind", KINDS)
@given(text=PARTS, parallel=st.booleans(), data=st.data())
def test_any_text_is_parsed_alike_however_it_is_split(
    kind: ParserKind, text: str, parallel: bool, data: st.DataObject
) -> None:
    whole = parse(kind, [text], parallel=parallel)
    assert parse(kind, list(text), parallel=parallel) == whole
    assert parse(kind, data.draw(cuts(text)), parallel=parallel) == whole
    assert parallel or len(whole.calls) <= 1


@pytest.mark.parametrize("kind", KINDS)
@given(text=PARTS)
def test_an_answer_without_calls_is_content_to_the_character(kind: ParserKind, text: str) -> None:
    parsed = parse(kind, list(text))
    if not parsed.calls:
        assert parsed.content == text


def written(kind: ParserKind, form: int, arguments: dict[str, Any], random_indent: int | None) -> tuple[str, str]:
    """A call as the model writes it, and its expected arguments."""
    text = json.dumps(arguments, indent=random_indent, ensure_ascii=bool(form % 2))
    key = "parameters" if kind == "llama3" else "arguments"
    call = f'{{"name": "other", "{key}": {text}}}'
    if kind == "hermes":
        return f"<tool_call>\n{call}\n</tool_call>", text
    if kind == "llama3":
        return f"<|python_tag|>{call}", text
    if kind == "mistral":
        forms = [f"[TOOL_CALLS] [{call}]", f"[TOOL_CALLS]other[ARGS]{text}", f"[TOOL_CALLS]other{text}"]
        return forms[form % 3], text
    if kind == "phi4":
        forms = [f"<|tool_call|>[{call}]<|/tool_call|>", f"<|tool_call|>{call}<|/tool_call|>", f"functools[{call}]"]
        return forms[form % 3], text
    if kind == "deepseek":
        inner = [
            f"other<\uff5ctool\u2581sep\uff5c>{text}",
            f"function<\uff5ctool\u2581sep\uff5c>other\n```json\n{text}\n```",
        ][form % 2]
        call = f"<\uff5ctool\u2581call\u2581begin\uff5c>{inner}<\uff5ctool\u2581call\u2581end\uff5c>"
        return f"<\uff5ctool\u2581calls\u2581begin\uff5c>{call}<\uff5ctool\u2581calls\u2581end\uff5c>", text
    if kind == "gemma":
        opened, quote, closed = [
            ("<start_function_call>", "<escape>", "<end_function_call>"),
            ("<|tool_call>", '<|"|>', "<tool_call|>"),
        ][form % 2]
        members = ",".join(f"{name}:{as_gemma(value, quote)}" for name, value in arguments.items())
        return f"{opened}call:other{{{members}}}{closed}", text
    call = f"other({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
    return f"<|python_start|>[{call}]<|python_end|>", text


def as_gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{quote}{key}{quote}:{as_gemma(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(as_gemma(each, quote) for each in value) + "]"
    return json.dumps(value)


@pytest.mark.parametrize("kind", KINDS)
@given(
    calls=st.lists(ARGUMENTS, min_size=1, max_size=3),
    before=PROSE,
    after=PROSE,
    form=st.integers(0, 5),
    indent=st.sampled_from([None, 2]),
    data=st.data(),
)
def test_calls_come_through(
    kind: ParserKind,
    calls: list[dict[str, Any]],
    before: str,
    after: str,
    form: int,
    indent: int | None,
    data: st.DataObject,
) -> None:
    pairs = [written(kind, form, arguments, indent) for arguments in calls]
    text = before + "\n".join(call for call, _ in pairs) + after
    parsed = parse(kind, data.draw(cuts(text)))
    assert [name for name, _ in parsed.calls] == ["other"] * len(calls)
    assert [json.loads(arguments) for _, arguments in parsed.calls] == calls
    if kind not in ("pythonic", "gemma"):
        assert [arguments for _, arguments in parsed.calls] == [expected for _, expected in pairs]
    assert re.sub(r"\s+", "", parsed.content) == re.sub(r"\s+", "", before + after)


HOSTILE = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000, 1),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 100_000, 1),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 100_000, 1),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "' + "\\" * 100_001, 1),
    ("hermes", '<tool_call>{"name": "' + "x" * 100_000, 0),
    ("hermes", "<tool_call>" * 10_000, 0),
    ("hermes", "<tool_call" * 10_000, 0),
    ("hermes", "<tool_call>" + " " * 100_000, 0),
    ("hermes", '<tool_call>{"name": "f"}' * 5_000, 5_000),
    ("hermes", "<tool_call><function=" + "x" * 100_000, 0),
    ("hermes", "<tool_call><function=f><parameter=a>" + "</parameter" * 10_000, 0),
    ("hermes", '<tool_call>{"function": ' * 5_000, 0),
    ("hermes", '<tool_call>{"function": ' + '{"function": ' * 10_000, 0),
    ("llama3", "{" * 100_000, 0),
    ("llama3", '{"a": ' + "[" * 100_000, 0),
    ("llama3", " " * 100_000 + "x", 0),
    ("llama3", '{"name": "other"}' + ";" * 100_000, 1),
    ("mistral", "[TOOL_CALLS]" + "[" * 100_000, 0),
    ("mistral", "[TOOL_CALLS]" * 10_000, 0),
    ("mistral", "[TOOL_CALLS]" + "a" * 100_000, 0),
    ("mistral", "[TOOL_CALLS]f" + "{" * 100_000, 1),
    ("mistral", "[TOOL_CALLS]f" + "[CALL_ID]a" * 10_000, 0),
    ("pythonic", "[" * 100_000, 0),
    ("pythonic", "[other(a=" + "[" * 100_000 + "]" * 100_000 + ")]", 0),
    ("pythonic", "[other(a=" + "-" * 100_000 + "1)]", 0),
    ("pythonic", "[other(a='" + "x" * 100_000, 0),
    ("pythonic", "[other(a=" + "9" * 100_000 + ")]", 1),
    ("phi4", "<|tool_call|>" * 10_000, 0),
    ("phi4", "functools" + "[" * 100_000, 0),
    ("deepseek", "<\uff5ctool\u2581call\u2581begin\uff5c>" * 10_000, 0),
    ("deepseek", "<\uff5ctool\u2581call\u2581begin\uff5c>f<\uff5ctool\u2581sep\uff5c>" + "{" * 100_000, 1),
    ("deepseek", "<\uff5ctool\u2581call\u2581begin\uff5c>f<\uff5ctool\u2581sep\uff5c>{}" + "```" * 10_000, 1),
    ("gemma", "<|tool_call>call:f" + "{" * 100_000, 0),
    ("gemma", "<|tool_call>call:f{" + "<escape>" * 10_001, 0),
    ("gemma", "<|tool_call>call:f{a:" + "[" * 100_000 + "]" * 100_000 + "}", 0),
    ("gemma", "<|tool_call>call:f{}" * 10_000, 10_000),
    ("pythonic", "[" + "other()," * 10_000 + "]", 10_000),
]


@pytest.mark.parametrize(("kind", "text", "calls"), HOSTILE)
def test_hostile_answers_are_read_and_nothing_is_lost(kind: ParserKind, text: str, calls: int) -> None:
    parsed = parse(kind, [text])
    assert len(parsed.calls) == calls
    if not calls:
        assert parsed.content == text
    sizes = random.Random(1)
    fragments, at = [], 0
    while at < len(text):
        size = sizes.randint(1, 60)
        fragments.append(text[at : at + size])
        at += size
    assert parse(kind, fragments) == parsed


class Counting:
    """A pattern that counts the characters it reads."""

    def __init__(self, pattern: re.Pattern[str], counts: list[int]) -> None:
        self._pattern = pattern
        self._counts = counts

    def search(self, text: str, at: int) -> re.Match[str] | None:
        match = self._pattern.search(text, at)
        self._counts[0] += (match.end() if match else len(text)) - at
        return match

    def match(self, text: str, at: int) -> re.Match[str] | None:
        match = self._pattern.match(text, at)
        self._counts[0] += (match.end() if match else at) - at
        return match


LONG: dict[str, Callable[[int], str]] = {
    "hermes": lambda n: 'See. <tool_call>{"name": "f", "arguments": {"a": "' + "x{\\n} " * n + '"}}</tool_call> Bye.',
    "hermes, end tags": lambda n: "<tool_call><function=f><parameter=a>\nx" + "</parameter> x" * n + "</parameter>",
    "hermes, blanks": lambda n: "<tool_call><function=f><parameter=a>\nx</parameter>" + " " * n + "</function>",
    "hermes, tagged": lambda n: "<tool_call><function=f><parameter=a>" + "x</par> " * n + "</parameter></function>",
    "llama3": lambda n: '<|python_tag|>{"name": "f", "parameters": {"a": [' + '{"b": 1}, ' * n + "]}}; ",
    "mistral": lambda n: "[TOOL_CALLS]f[ARGS]{" + '"a": [[]], ' * n + "} and so on",
    "phi4": lambda n: '<|tool_call|>[{"name": "f", "arguments": {"a": [' + '{"b": 1}, ' * n + "]}}]<|/tool_call|>",
    "deepseek": lambda n: (
        "<\uff5ctool\u2581call\u2581begin\uff5c>f<\uff5ctool\u2581sep\uff5c>{" + '"a": [[]], ' * n + "} and so on"
    ),
    "gemma": lambda n: "<|tool_call>call:f{a:<escape>" + "x<esc{} " * n + "<escape>" + ",b:[1,2]" * n + "} and so on",
    "pythonic": lambda n: "[get_weather(city='" + "x(\\n) " * n + "')] and so on",
}


def work(form: str, count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """(characters of the answer, characters read, Python functions called), read 3 characters at a time."""
    counts = [0]
    text = LONG[form](count) + "plain words < [ " * count
    with monkeypatch.context() as patch:
        for table in (call_object._BRACKET_OR_QUOTE, call_object._END_OR_ESCAPE):
            for key, pattern in list(table.items()):
                patch.setitem(table, key, Counting(pattern, counts))
        patch.setattr(call_object, "_SCALAR_END", Counting(call_object._SCALAR_END, counts))
        patch.setattr(call_object, "BLANK_RUN", Counting(BLANK_RUN, counts))
        reader = parser(next(kind for kind in KINDS if form.startswith(kind)))
        assert isinstance(reader, Reader)
        patch.setattr(reader, "_pattern", Counting(reader._pattern, counts))
        calls = 0
        peak = 0

        def profile(frame: FrameType, event: str, arg: object) -> None:
            nonlocal calls
            calls += event == "call"

        previous = sys.getprofile()
        sys.setprofile(profile)
        try:
            for at in range(0, len(text), 3):
                reader.push(text[at : at + 3])
                peak = max(peak, len(reader._pending))
            reader.flush()
        finally:
            sys.setprofile(previous)
    assert peak < 20
    return len(text), counts[0], calls


@pytest.mark.parametrize("form", LONG)
def test_work_grows_with_the_length_and_not_faster(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short, looked_short, called_short = work(form, 300, monkeypatch)
    long, looked_long, called_long = work(form, 1200, monkeypatch)
    assert looked_long < 12 * long
    assert looked_long / looked_short < 1.1 * long / short
    assert called_long / called_short < 1.1 * long / short


@pytest.mark.parametrize(
    ("kind", "start", "filler"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "', "x"),
        ("hermes", "<tool_call>", " "),
        ("hermes", "<tool_call><function=f><parameter=a>", "x"),
        ("pythonic", "[other(a='", "x"),
        ("mistral", "[TOOL_CALLS]", "x"),
        ("llama3", "", " "),
        ("phi4", "functools", " "),
        ("deepseek", "<\uff5ctool\u2581call\u2581begin\uff5c>", "x"),
        ("gemma", "<|tool_call>call:f{a:<escape>", "x"),
    ],
)
def test_text_undecided_for_too_long_is_content(kind: ParserKind, start: str, filler: str) -> None:
    reader = parser(kind)
    text = filler * (MAX_BEGUN - len(start) - 1)
    assert reader.push(start + text) == ("", [])
    content, deltas = reader.push(filler + "END")
    assert deltas == []
    assert content + reader.flush()[0] == start + text + filler + "END"
    assert content.endswith("END")


def test_the_limit_falls_on_the_same_character_always(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '<tool_call>{"arguments": {"a": "' + "x" * 40 + '"}, "name": "f"}</tool_call> <tool_call> {"name": "g"}'
    for limit in range(20, 100):
        monkeypatch.setattr("shoal.pipelines.chat.tools.reader.MAX_BEGUN", limit)
        whole = parse("hermes", [text])
        for size in (1, 2, 3, 5, 11):
            assert parse("hermes", [text[at : at + size] for at in range(0, len(text), size)]) == whole, (limit, size)


def test_the_arguments_that_pass_through_have_no_limit() -> None:
    arguments = '{"a": "' + "x" * (MAX_BEGUN + 5) + '"}'
    parsed = parse("hermes", [f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'])
    assert parsed == ParsedAnswer("", [("f", arguments)])


def test_marks_at_the_end_of_a_text() -> None:
    assert overlap("abc<to", 0, ("<tool>", "<x>")) == 3
    assert overlap("abc<to", 4, ("<tool>", "<x>")) == 0
    assert overlap("abc<tool>", 0, ("<tool>",)) == 0
    assert overlap("", 0, ("<tool>",)) == 0
    assert begins("ab<x>c", 2, ("<tool>", "<x>")) == "<x>"
    assert begins("ab<", 2, ("<tool>", "<x>")) is None
    assert begins("ab<xy", 2, ("<tool>", "<x>")) == ""
    assert begins("ab<xyzxyz", 2, ("<tool>", "<x>")) == ""
