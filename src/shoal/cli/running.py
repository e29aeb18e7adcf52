"""`shoal ps`, `load`, `unload`: manage the models of a running server."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import typer

from shoal.cli._completion import complete_running
from shoal.cli._options import with_settings
from shoal.cli._running import CONNECTION_SETTINGS, RunningServer, check_model_name
from shoal.cli._tables import age_text, print_json, print_table, size_text
from shoal.cli.progress import TerminalProgress
from shoal.config import LoadedConfig
from shoal.errors import SetupError, TransportFailed

_Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="Model name from `shoal ps --all`, or org/name.", autocompletion=complete_running
    ),
]
Url = Annotated[
    str, typer.Option("--url", metavar="URL", help="The server (default: http://127.0.0.1 at the setting `port`).")
]


@with_settings(*CONNECTION_SETTINGS)
def ps(
    everything: Annotated[bool, typer.Option("--all", help="Also list models that can be loaded.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    url: Url = "",
    *,
    loaded: LoadedConfig,
) -> None:
    """List the models of a running server."""
    server = RunningServer.from_settings(loaded.settings, url)
    used = _get_last_used(server)
    # An adapter is loaded with its base model and is not a model of its own.
    found = [_facts(entry, used) for entry in server.models() if not entry.get("parent")]
    shown = [one for one in found if everything or one["status"] != "unloaded"]
    if as_json:
        print_json(shown)
        return
    now = time.time()
    rows = [
        (
            one["name"],
            one["backend"] or "-",
            one["status"],
            size_text(one["size"]) if one["size"] else "-",
            age_text(now - one["last_used"]) if one["last_used"] else "-",
            one["note"],
        )
        for one in shown
    ]
    print_table(("NAME", "BACKEND", "STATUS", "SIZE", "LAST USED", "NOTE"), rows)


@with_settings(*CONNECTION_SETTINGS)
def load(
    name: _Name,
    backend: Annotated[
        Literal["local", "triton"] | None, typer.Option(help="Where to run it (default: the server's setting).")
    ] = None,
    text_in: Annotated[
        bool | None,
        typer.Option(
            "--text-in/--no-text-in", help="On Triton: also create a model that accepts text.", show_default=False
        ),
    ] = None,
    url: Url = "",
    *,
    loaded: LoadedConfig,
) -> None:
    """Load a model into a running server, downloading it first if necessary."""
    server = RunningServer.from_settings(loaded.settings, url)
    wishes = {"backend": backend, "text_in": text_in}
    with TerminalProgress(doing=f"loading {name}") as progress:
        changed = server.load(
            check_model_name(name), {key: value for key, value in wishes.items() if value is not None}, progress
        )
    typer.echo(f"{name} is loaded" if changed else f"{name} is already loaded")


@with_settings(*CONNECTION_SETTINGS)
def unload(name: _Name, url: Url = "", *, loaded: LoadedConfig) -> None:
    """Unload a model from a running server; requests in flight finish first."""
    server = RunningServer.from_settings(loaded.settings, url)
    with TerminalProgress(doing=f"unloading {name}") as progress:
        changed = server.unload(check_model_name(name), progress)
    typer.echo(f"{name} is unloaded" if changed else f"{name} is not loaded")


def _get_last_used(server: RunningServer) -> dict[str, float]:
    try:
        return dict(server.get_last_used())
    except (SetupError, TransportFailed):  # a server without these metrics still has models
        return {}


def _facts(entry: dict[str, Any], used: dict[str, float]) -> dict[str, Any]:
    status = entry.get("status") or {}
    failed = bool(status.get("failed"))
    return {
        "name": entry["id"],
        "backend": entry.get("backend"),
        "status": "failed" if failed else status.get("value", "loaded"),
        "size": entry.get("size"),
        "last_used": used.get(entry["id"]),
        "source": entry.get("source"),
        "note": status.get("error") if failed else status.get("note", ""),
    }
