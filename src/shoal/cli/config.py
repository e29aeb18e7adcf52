"""`shoal config`: show the settings in effect and where each comes from, or check a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import config
from shoal.backends import parse_served
from shoal.cli._commands import make_group
from shoal.cli._options import with_settings
from shoal.config import LoadedConfig
from shoal.config.check import Problem, find_problems


@with_settings()
def show(
    addresses: Annotated[list[str] | None, typer.Argument(metavar="ADDRESS", help="As for serve.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    loaded: LoadedConfig,
) -> None:
    """Show the effective settings and their sources, also under a preset; keys are masked."""
    shown = loaded.describe()
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("SETTING", "VALUE", "FROM"):
        table.add_column(title, overflow="fold")
    for name, entry in (*shown["settings"].items(), ("models", shown["models"])):
        table.add_row(name, _text(entry["value"]), entry["source"])
    for name, keys in shown["tables"].items():
        for key, entry in keys.items():
            table.add_row(f'models."{name}".{key}', _text(entry["value"]), entry["source"])
    Console(highlight=False, markup=False, emoji=False).print(table)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={text}" for key, text in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(value) or "-"
    return "-" if value in (None, "") else str(value).lower() if isinstance(value, bool) else str(value)


def check(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Settings file (default: SHOAL_CONFIG, else ./shoal.toml)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the settings file and the environment, and list every error with its line. Exit code 1 if there is one."""
    place = file or config.find_file(os.environ, Path.cwd())
    problems = find_problems(place, os.environ, parse_served)
    if as_json:
        typer.echo(
            json.dumps({"file": str(place) if place else None, "problems": [*map(_to_dict, problems)]}, indent=2)
        )
    else:
        typer.echo("\n".join(map(str, problems)) or f"{place or 'the environment (no settings file)'}: no errors")
    if any(each.is_error for each in problems):
        raise typer.Exit(1)


def _to_dict(problem: Problem) -> dict[str, Any]:
    return {
        "level": "error" if problem.is_error else "warning",
        "place": problem.place,
        "line": problem.line,
        "message": problem.message,
    }


app = make_group(
    "config",
    "Show the settings in effect, or check a settings file; `shoal config` is short for `shoal config show`.",
    {"show": show, "check": check},
    default="show",
)
