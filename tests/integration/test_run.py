"""`shoal run` in a pseudo-terminal, in this process and on a running server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.integration.server_kit import ShoalServer
from tests.integration.terminal_kit import SHOAL, start

pytestmark = pytest.mark.timeout(90)
RUN = [*SHOAL, "run"]


def test_a_conversation(tmp_path: Path) -> None:
    """The greeting names the model; commands are Ollama's; Ctrl-D is not needed to leave."""
    terminal = start("run", "fake:", "--port", "0", folder=tmp_path)
    shown = terminal.read_until(">>> ")
    for line in (
        "hello there",
        '/set system "be brief"',
        "/show template",
        "/show license",
        "/show info",
        "/model",
        "/?",
    ):
        terminal.type(line)
        shown += terminal.read_until(">>> ")
    terminal.type("/bye")
    assert terminal.end()[0] == 0
    assert "fake:: /? lists commands" in shown
    assert shown.count("hello there") == 2
    assert "system message set" in shown
    assert "{{" in shown.partition("/show template")[2].partition(">>> ")[0]
    assert "no license is known of fake:" in shown
    assert "messages            2" in shown
    assert "/undo" in shown


def test_a_conversation_changes_models_and_is_saved(shoal_server: ShoalServer, tmp_path: Path) -> None:
    """/model lists the server's models and switches; a misspelled one is suggested; /save writes the request."""
    server = shoal_server(["talker=fake:", "other=fake:"], env={"SHOAL_HOME": str(tmp_path / "home")})
    port = server.base_url.rpartition(":")[2]
    terminal = start("run", "talker", "--port", port, folder=tmp_path)
    shown = terminal.read_until(">>> ")
    shows = ("/show modelfile", "/show license", "/set nohistory", "/set format no.json", "/set nothink")
    for line in ("one two", "/model", "/model othr", "/model other", *shows, "three", "/save talk.json"):
        terminal.type(line)
        shown += terminal.read_until(">>> ")
    terminal.type("/bye")
    assert terminal.end()[0] == 0
    assert "  /model other" in shown
    assert "error: othr is none of the models here: did you mean other?" in shown
    assert "FROM fake:" in shown
    assert "no license is known of other" in shown
    assert "lines are not kept" in shown
    assert "error: no.json cannot be read" in shown
    assert "reasoning is off" in shown
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["model"] == "other"
    assert [one["content"] for one in saved["messages"]] == ["one two", "one two", "three", "three"]
    assert server.request("POST", "/v1/chat/completions", saved)[0] == 200


def test_a_server_that_has_the_model_answers(shoal_server: ShoalServer, tmp_path: Path) -> None:
    """Only a server knows the name; the answer alone is on standard output."""
    server = shoal_server(["talker=fake:"], env={"SHOAL_HOME": str(tmp_path / "home")})
    port = server.base_url.rpartition(":")[2]
    for words, stdin in ((["one", "two"], ""), ([], "one two")):
        done = subprocess.run(
            [*RUN, "talker", *words, "--port", port],
            input=stdin,
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
        )
        assert done.stdout == "one two\n"
