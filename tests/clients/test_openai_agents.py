"""OpenAI's Agents SDK before a server that has only chat completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai.types.shared import Reasoning
from pydantic import BaseModel

from tests.clients.agent_kit import MODEL, Setup, serve_agents
from tests.fakes.agent_model import Call

CALLS = [Call("add", {"a": 1, "b": 2}), Call("add", {"a": 3, "b": 3})]


class Seen(BaseModel):
    """A typed answer."""

    text: str


@pytest.fixture(autouse=True)
def untraced() -> None:
    set_tracing_disabled(True)


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return f"the sum is {a + b}"


def agent_of(setup: Setup, model: type[Any], **settings: Any) -> Agent[Any]:
    client = openai.AsyncOpenAI(base_url=setup.base_url, api_key="any")
    chosen = model(model=MODEL, openai_client=client)
    return Agent(
        name="adder",
        instructions="Add",
        model=chosen,
        tools=[function_tool(add)],
        model_settings=ModelSettings(**settings),
    )


@pytest.mark.parametrize("model", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent(tmp_path: Path, model: type[Any], streamed: bool) -> None:
    """Three steps; each request has the whole conversation."""
    async with serve_agents(tmp_path, CALLS) as setup:
        agent = agent_of(setup, model)
        if streamed:
            result: Any = Runner.run_streamed(agent, "Add")
            kinds = {event.type async for event in result.stream_events()}
            assert {"raw_response_event", "run_item_stream_event"} <= kinds
        else:
            result = await Runner.run(agent, "Add")
        assert result.final_output == "I saw: the sum is 3 | the sum is 6"


async def test_an_agent_that_goes_on_from_responses(tmp_path: Path) -> None:
    """Each request has only what is new, and names the response before, over several runs; the reasoning comes as a
    summary, and back to the model."""
    async with serve_agents(tmp_path, CALLS, "let me see") as setup:
        agent = agent_of(setup, OpenAIResponsesModel, reasoning=Reasoning(effort="low", summary="auto"))
        first: Any = await Runner.run(agent, "Add", auto_previous_response_id=True)
        again: Any = await Runner.run(agent, "Again", previous_response_id=first.last_response_id)
    assert first.final_output == again.final_output == "I saw: the sum is 3 | the sum is 6"
    roles = [message["role"] for message in setup.conversation]
    assert roles == ["system", "user", *["assistant", "tool"] * 2, "assistant", "user"]
    assert [message.get("reasoning_content") for message in setup.conversation[2:5:2]] == ["let me see"] * 2
    assert setup.model.bodies[-1]["reasoning_effort"] == "low"
    summaries = [item.raw_item.summary[0].text for item in first.new_items if item.type == "reasoning_item"]
    assert summaries == ["let me see"] * 2


async def test_a_typed_answer(tmp_path: Path) -> None:
    """The schema reaches the model's server by its own name, and strict."""
    async with serve_agents(tmp_path, ()) as setup:
        agent = agent_of(setup, OpenAIResponsesModel)
        agent.output_type = Seen
        result = await Runner.run(agent, "Look")
    assert result.final_output == Seen(text="I saw nothing")
    form = setup.model.bodies[-1]["response_format"]["json_schema"]
    assert (form["name"], form["strict"]) == ("final_output", True)
    assert form["schema"]["required"] == ["text"]
