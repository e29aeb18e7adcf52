"""Codex, OpenCode and the Vercel AI SDK before a server that has only chat completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agent_kit import KNOWN, install, run, run_codex, run_opencode, serve_agents
from tests.fakes.agent_model import Call

ADD = Call("add", {"a": 1, "b": 2})
PATCH = '*** Begin Patch\n*** Add File: hello.txt\n+hi "there" é\n*** End Patch\n'


@pytest.fixture(scope="session")
def agents() -> Path:
    return install()


def completed(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the completed items of this type."""
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in items if item["type"] == kind]


async def test_codex_calls_a_command_and_an_mcp_tool(agents: Path, tmp_path: Path) -> None:
    """Its default tools and those of a namespace; it shows the model's reasoning, and sends it back."""
    calls = [Call("exec_command", {"cmd": "echo from-the-shell"}), ADD]
    async with serve_agents(tmp_path / "server", calls, "let me see") as setup:
        events = await run_codex(agents, setup, tmp_path / "home", "Do it")
    (command,) = completed(events, "command_execution")
    assert (command["aggregated_output"], command["exit_code"]) == ("from-the-shell\n", 0)
    (called,) = completed(events, "mcp_tool_call")
    assert (called["server"], called["tool"], called["status"]) == ("sums", "add", "completed")
    assert [each["text"] for each in completed(events, "reasoning")] == ["let me see"] * 2
    (said,) = completed(events, "agent_message")
    assert "from-the-shell" in said["text"]
    assert "the sum is 3" in said["text"]
    turns = [message for message in setup.conversation if message["role"] == "assistant"]
    assert [turn["reasoning_content"] for turn in turns] == ["let me see"] * 2
    assert turns[1]["tool_calls"][0]["function"]["name"] == "mcp__sums__add"


async def test_codex_applies_a_patch(agents: Path, tmp_path: Path) -> None:
    """`apply_patch`, a custom tool whose input is a text."""
    async with serve_agents(tmp_path / "server", [Call("apply_patch", {"input": PATCH})]) as setup:
        events = await run_codex(agents, setup, tmp_path / "home", "Write a file", KNOWN)
    assert (tmp_path / "home" / "hello.txt").read_text() == 'hi "there" é\n'
    assert [each["status"] for each in completed(events, "file_change")] == ["completed"]
    turn = next(message for message in setup.conversation if message["role"] == "assistant")
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"input": PATCH}


async def test_codex_searches_for_a_tool(agents: Path, tmp_path: Path) -> None:
    """`tool_search`, which Codex runs itself; a tool that it has found can be called."""
    calls = [Call("tool_search", {"query": "add numbers"}), ADD]
    async with serve_agents(tmp_path / "server", calls) as setup:
        events = await run_codex(agents, setup, tmp_path / "home", "Add", KNOWN)
    (called,) = completed(events, "mcp_tool_call")
    assert (called["tool"], called["status"]) == ("add", "completed")


@pytest.mark.parametrize("provider", ["@ai-sdk/openai", "@ai-sdk/openai-compatible"])
async def test_opencode(agents: Path, tmp_path: Path, provider: str) -> None:
    """Two steps, over responses and over chat completions."""
    call = Call("bash", {"command": "echo from-the-shell", "description": "say"})
    async with serve_agents(tmp_path / "server", [call]) as setup:
        events = await run_opencode(agents, setup, tmp_path / "home", provider, "Run it")
    parts = [event["part"] for event in events if "part" in event]
    assert [part["state"]["status"] for part in parts if part["type"] == "tool"] == ["completed"]
    assert [part["text"].strip() for part in parts if part["type"] == "text"] == ["I saw: from-the-shell"]


@pytest.mark.parametrize(
    ("provider", "reasoning"),
    [("default", "let me see" * 2), ("responses", "let me see" * 2), ("chat", ""), ("compatible", "let me see" * 2)],
)
@pytest.mark.parametrize("store", ["on", "off"])
async def test_ai_sdk(agents: Path, tmp_path: Path, provider: str, reasoning: str, store: str) -> None:
    """Three steps, whole and streamed. By default it refers to the items of the steps before, which Shoal stores."""
    calls = [ADD, Call("add", {"a": 3, "b": 3})]
    async with serve_agents(tmp_path / "server", calls, "let me see") as setup:
        command = ["node", str(agents / "ai_sdk.mjs"), setup.base_url, "talker", provider, store]
        answer = json.loads((await run(command, tmp_path)).splitlines()[-1])
    text = "I saw: the sum is 3 | the sum is 6"
    assert (answer["text"], answer["streamed"], answer["steps"]) == (text, text, 3)
    assert answer["reasoning"] == reasoning
    turns = [message for message in setup.conversation if message["role"] == "assistant"]
    assert [len(turn["tool_calls"]) for turn in turns] == [1, 1]
    assert "".join(turn.get("reasoning_content") or "" for turn in turns) == reasoning
