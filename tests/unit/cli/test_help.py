"""The help of every command on 80 columns; `integration/test_cli_terminal.py` shows it on real terminals."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from shoal.cli import COMMANDS, SUMMARIES, app
from shoal.config.settings import BY_NAME, SETTINGS

SCREEN = 40
"""Lines of the help that people see first."""

runner = CliRunner()


def show_help(*words: str) -> str:
    """Return the help; the test runner's terminal has 80 columns."""
    result = runner.invoke(app, [*words], prog_name="shoal")
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_fits_one_screen(command: str) -> None:
    """With how to see the rest, where there is more."""
    text = show_help(command, "--help")
    assert len(text.splitlines()) <= SCREEN
    more = [flag for flag in re.findall(r"  (--[\w-]+)", show_help(command, "--help-all")) if f"  {flag}" not in text]
    assert bool(more) == ("--help-all` lists all" in text)


def test_the_rest_is_in_sections() -> None:
    """Every setting has its flag, variable and choices, in the table's order of sections."""
    text = show_help("serve", "--help-all")
    titles = re.findall(r"^(\S.*):$", text, re.M)
    assert titles == ["Arguments", "Options", *dict.fromkeys(row.section for row in SETTINGS)]
    words = set(re.split(r"[\s|,()]+", text))
    assert {row.flag for row in SETTINGS} | {row.env for row in SETTINGS} <= words
    assert set(BY_NAME["tool_call_parser"].choices) <= {word.rstrip(".") for word in words}


def test_the_list_of_commands_has_one_line_each() -> None:
    """No command is imported for it."""
    assert list(SUMMARIES) == list(COMMANDS)
    lines = show_help("--help").splitlines()
    assert [line.split()[0] for line in lines if line[2:].partition(" ")[0] in COMMANDS] == list(COMMANDS)
    assert len(lines) <= SCREEN
