"""The client's view of an answer that a tool parser reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from hypothesis import strategies as st

from shoal.pipelines.chat.tools import ParserKind, ToolParser, tool_parser
from shoal.types import Tool, ToolDelta

TOOLS = [
    Tool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": ["boolean", "null"]},
                "unit": {"type": ["string", "null"]},
                "place": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                "count": {"$ref": "#/$defs/count"},
                "circle": {"$ref": "#/$defs/circle"},
                "loose": {},
            },
            "$defs": {"count": {"type": "integer"}, "circle": {"$ref": "#/$defs/circle"}},
        },
    ),
    Tool(name="other"),
    Tool(name="odd", parameters={"properties": "?"}),
]


class ParsedAnswer(NamedTuple):
    """The content, and (name, arguments) of each call."""

    content: str
    calls: list[tuple[str, str]]


def parser(kind: ParserKind, *, parallel: bool = True) -> ToolParser:
    ids = itertools.count()
    return tool_parser(kind, TOOLS, parallel=parallel, new_id=lambda: f"id{next(ids)}")


def join(deltas: Iterable[ToolDelta]) -> list[tuple[str, str]]:
    """Join deltas into calls and check client invariants: indices ascend from 0, id and name come once and first, and
    no fragment is empty."""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if delta.index == len(calls):
            assert delta.id == f"id{delta.index}"
            assert delta.name
            assert delta.arguments == ""
            calls.append((delta.name, ""))
        else:
            assert delta.index == len(calls) - 1
            assert delta.id == delta.name == ""
            assert delta.arguments
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + delta.arguments)
    return calls


def parse(kind: ParserKind, fragments: Iterable[str], *, parallel: bool = True) -> ParsedAnswer:
    reader = parser(kind, parallel=parallel)
    results = [reader.push(fragment) for fragment in fragments]
    results.append(reader.flush())
    calls = join(delta for _, deltas in results for delta in deltas)
    assert reader.calls == len(calls)
    return ParsedAnswer("".join(content for content, _ in results), calls)


def parse_all_ways(kind: ParserKind, text: str, *, parallel: bool = True) -> ParsedAnswer:
    """Parse the answer whole and in fragments of 1 to 7 characters; all results must agree."""
    parsed = parse(kind, [text], parallel=parallel)
    for size in range(1, 8):
        cut = [text[at : at + size] for at in range(0, len(text), size)]
        assert parse(kind, cut, parallel=parallel) == parsed, size
    return parsed


def cuts(text: str) -> st.SearchStrategy[list[str]]:
    """Ways to cut a text into up to nine fragments."""
    return st.lists(st.integers(0, len(text)), max_size=8).map(
        lambda places: [text[a:b] for a, b in itertools.pairwise([0, *sorted(places), len(text)])]
    )
