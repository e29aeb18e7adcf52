"""`shoal mcp` as assistants start it: the SDK's client over standard input and output."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters, stdio_client

from tests.integration.server_kit import environment

pytestmark = pytest.mark.timeout(120)


async def test_search_in_a_folder(tmp_path: Path) -> None:
    """The answer comes from a file of the folder, with its line; nothing else is on standard output."""
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "fish.md").write_text("\n\na shoal of fish\n")
    (folder / "money.md").write_text("interest rates\n")
    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "shoal", "mcp", "fake:", "--folder", "notes"],
        env=environment({"SHOAL_HOME": str(tmp_path / "home")}),
        cwd=tmp_path,
    )
    async with Client(stdio_client(command)) as client:
        result = await client.call_tool("search", {"query": "a shoal of fish", "limit": 1})
    assert result.structured_content is not None
    (found,) = result.structured_content["results"]
    assert (found["source"], found["text"]) == (str(folder / "fish.md"), "a shoal of fish")


def test_it_ends_with_its_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal", "mcp", "fake:"]
    env = environment({"SHOAL_HOME": str(tmp_path)})
    run = subprocess.run(command, input=b"", capture_output=True, env=env, cwd=tmp_path, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")


def test_wrong_arguments_end_it_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal", "mcp", "fake:", "--folder", "none"]
    env = environment({"SHOAL_HOME": str(tmp_path)})
    run = subprocess.run(command, input=b"", capture_output=True, env=env, cwd=tmp_path, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (2, b"")
    assert run.stderr == b"error: --folder none: there is no such folder or file\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    """Also while its input is open."""
    command = [sys.executable, "-m", "shoal", "mcp", "fake:"]
    env = environment({"SHOAL_HOME": str(tmp_path)})
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    request = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}).encode() + b"\n"
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=tmp_path
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(request)
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["result"]["serverInfo"]["name"] == "shoal"
            process.send_signal(number)
            assert process.wait(30) == 128 + number
        finally:
            process.kill()
