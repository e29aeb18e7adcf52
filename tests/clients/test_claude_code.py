"""Anthropic's command line agent, Claude Code, and its TypeScript client, from npm.

The agent runs once as a user runs it, against a Shoal whose model is behind a server that speaks OpenAI's chat
completions alone. Its own traffic is turned off.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.openai_server import DONE, Exchange, FakeUpstream, answer, event, stream
from tests.integration.llm_kit import FAKE, MODEL, running

SOURCE = Path(__file__).parent / "anthropic_node"
LINE = "written through Shoal\n"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both packages."""
    folder = tmp_path_factory.mktemp("node")
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund"]
    subprocess.run(command, cwd=folder, check=True, timeout=600)
    return folder


def test_the_typescript_client(node: Path, tmp_path: Path) -> None:
    flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "think")
    with running(tmp_path, f"{FAKE}poison=poison", flags=flags) as server:
        command = ["node", str(node / "messages.mjs"), server.base_url, MODEL]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def tool_call(ident: str, name: str, **arguments: str) -> list[bytes]:
    """Return the events of a call, its arguments in pieces."""
    text = json.dumps(arguments)
    fragments: list[Any] = [{"id": ident, "type": "function", "function": {"name": name, "arguments": ""}}]
    fragments += [{"function": {"arguments": text[at : at + 7]}} for at in range(0, len(text), 7)]
    return [_delta(tool_calls=[{"index": 0, **fragment}]) for fragment in fragments] + [_delta("tool_calls")]


def _delta(reason: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]})


class Agent:
    """A model that writes a file, reads it, and says what is in it: one step for each result of a tool."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)
        self.bodies: list[Any] = []

    async def __call__(self, exchange: Exchange) -> None:
        body = exchange.request.json
        if not body["messages"]:  # how Shoal looks for the model
            await answer({"error": {"message": "no messages"}}, 400)(exchange)
            return
        self.bodies.append(body)
        usage = event({"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 20}})
        await stream(*self._step(body["messages"]), usage, DONE)(exchange)

    def _step(self, messages: Sequence[Any]) -> list[bytes]:
        results = [message["content"] for message in messages if message["role"] == "tool"]
        if not results:
            return [
                _delta(reasoning_content="First write it."),
                *tool_call("call_1", "Write", file_path=self._file, content=LINE),
            ]
        if len(results) == 1:
            return tool_call("call_2", "Read", file_path=self._file)
        return [_delta(content=f"It says: {LINE.strip()}" if LINE.strip() in results[1] else "?"), _delta("stop")]


async def test_an_agent_that_calls_tools(node: Path, tmp_path: Path) -> None:
    """It sends its tools, runs the calls, and prints the answer; its system messages reach the model."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    agent = Agent(tmp_path / "work" / "note.txt")
    async with FakeUpstream() as upstream:
        upstream.on("/chat/completions", agent)
        done = await asyncio.to_thread(_run_agent, node, tmp_path, f"{MODEL}=openai+{upstream.base}#up/model")
        paths = [request.path for request in upstream.requests if request.method == "POST"]
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["is_error"], result["result"]) == (False, f"It says: {LINE.strip()}")
    assert (tmp_path / "work" / "note.txt").read_text() == LINE
    assert paths.count("/v1/messages") == 1  # the server lacks it
    body = agent.bodies[-1]
    assert {"Write", "Read", "Bash"} <= {tool["function"]["name"] for tool in body["tools"]}
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert "chat_template_kwargs" not in body  # its defaults are those of every server


def _run_agent(node: Path, folder: Path, address: str) -> subprocess.CompletedProcess[str]:
    with running(folder / "server", address) as server:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ANTHROPIC", "CLAUDE"))},
            "HOME": str(folder / "home"),
            "ANTHROPIC_BASE_URL": server.base_url,
            "ANTHROPIC_API_KEY": "any",
            "ANTHROPIC_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
        }
        command = [str(node / "node_modules/.bin/claude"), "-p", "Write a note.", "--allowedTools", "Write,Read"]
        return subprocess.run(
            [*command, "--output-format", "json"],
            check=False,
            cwd=folder / "work",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
