"""Completion in shells: words, choices, and names of models on disk and on a running server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from http.server import HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from shoal.cli import COMMANDS, app
from shoal.cli._running import RunningServer
from shoal.config.presets import PRESETS
from tests.unit.cli.servers import Quiet, serve_in_thread

SHOAL = Path(sys.executable).with_name("shoal")


class Listing(Quiet):
    """A server with one model that runs and one that can be loaded. It notes the keys that it gets."""

    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.keys.append(self.headers["authorization"])
        body = json.dumps({"data": [{"id": "org/running"}, {"id": "org/other"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A store with one model, beside a broken entry."""
    for name, text in (("good", '{"id": "org/stored", "digest": "x"}'), ("broken", "{")):
        folder = tmp_path / "home" / "models" / f"hf+{name}" / "1"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(text)
    return tmp_path / "home"


def complete(line: str, **environ: str) -> list[str]:
    """Return what bash is offered for the last word of `line`."""
    words = line.split(" ")
    environ |= {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_SHOAL_COMPLETE": "complete_bash"}
    return CliRunner().invoke(app, [], env=environ, prog_name="shoal").output.split()


def test_commands_and_choices_complete() -> None:
    """Commands, those of groups, flags, and the words of an enumerated setting."""
    assert complete("shoal ") == list(COMMANDS)
    assert complete("shoal un") == ["unload"]
    assert complete("shoal triton ") == ["up", "down", "status", "logs"]
    assert complete("shoal serve --precision f") == ["f32", "fp16"]
    assert complete("shoal serve --as ") == list(PRESETS)
    assert complete("shoal serve --max-batch-s") == ["--max-batch-size"]


def test_names_of_models_are_live(home: Path) -> None:
    """`rm` offers stored models, `unload` those of the running server, `run` both; a broken entry is left out."""
    with HTTPServer(("127.0.0.1", 0), Listing) as server, serve_in_thread(server):
        environ = {"SHOAL_HOME": str(home), "SHOAL_PORT": str(server.server_port)}
        assert complete("shoal run ", **environ) == ["org/running", "org/other", "org/stored"]
        assert complete("shoal run org/s", **environ) == ["org/stored"]
        assert complete("shoal rm ", **environ) == ["org/stored"]
        assert complete("shoal unload ", **environ) == ["org/running", "org/other"]


def test_a_key_press_sends_no_key_to_another_machine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shoal.toml in somebody's folder names a host: only one on this machine is asked, without the admin key."""
    urls: list[str] = []

    class Asked(RunningServer):
        def __init__(self, url: str, key: str | None = None, **options: float) -> None:
            urls.append(url)
            super().__init__(url, key, **options)

    monkeypatch.setattr("shoal.cli._running.RunningServer", Asked)
    environ = {"SHOAL_HOME": str(home), "SHOAL_API_KEY": "key-of-users", "SHOAL_ADMIN_KEY": "key-of-admins"}
    assert complete("shoal unload ", **environ, SHOAL_HOST="models.example") == []
    assert complete("shoal unload ", **environ, SHOAL_HOST="127.0.0.1.example") == []
    assert urls == []
    Listing.keys.clear()
    with HTTPServer(("127.0.0.1", 0), Listing) as server, serve_in_thread(server):
        place = {"SHOAL_HOST": "0.0.0.0", "SHOAL_PORT": str(server.server_port)}
        assert complete("shoal unload ", **environ, **place) == ["org/running", "org/other"]
    assert Listing.keys == ["Bearer key-of-users"]


def test_a_mistyped_command_completes_to_nothing() -> None:
    """A group with a default command has no error while somebody types."""
    environ = {"COMP_WORDS": "shoal bench embd x", "COMP_CWORD": "3", "_SHOAL_COMPLETE": "complete_bash"}
    result = CliRunner().invoke(app, [], env=environ, prog_name="shoal")
    assert (result.output.strip(), result.exception) == ("", None)


def test_nothing_is_printed_without_a_server_or_with_wrong_settings(home: Path) -> None:
    """The line that somebody types stays as it is."""
    assert complete("shoal run ", SHOAL_HOME=str(home), SHOAL_PORT="1") == ["org/stored"]
    assert complete("shoal run ", SHOAL_HOME=str(home), SHOAL_PORT="eighty") == []


@pytest.mark.parametrize("command", ["run", "rm", "show"])
def test_a_key_press_imports_nothing_heavy(home: Path, command: str) -> None:
    """Neither numpy nor the validators of a command's options, each of which takes as long as all the rest."""
    code = (
        "import sys, contextlib, shoal.cli\nsys.argv = ['shoal']\n"
        "with contextlib.suppress(SystemExit):\n    shoal.cli.app(prog_name='shoal')\n"
        "print([name for name in ('numpy', 'pydantic', 'rich') if name in sys.modules])"
    )
    line = {"COMP_WORDS": f"shoal {command} ", "COMP_CWORD": "2", "_SHOAL_COMPLETE": "complete_bash"}
    environ = {**os.environ, **line, "SHOAL_HOME": str(home), "SHOAL_PORT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["org/stored", "[]"]


SCRIPTS = {
    "bash": 'source {file}; COMP_WORDS=(shoal rm ""); COMP_CWORD=2; _shoal_completion shoal; echo "${{COMPREPLY[@]}}"',
    "fish": 'source {file}; complete --do-complete "shoal rm "',
    # Outside of its line editor, zsh runs no completion: what the function offers to it is printed.
    "zsh": 'compdef() {{ }}; _arguments() {{ print -r -- "$@" }}; words=(shoal rm ""); CURRENT=3; source {file}; '
    "_shoal_completion",
}


def list_shells() -> list[str]:
    """Return the shells to test: all of them, but in CI, where no test may be skipped, those that are installed."""
    return [shell for shell in SCRIPTS if shutil.which(shell) or os.environ.get("CI") != "true"]


@pytest.mark.parametrize("shell", list_shells())
@pytest.mark.timeout(60)
def test_a_real_shell_completes(shell: str, home: Path, tmp_path: Path) -> None:
    """The script that `--show-completion` prints works where the shell is installed."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    environ = {
        **os.environ,
        "SHOAL_HOME": str(home),
        "PATH": f"{SHOAL.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
    }
    shown = subprocess.run(
        [SHOAL], env={**environ, "_SHOAL_COMPLETE": f"source_{shell}"}, capture_output=True, text=True, check=True
    )
    file = tmp_path / "completion"
    file.write_text(shown.stdout)
    done = subprocess.run(
        [shell, "-c", SCRIPTS[shell].format(file=file)], env=environ, capture_output=True, text=True, check=True
    )
    assert "org/stored" in done.stdout
