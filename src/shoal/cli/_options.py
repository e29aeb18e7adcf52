"""Command-line flags generated from the settings table: every flag corresponds to a setting."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import config
from shoal.cli._completion import complete_from
from shoal.config.presets import FLAGS, PRESETS
from shoal.config.schema import Setting
from shoal.config.settings import SETTINGS

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings file (env SHOAL_CONFIG, else ./shoal.toml)."),
]
As = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="NAME",
        autocompletion=complete_from(tuple(PRESETS)),
        help=f"Replace another server, with its port, variables and flags (env SHOAL_AS): {', '.join(PRESETS)}.",
    ),
]

_LAYERS = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    for name, annotation in (("config_file", ConfigFile), ("preset", As))
]

# The parser knows these flags under every preset, so that errors can name a wrong one; the help shows only Shoal's own.
_FOREIGN = {flag: f"foreign_{flag[2:].replace('-', '_')}" for flag in FLAGS}


def with_settings(*chosen: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command `--config`, `--as` and the flags of the named sections or settings; it receives `loaded`.

    Without names the command gets all flags, including those of the servers that presets emulate. A parameter called
    `addresses` holds the models to serve. Warnings about the settings go to standard error.
    """
    rows = [row for row in SETTINGS if not chosen or row.section in chosen or row.name in chosen]
    foreign = {} if chosen else _FOREIGN

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        kept = [parameter for name, parameter in own.items() if name != "loaded"]

        @functools.wraps(command)
        def wrapped(**arguments: Any) -> None:
            flags = {row.name: arguments.pop(row.name) for row in rows}
            flags[config.MODELS] = arguments.get("addresses")
            flags[config.AS] = arguments.pop("preset")
            originals = {flag: arguments.pop(name) for flag, name in foreign.items()}
            flags[config.FOREIGN] = {flag: text for flag, text in originals.items() if text is not None}
            file = arguments.pop("config_file") or config.find_file(os.environ, Path.cwd())
            command(**arguments, loaded=load(flags, file))

        # typer reads both: the signature for order and defaults, the annotations for types.
        options = [*map(_parameter, rows), *(_foreign_parameter(flag, name) for flag, name in foreign.items())]
        wrapped.__signature__ = inspect.Signature([*kept, *_LAYERS, *options])  # type: ignore[attr-defined]
        wrapped.__annotations__ = {name: p.annotation for name, p in wrapped.__signature__.parameters.items()}  # type: ignore[attr-defined]
        return wrapped

    return decorate


def load(flags: dict[str, Any], file: Path | None) -> config.LoadedConfig:
    """Return the settings in effect for this process. Raises ConfigError."""
    from shoal.cli._errors import warn

    loaded = config.load(flags, os.environ, file)
    for warning in loaded.warnings:
        warn(warning)
    return loaded


def _parameter(row: Setting) -> inspect.Parameter:
    """Declare an option whose value is None if not given; `config.load` validates its text, as for every other
    layer."""
    names = (f"{row.flag}/--no-{row.flag[2:]}",) if row.default is True or row.default is False else (row.flag,)
    kind: Any = bool if isinstance(row.default, bool) else list[str] if row.repeatable else str
    option = typer.Option(
        *names,
        help=f"{row.help} (env {row.env}{_format_default(row)})",
        metavar=None if kind is bool else _metavar(row),
        rich_help_panel=row.section,
        show_default=False,
        autocompletion=complete_from(row.choices) if row.choices else None,
    )
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(row.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _foreign_parameter(flag: str, name: str) -> inspect.Parameter:
    annotation = Annotated[str | None, typer.Option(flag, hidden=True)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _format_default(row: Setting) -> str:
    if row.default is None or row.default in ((), ""):
        return ""
    if isinstance(row.default, bool):
        return f", default {'on' if row.default else 'off'}"
    shown = f"{row.default:g}" if isinstance(row.default, float) else row.default
    return f", default {shown}"


def _metavar(row: Setting) -> str:
    if row.choices:
        return "|".join(row.choices)
    return {"IntType": "N", "FloatType": "NUMBER"}.get(type(row.kind).__name__, "FILE" if row.path else "TEXT")
