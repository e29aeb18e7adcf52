"""The `shoal` command. Subcommands are imported on first use, so that `shoal --version` returns quickly."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import typer

from shoal.cli._commands import CONTEXT, Command, Group

COMMANDS = {
    "serve": "shoal.cli.serve:serve",
    "embed": "shoal.cli.embed:embed",
    "rank": "shoal.cli.rank:rank",
    "run": "shoal.cli.chat:run",
    "chat": "shoal.cli.chat:chat",
    "bulk": "shoal.cli.bulk:bulk",
    "mcp": "shoal.cli.mcp:mcp",
    "pull": "shoal.cli.models:pull",
    "list": "shoal.cli.models:list_models",
    "show": "shoal.cli.models:show",
    "rm": "shoal.cli.models:rm",
    "ps": "shoal.cli.running:ps",
    "load": "shoal.cli.running:load",
    "unload": "shoal.cli.running:unload",
    "explain": "shoal.cli.explain:explain",
    "triton": "shoal.cli.triton:app",
    "bench": "shoal.cli.bench:app",
    "config": "shoal.cli.config:app",
    "doctor": "shoal.cli.doctor:doctor",
}
"""Command name to "module:function", or "module:app" for a command group, in the order of the help."""


SUMMARIES = {
    "serve": "Serve models over HTTP",
    "embed": "Embed texts and images",
    "rank": "Rank texts by how well they describe an image",
    "run": "Chat with a language model, as `ollama run` does",
    "chat": "Chat with a language model here or on any server",
    "bulk": "Run files through a model",
    "mcp": "Serve models to an assistant (Model Context Protocol)",
    "pull": "Download and convert a model",
    "list": "List the models on this machine's disk",
    "show": "Show details of a stored model",
    "rm": "Remove a stored model",
    "ps": "List the models of a running server",
    "load": "Load a model into a running server",
    "unload": "Unload a model from a running server",
    "explain": "Explain one of the last requests of a running server",
    "triton": "Run NVIDIA Triton on this machine",
    "bench": "Measure a running server",
    "config": "Show or check the settings in effect",
    "doctor": "Check this machine and the configuration",
}
"""What the list of commands says of each, so that the list imports none of them."""


class _Commands(Group):
    also: ClassVar[Mapping[str, str]] = {
        "start": "serve", "up": "serve", "download": "pull", "ls": "list", "models": "list", "info": "show",
        "inspect": "show", "delete": "rm", "remove": "rm", "stop": "unload", "check": "doctor", "settings": "config",
        "batch": "bulk", "rerank": "rank", "benchmark": "bench",
    }  # fmt: skip

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def summary(self, ctx: Any, name: str) -> str:
        return SUMMARIES[name]

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        from typer._click.shell_completion import CompletionItem  # typer has no public name for it

        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=SUMMARIES[name]) for name in COMMANDS if name.startswith(incomplete)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        from shoal.cli._errors import report_errors

        module, _, function = COMMANDS[cmd_name].partition(":")
        found = getattr(importlib.import_module(module), function)
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        one = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        one.command(cmd_name, cls=Command)(report_errors(found))
        return typer.main.get_command(one)


app = typer.Typer(
    cls=_Commands,
    name="shoal",
    no_args_is_help=True,
    # Plain text: a table of boxes cuts names on a narrow terminal, and takes 0.1 s to import.
    rich_markup_mode=None,
    # Typer's tracebacks show local variables, which may hold keys.
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
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
    _open_missing_streams()
    faulthandler.enable()  # a crash in a library prints where each thread was
    try:
        app()
    except OSError as error:
        from shoal.cli._errors import explain_os_error, say

        reason = explain_os_error(error)
        if not reason:
            raise
        # What the stream still holds cannot be written when Python ends, either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        say("error", reason, "bold red")
        sys.exit(1)


def _open_missing_streams() -> None:
    """Open the null device for each standard stream that the caller closed, as `shoal chat <&-` does. Its number would
    go to the next file or socket, and its Python object is None."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)  # subprocesses have standard streams, too
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
