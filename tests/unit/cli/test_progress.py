"""Progress bars."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from rich.console import Console

from shoal.cli.progress import TerminalProgress, Waiting


def draw(*, terminal: bool, log: logging.Logger | None = None) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160, no_color=True)
    with TerminalProgress(console, log=log) as progress:
        progress.report_fetch("hf:org/[tiny]", 0, None)
        progress.report_fetch("hf:org/[tiny]", 50_000_000, 100_000_000)
        progress.report_note("pypi:fish: the hub [cannot] be reached")
        progress.report_work("convert", 0.5)
        progress.report_work("convert", 1.0)
    return out.getvalue()


def test_a_terminal_sees_bars() -> None:
    """Downloads show bytes, steps show percent, and names are unchanged."""
    shown = draw(terminal=True)
    assert "hf:org/[tiny]" in shown
    assert "50.0/100.0 MB" in shown
    assert "100 %" in shown
    assert "pypi:fish: the hub [cannot] be reached" in shown


def test_a_log_sees_notes_alone() -> None:
    """Without a terminal there are no bars and no escape codes."""
    assert draw(terminal=False) == "pypi:fish: the hub [cannot] be reached\n"


def test_a_server_s_log_has_them_as_records(caplog: pytest.LogCaptureFixture) -> None:
    """Every line of the log has one format; a terminal shows them beside its bars."""
    caplog.set_level("INFO")
    log = logging.getLogger("shoal.noted")
    assert draw(terminal=False, log=log) == ""
    assert caplog.messages == ["pypi:fish: the hub [cannot] be reached"]
    assert "pypi:fish: the hub [cannot] be reached" in draw(terminal=True, log=log)
    assert len(caplog.messages) == 1


def test_a_wait_is_shown_with_its_time_and_then_removed() -> None:
    """Below the bars, on a terminal only."""
    for terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=80, no_color=True)
        with TerminalProgress(console, doing="loading [fish]") as progress:
            progress.report_work("convert", 1.0)
        shown = out.getvalue()
        assert ("loading [fish] 0:00:00" in shown) == terminal
        assert not terminal or shown.endswith("\x1b[1A\x1b[2K")  # the last line is erased


def test_output_to_a_file_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command prints beside a spinner on the terminal does not end up on the terminal."""
    terminal, file = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", file)
    with Waiting("asking", Console(file=terminal, force_terminal=True)):
        sys.stdout.write("answer\n")
    assert file.getvalue() == "answer\n"
    assert "answer" not in terminal.getvalue()
