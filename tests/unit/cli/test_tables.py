"""Sizes, ages and tables in readable form."""

from __future__ import annotations

import json

import pytest

from shoal.cli._tables import age_text, print_json, print_table, size_text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (90_868_376, "91 MB"), (999_600_000, "1.0 GB"), (12.34e9, "12.3 GB")],
)
def test_sizes_for_people(count: int, text: str) -> None:
    """Sizes are in powers of ten, three digits at most."""
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "just now"),
        (59, "just now"),
        (60, "1 minute ago"),
        (7200, "2 hours ago"),
        (3 * 86400, "3 days ago"),
        (8 * 86400, "1 week ago"),
        (61 * 86400, "2 months ago"),
        (800 * 86400, "2 years ago"),
    ],
)
def test_ages_for_people(seconds: float, text: str) -> None:
    """Ages are in the largest unit that fits."""
    assert age_text(seconds) == text


def test_a_cell_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters, line ends and changes of direction from a server's strings are escaped."""
    print_table(None, [("request", "GET /\x1b[2J\nstatus 200\x9b\u202e")])
    assert capsys.readouterr().out == "request  GET /\\x1b[2J\\nstatus 200\\x9b\\u202e\n"


def test_a_pipe_gets_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is cut, wrapped or read as markup or emoji names, and no line ends in spaces."""
    print_table(("NAME", "NOTE"), [("x" * 300, ""), ("[b]y", "pypi:fish:")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "x" * 300
    assert lines[2].split() == ["[b]y", "pypi:fish:"]
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("ascii_only", [True, False])
def test_json_is_valid_and_safe_on_a_terminal(ascii_only: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of what clients choose moves a cursor or turns a line around, and a reader gets it back as it was."""
    value = {"path": "/\x1b[2J\x7f\x9b1m\u202ead\u2028é\\u0041"}
    print_json(value, ascii_only=ascii_only)
    shown = capsys.readouterr().out
    assert json.loads(shown) == value
    assert all(character == "\n" or character.isprintable() for character in shown)
    assert ("é" in shown) is not ascii_only
