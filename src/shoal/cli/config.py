"""`shoal config`: show the settings in effect and where each comes from."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from shoal.cli._options import with_settings
from shoal.config import LoadedConfig


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
