"""Formatting of tables, sizes and ages for command output."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from typing import Any

import typer

_CONTROL = re.compile(r"[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""What JSON may hold as it is and a terminal obeys: clients choose paths and names that servers repeat."""

_AGES = (
    (365 * 86400, "year"),
    (30 * 86400, "month"),
    (7 * 86400, "week"),
    (86400, "day"),
    (3600, "hour"),
    (60, "minute"),
)


def size_text(count: float) -> str:
    """Format a byte count in powers of ten: "91 MB"."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def age_text(seconds: float) -> str:
    """Format how long ago something was: "3 days ago"."""
    for length, unit in _AGES:
        count = int(max(0, seconds) // length)
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def print_json(value: Any, *, ascii_only: bool = True) -> None:
    """Print JSON on standard output, with escapes for what a terminal would obey."""
    text = json.dumps(value, indent=2, ensure_ascii=ascii_only)
    typer.echo(_CONTROL.sub(lambda match: f"\\u{ord(match.group()):04x}", text))


def print_table(titles: tuple[str, ...] | None, rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table on standard output; lines are not wrapped if that is not a terminal."""
    from rich.console import Console
    from rich.table import Table

    from shoal.observability.logs import escape_control

    table = Table(box=None, pad_edge=False, show_header=titles is not None)
    for title in titles or ("", ""):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*map(escape_control, row))
    # A pipe has no width: a cut or folded name is useless to the program that reads it.
    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 1000)
    with console.capture() as drawn:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in drawn.get().splitlines()))
