"""Agent frameworks that require tool calls of Shoal's own engine: its model writes noise, so that only the constraint
makes valid calls of it, and it never comes to an end by itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import openai
import pytest
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, Field
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.agent_kit import install, run
from tests.integration.llm_kit import running
from tests.integration.server_kit import Server

TINY = Path(__file__).parents[1] / "fixtures" / "tiny_llama_ir"
STEPS = 3
Digit = Annotated[int, Field(ge=0, le=9)]
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a server with the tiny model."""
    with running(tmp_path_factory.mktemp("engine"), f"tiny=file:{TINY}") as server:
        yield address_of(server)


def address_of(server: Server) -> str:
    return f"{server.base_url}/v1"


class Sum(BaseModel):
    """The result of an agent: Pydantic AI asks for it by a required call of an output tool."""

    a: Digit
    b: Digit


@pytest.mark.parametrize("model", [OpenAIChatModel, PydanticResponsesModel])
@pytest.mark.parametrize("streamed", [False, True])
async def test_pydantic_ai(engine: str, model: type[Any], streamed: bool) -> None:
    """Its output tool is required, so that the first answer is a valid result."""
    provider = OpenAIProvider(base_url=engine, api_key="any")
    agent = PydanticAgent(model("tiny", provider=provider), output_type=Sum, retries=0)
    settings: Any = {"max_tokens": 200, "temperature": 1.5}
    for seed in range(3):
        if streamed:
            async with agent.run_stream("Add 1 and 2", model_settings={**settings, "seed": seed}) as stream:
                made = await stream.get_output()
        else:
            made = (await agent.run("Add 1 and 2", model_settings={**settings, "seed": seed})).output
        assert isinstance(made, Sum)


@pytest.mark.parametrize("model", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
@pytest.mark.parametrize("choice", ["required", "add"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_agents(engine: str, model: type[Any], choice: str, streamed: bool) -> None:
    """A call in each turn, until the limit; the results go back to the model."""
    set_tracing_disabled(True)
    seen: list[tuple[int, int]] = []

    def add(a: Digit, b: Digit) -> str:
        """Add two digits."""
        seen.append((a, b))
        return f"the sum is {a + b}"

    client = openai.AsyncOpenAI(base_url=engine, api_key="any", max_retries=0)
    settings = ModelSettings(tool_choice=choice, parallel_tool_calls=False, max_tokens=200, temperature=1.5)
    agent: Agent[Any] = Agent(
        name="adder",
        model=model(model="tiny", openai_client=client),
        tools=[function_tool(add)],
        model_settings=settings,
        reset_tool_choice=False,
    )
    with pytest.raises(MaxTurnsExceeded):
        if streamed:
            result = Runner.run_streamed(agent, "Add 1 and 2", max_turns=STEPS)
            async for _ in result.stream_events():
                pass
        else:
            await Runner.run(agent, "Add 1 and 2", max_turns=STEPS)
    assert len(seen) == STEPS
    assert all(0 <= each <= 9 for pair in seen for each in pair)


@needs_npm
@pytest.mark.parametrize("provider", ["responses", "chat", "compatible"])
async def test_ai_sdk(engine: str, tmp_path: Path, provider: str) -> None:
    """Its schema checks each call before the tool runs."""
    agents = install()
    output = await run(["node", str(agents / "tool_choice.mjs"), engine, "tiny", provider, str(STEPS)], tmp_path)
    made = json.loads(output.splitlines()[-1])
    for steps in (made["whole"], made["streamed"]):
        assert [step["reason"] for step in steps] == ["tool-calls"] * STEPS
        for step in steps:
            assert step["inputs"]
            assert step["outputs"] == [each["a"] + each["b"] for each in step["inputs"]]
