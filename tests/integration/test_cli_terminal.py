"""The command line in a pseudo-terminal: help at several widths, `doctor`, and failures that are told once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.config.settings import BY_NAME, SETTINGS
from tests.integration.terminal_kit import ROWS, start

pytestmark = pytest.mark.timeout(90)

ERASED = re.compile(r"[^\n]*\x1b\[2K")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def run_in_terminal(*words: str, columns: int, folder: Path) -> tuple[int, str]:
    """Run `shoal` on a terminal of that width. Returns its exit code and what stays on the terminal."""
    env = {"SHOAL_HOME": str(folder / "home"), "SHOAL_OFFLINE": "1"}
    code, output = start(*words, folder=folder, columns=columns, term="xterm", env=env).end()
    return code, ESCAPES.sub("", ERASED.sub("", output))


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_name_of_the_help_is_cut(columns: int, tmp_path: Path) -> None:
    """Flags, variables and choices stand whole on lines that fit; the first help fits one screen of 80 columns."""
    code, brief = run_in_terminal("serve", "--help", columns=columns, folder=tmp_path)
    assert code == 0
    assert columns < 80 or len(brief.splitlines()) <= ROWS
    _, text = run_in_terminal("serve", "--help-all", columns=columns, folder=tmp_path)
    assert max(len(line) for line in (brief + text).splitlines()) <= columns
    words = set(re.split(r"[\s|,()]+", text))
    assert {row.flag for row in SETTINGS} | {row.env for row in SETTINGS} <= words
    assert set(BY_NAME["tool_call_parser"].choices) <= {word.rstrip(".") for word in words}
    assert {row.flag for row in SETTINGS if row.essential} <= set(brief.split())


@pytest.mark.parametrize("columns", [60, 120])
def test_doctor_names_the_next_step_of_each_failure(columns: int, tmp_path: Path) -> None:
    """A server that is down and a wrong setting are failures, with exit code 1; the rest is checked all the same."""
    (tmp_path / "shoal.toml").write_text("prot = 1\n")
    code, shown = run_in_terminal("doctor", "openai+http://127.0.0.1:1/v1#m", columns=columns, folder=tmp_path)
    assert code == 1
    lines = shown.splitlines()
    failures = [place for place, line in enumerate(lines) if line.startswith("fail")]
    assert [lines[place].split()[1] for place in failures] == ["settings", "backend"]
    text = " ".join(shown.split())
    assert "shoal.toml:1: prot is not a setting here -> did you mean port?" in text
    assert "127.0.0.1:1/v1 is not reachable" in text
    assert "-> start that server, or correct the address" in text
    assert {"python", "engines", "processor", "memory", "gpu", "disk", "hub"} <= set(text.split())


def test_a_failure_is_told_once(tmp_path: Path) -> None:
    """On a terminal it is one line, without a traceback or a log record of the same."""
    for words in (("serve", "file:/nonexistent", "--port", "0"), ("run", "file:/nonexistent", "hi", "--port", "0")):
        code, shown = run_in_terminal(*words, columns=120, folder=tmp_path)
        assert code == 1
        assert shown.count("does not exist") == 1
        assert shown.splitlines()[-1].startswith("error: nonexistent: file:/nonexistent does not exist")
        assert "Traceback" not in shown
