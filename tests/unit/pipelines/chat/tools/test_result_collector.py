"""Content, calls and the whitespace between them."""

from __future__ import annotations

import itertools

import pytest

from shoal.pipelines.chat.tools.result_collector import DeltaCollector
from shoal.types import ToolDelta


def outlet(*, parallel: bool = True) -> DeltaCollector:
    ids = itertools.count()
    return DeltaCollector(parallel=parallel, new_id=lambda: f"id{next(ids)}")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([" a ", " b "], " a  b "),
        ([" ", "\n"], " \n"),
        ([None], ""),
        ([" \n", None, "\n"], ""),
        (["a\n", None, "\n"], "a"),
        (["a\n", None, " \n b"], "a \n b"),
        (["a\n", None, "b"], "a\nb"),
        (["a", None, "b"], "ab"),
        (["a\n", None, " ", None, "\t", "b"], "a\tb"),
        ([" ", None, " ", "a"], "a"),
        (["a", None, "b ", " ", " c"], "ab   c"),
    ],
)
def test_blanks_beside_calls_are_dropped_unless_content_stands_on_both_sides(
    steps: list[str | None], expected: str
) -> None:
    """None is a call."""
    out = outlet()
    for step in steps:
        if step is None:
            out.begin("f")
        else:
            out.content(step)
    out.finish()
    content, deltas = out.take()
    assert content == expected
    assert len(deltas) == steps.count(None) == out.calls


def test_fragments_of_one_call_are_joined_until_they_are_taken() -> None:
    out = outlet()
    out.begin("f")
    out.arguments('{"a"')
    out.arguments("")
    out.arguments(": 1}")
    out.begin("g")
    out.arguments("{")
    assert out.take() == (
        "",
        [
            ToolDelta(index=0, id="id0", name="f"),
            ToolDelta(index=0, arguments='{"a": 1}'),
            ToolDelta(index=1, id="id1", name="g"),
            ToolDelta(index=1, arguments="{"),
        ],
    )
    out.arguments("}")
    assert out.take() == ("", [ToolDelta(index=1, arguments="}")])
    assert out.take() == ("", [])


def test_unfinished_calls_become_content_or_are_dropped() -> None:
    out = outlet()
    out.hold_back("<tool")
    out.hold_back("_call>")
    assert out.pending_size == 11
    assert out.take() == ("", [])
    out.give_back()
    assert out.pending_size == 0
    assert out.take() == ("<tool_call>", [])
    out.hold_back("<tool_call>")
    out.begin("f")
    out.give_back()
    out.hold_back("</tool_call>")
    out.drop()
    out.give_back()
    assert out.take() == ("", [ToolDelta(index=0, id="id0", name="f")])


def test_only_the_first_call_is_emitted_when_calls_are_not_parallel() -> None:
    out = outlet(parallel=False)
    out.begin("f")
    out.arguments("{}")
    out.begin("g")
    out.arguments('{"b": 1}')
    out.begin("h")
    assert out.take() == ("", [ToolDelta(index=0, id="id0", name="f"), ToolDelta(index=0, arguments="{}")])
    assert out.calls == 1
