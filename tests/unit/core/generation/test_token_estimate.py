"""Estimates of tokens without a tokenizer."""

from __future__ import annotations

import pytest

from shoal.core.generation.token_estimate import TOKENS_PER_IMAGE, estimate_tokens
from shoal.types import Generate, Message, Part, Tool, ToolCall


@pytest.mark.parametrize(
    ("task", "tokens"),
    [
        (Generate(model="m", prompts=["x" * 40, [1, 2, 3]]), 13),
        (Generate(model="m", messages=[Message(role="user", content="")]), 1),
        (Generate(model="m", messages=[Message(role="user", content="\u6771" * 4)]), 3),
        (Generate(model="m", messages=[Message(role="assistant", reasoning="x" * 8)]), 2),
        (Generate(model="m", messages=[Message(role="assistant", tool_calls=[ToolCall(id="", name="abcd")])]), 1),
        (
            Generate(
                model="m",
                messages=[Message(role="user", content=[Part(text="x" * 8), Part(type="image", url="data:" * 999)])],
            ),
            2 + TOKENS_PER_IMAGE,
        ),
    ],
)
def test_an_estimate(task: Generate, tokens: int) -> None:
    """Four bytes a token; an image counts the same, however it is sent."""
    assert estimate_tokens(task) == tokens


def test_tools_count() -> None:
    said = [Message(role="user", content="x" * 400)]
    tool = Tool(name="add", description="y" * 400, parameters={"type": "object"})
    more = estimate_tokens(Generate(model="m", messages=said, tools=[tool]))
    assert 200 < more < 240
