"""Agents of npm, and Shoal before a server that has only chat completions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.fakes.agent_model import AgentModel, Call
from tests.fakes.openai_server import FakeUpstream
from tests.integration.llm_kit import running_beside
from tests.integration.server_kit import Server, environment

SOURCES = Path(__file__).parent / "agents"
CACHE = Path(__file__).parents[2] / "build" / "agents"
PATIENCE_S = 120.0
MODEL = "talker"
KNOWN = "gpt-5.5"
"""A name that Codex knows: it then offers `apply_patch` as a custom tool, and tools of MCP servers by a search."""


class Setup(NamedTuple):
    """A server of Shoal's, and the model behind it."""

    server: Server
    model: AgentModel

    @property
    def base_url(self) -> str:
        return f"{self.server.base_url}/v1"

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages of the last request that offered tools."""
        messages: list[dict[str, Any]] = [body for body in self.model.bodies if body.get("tools")][-1]["messages"]
        return messages


@asynccontextmanager
async def serve_agents(folder: Path, calls: Sequence[Call], reasoning: str = "", *flags: str) -> AsyncIterator[Setup]:
    """Serve a model that makes these calls, then answers with their results."""
    async with FakeUpstream() as upstream:
        model = AgentModel(calls, reasoning)
        upstream.on("/chat/completions", model)
        addresses = [f"{name}=openai+{upstream.base}#up/model" for name in (MODEL, KNOWN)]
        async with running_beside(folder, *addresses, flags=flags) as server:
            yield Setup(server, model)


def install() -> Path:
    """Install the packages of package.json, once for its content, and return their folder."""
    source = SOURCES / "package.json"
    folder = CACHE / hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    if not (folder / "node_modules").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(source, folder)
        command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund"]
        subprocess.run(command, cwd=folder, check=True, timeout=600)
    for script in SOURCES.glob("*.mjs"):
        shutil.copy(script, folder)
    return folder


async def run(command: Sequence[str], folder: Path, **variables: str) -> str:
    """Run a program in a folder that is its home, too, and return its output. Fails unless it exits with 0."""
    home = {"HOME": str(folder), "PWD": str(folder), "CODEX_HOME": str(folder / ".codex")}
    home |= {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("CONFIG", "DATA", "CACHE", "STATE")}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment({**home, **variables}),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    return output.decode()


def events_of(output: str) -> list[dict[str, Any]]:
    """Return the lines of JSON in a program's output."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


async def run_codex(agents: Path, setup: Setup, folder: Path, prompt: str, model: str = MODEL) -> list[dict[str, Any]]:
    """Run `codex exec` with a provider and an MCP server as its only configuration, and return its events."""
    _write(
        folder / ".codex" / "config.toml",
        f"""model_provider = "shoal"
[model_providers.shoal]
name = "Shoal"
base_url = "{setup.base_url}"
wire_api = "responses"
[mcp_servers.sums]
command = "node"
args = ["{agents / "mcp_server.mjs"}"]
startup_timeout_sec = 60
required = true
""",
    )
    # The test has no sandbox to give to its commands, and its folder is no repository.
    flags = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    codex = str(agents / "node_modules" / ".bin" / "codex")
    return events_of(await run([codex, "exec", "-m", model, *flags, prompt], folder))


async def run_opencode(agents: Path, setup: Setup, folder: Path, provider: str, prompt: str) -> list[dict[str, Any]]:
    """Run `opencode run` with a package of the AI SDK as its provider, and return its events."""
    options = {"baseURL": setup.base_url, "apiKey": "any"}
    served = {"npm": provider, "name": "Shoal", "options": options, "models": {MODEL: {"name": MODEL}}}
    config = {"autoupdate": False, "share": "disabled", "permission": "allow", "provider": {"shoal": served}}
    _write(folder / "opencode.json", json.dumps(config))
    off = {f"OPENCODE_DISABLE_{name}": "1" for name in ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD")}
    opencode = str(agents / "node_modules" / ".bin" / "opencode")
    return events_of(await run([opencode, "run", "-m", f"shoal/{MODEL}", "--format", "json", prompt], folder, **off))


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
