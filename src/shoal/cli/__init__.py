"""The `shoal` command. Subcommands are imported on first use, so that `shoal --version` returns quickly."""

from __future__ import annotations

import faulthandler
import importlib
from itertools import zip_longest
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS = {
    "serve": "shoal.cli.serve:serve",
    "embed": "shoal.cli.embed:embed",
    "rank": "shoal.cli.rank:rank",
    "chat": "shoal.cli.chat:chat",
    "bulk": "shoal.cli.bulk:bulk",
    "pull": "shoal.cli.models:pull",
    "list": "shoal.cli.models:list_models",
    "show": "shoal.cli.models:show",
    "rm": "shoal.cli.models:rm",
    "ps": "shoal.cli.running:ps",
    "load": "shoal.cli.running:load",
    "unload": "shoal.cli.running:unload",
    "triton": "shoal.cli.triton:app",
    "bench": "shoal.cli.bench:app",
    "config": "shoal.cli.config:show",
}
"""Command name to "module:function", or "module:app" for a command group, in the order of the help."""


class _Command(TyperCommand):
    """A command that accepts two kinds of flag that the parser cannot handle.

    Flags of other servers that may stand without a value get "true". A flag whose metavar is FILE... takes every word
    up to the next flag, as a shell expands *.jpg.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from shoal.config.presets import SWITCHES

        words: list[str] = []
        for word, following in zip_longest(args, args[1:], fillvalue=""):
            words.append(word)
            if word in SWITCHES and following.lower() not in _SWITCH_VALUES:
                words.append("true")
        several = {flag for each in self.params if each.metavar == _FILES_METAVAR for flag in each.opts}
        return super().parse_args(ctx, _repeat_flags(words, several))


_SWITCH_VALUES = {"true", "false", "1", "0", "yes", "no"}
_FILES_METAVAR = "FILE..."


def _repeat_flags(args: list[str], flags: set[str]) -> list[str]:
    """Repeat each of `flags` before every one of its values. A lone - is a value."""
    words: list[str] = []
    flag = ""
    for place, word in enumerate(args):
        if word == "--":
            return words + args[place:]
        if word.startswith("-") and word != "-":
            flag = word if word in flags else ""
            # Keep a flag without any value, so that the parser rejects it.
            following = args[place + 1] if place + 1 < len(args) else "--"
            if flag and (following == "-" or not following.startswith("-")):
                continue
        elif flag:
            words.append(flag)
        words.append(word)
    return words


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        from shoal.cli._errors import report_errors

        module, _, function = COMMANDS[cmd_name].partition(":")
        found = getattr(importlib.import_module(module), function)
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        one = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
        one.command(cmd_name, cls=_Command)(report_errors(found))
        return typer.main.get_command(one)


app = typer.Typer(
    cls=_Commands,
    name="shoal",
    no_args_is_help=True,
    # Typer's tracebacks show local variables, which may hold keys.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_versions(value: bool) -> None:
    if value:
        from shoal.cli._version import versions

        typer.echo("\n".join(versions()))
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show versions and exit.", is_eager=True, callback=_show_versions)
    ] = False,
) -> None:
    """One inference gateway: the APIs your clients speak, batched across users, on the engine you choose."""


def main() -> None:
    faulthandler.enable()  # a crash in a library prints where each thread was
    app()
