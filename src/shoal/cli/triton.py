"""`shoal triton`: run a Triton on this machine without Docker."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from shoal.cli._commands import make_group
from shoal.cli._options import with_settings
from shoal.config import LoadedConfig
from shoal.errors import SetupError

if TYPE_CHECKING:
    from shoal.backends.triton.run_state import RunFolder, State
    from shoal.backends.triton.server import TritonOptions

_FoundServer: TypeAlias = "tuple[RunFolder, State, bool]"
"""A server's folder, its state, and whether it is supervised."""

_FOLLOW_INTERVAL_S = 0.2

_Which = Annotated[
    int | None,
    typer.Option("--grpc-port", metavar="N", help="gRPC port of the server; optional if only one runs."),
]


@with_settings("Model files")
def up(
    repository: Annotated[
        Path | None,
        typer.Option("--repository", metavar="DIR", help="Model repository (default $SHOAL_HOME/triton/repository)."),
    ] = None,
    grpc_port: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=65535, help="Number of the server, or its open gRPC port; 0 chooses a free one."
        ),
    ] = 8001,
    open_ports: Annotated[
        bool,
        typer.Option(
            "--open-ports",
            help="Listen on ports of 127.0.0.1: every local user, and web pages, can then run code as you.",
        ),
    ] = False,
    http_port: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=65535, help="HTTP port with --open-ports (default 8000).")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=65535, help="Metrics port with --open-ports (default 8002).")
    ] = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Run in the foreground and stop Triton on Ctrl-C.")
    ] = False,
    *,
    loaded: LoadedConfig,
) -> None:
    """Start a Triton and return when it is ready; it is restarted if it dies, until `shoal triton down`."""
    from shoal.backends.triton import supervise
    from shoal.cli.progress import TerminalProgress

    ports = {"http_port": http_port, "metrics_port": metrics_port}
    given: dict[str, Any] = {name: port for name, port in ports.items() if port is not None}
    if given and not open_ports:
        raise SetupError("HTTP and metrics require open ports: add --open-ports, or omit their ports")
    options = _options(loaded, repository=repository, open_ports=open_ports, grpc_port=grpc_port, owner="up", **given)
    with TerminalProgress() as progress:
        if foreground:
            _foreground(options, progress)
            return
        folder, state, started = supervise.start(options, progress)
    how = "is ready" if started else "is already running"
    typer.echo(f"Triton {state.version} {how} at triton://{state.url}")
    facts = _facts(folder, state, True)
    typer.echo("\n".join(_format_lines({name: facts[name] for name in ("repository", "http", "log")})))


@with_settings("Model files")
def down(grpc_port: _Which = None, *, loaded: LoadedConfig) -> None:
    """Stop a Triton that `shoal triton up` started, or clean up those that ended unexpectedly."""
    from shoal.backends.triton import supervise

    options = _options(loaded)
    found = _find_servers(options, grpc_port)
    for folder, state, living in found:
        if living:
            _require_single(found)
        if supervise.stop(folder, state, options):
            typer.echo(f"Triton on port {state.grpc_port} is stopped")
        else:
            typer.echo(f"Triton on port {state.grpc_port} had already ended; its files are removed")


@with_settings("Model files")
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    loaded: LoadedConfig,
) -> None:
    """List the Tritons that Shoal is running, and, as stale, those that ended without notice, until `down` removes what
    is left of them. Exit code 1 when none is ready."""
    from shoal.backends.triton import supervise

    found = [_facts(*one) for one in supervise.list_servers(_options(loaded).run)]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif not found:
        typer.echo("no Triton started by Shoal is running: start one with `shoal triton up`")
    else:
        typer.echo("\n\n".join("\n".join(_format_lines(facts)) for facts in found))
    if not any(facts["phase"] == "ready" for facts in found):
        raise typer.Exit(1)


@with_settings("Model files")
def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", min=0, help="Number of last lines to show.")] = 50,
    grpc_port: _Which = None,
    *,
    loaded: LoadedConfig,
) -> None:
    """Show the log of a Triton."""
    folder, _, _ = _require_single(_find_servers(_options(loaded), grpc_port))
    size = folder.log.stat().st_size if folder.log.exists() else 0
    if tail := folder.tail(lines):
        typer.echo(tail)
    while follow:
        text, size = _read_new(folder.log, size)
        typer.echo(text, nl=False)
        time.sleep(_FOLLOW_INTERVAL_S)


app = make_group(
    "triton",
    "Run a real NVIDIA Triton on this machine: no Docker, no GPU needed.",
    {"up": up, "down": down, "status": status, "logs": logs},
)


def _options(loaded: LoadedConfig, **options: Any) -> TritonOptions:
    from shoal.backends.triton.server import TritonOptions

    return TritonOptions(home=Path(loaded.settings.home), offline=loaded.settings.offline, **options)


def _find_servers(options: TritonOptions, port: int | None) -> list[_FoundServer]:
    """Return the servers that a command may mean: without a port the live ones, or else those that ended without
    notice.

    Raises SetupError if there is none.
    """
    from shoal.backends.triton import supervise

    found = [one for one in supervise.list_servers(options.run) if port in (None, one[1].grpc_port)]
    if not found:
        where = "is running" if port is None else f"uses the gRPC port {port}"
        raise SetupError(f"no Triton started by Shoal {where}: `shoal triton status` lists them")
    return [one for one in found if one[2]] or found


def _require_single(found: list[_FoundServer]) -> _FoundServer:
    """Return the only server found. Raises SetupError if there are several."""
    if len(found) > 1:
        ports = ", ".join(str(state.grpc_port) for _, state, _ in found)
        do = "are running" if found[0][2] else "ended unexpectedly"
        raise SetupError(f"several Tritons {do}: choose one with --grpc-port ({ports})")
    return found[0]


def _foreground(options: TritonOptions, progress: Any) -> None:
    import asyncio

    from shoal.backends.triton.server import run_triton

    async def run() -> None:
        async with run_triton(options, progress) as server:
            typer.echo(f"Triton {server.version} is ready at triton://{server.url}; its log is {server.log}")
            await server.wait()

    asyncio.run(run())


def _facts(folder: RunFolder, state: State, supervised: bool) -> dict[str, Any]:
    """Return the facts that `status` prints about a server.

    The phase "stale" means that the supervisor was killed, and the server with it. `grpc` is the target for gRPC
    clients. `http` and `metrics` are empty without open ports.
    """
    from shoal.backends.triton.client import grpc_target
    from shoal.backends.triton.run_state import HOST

    return {
        "phase": state.phase if supervised else "stale",
        "number": state.grpc_port,
        "grpc": grpc_target(state.url),
        "http": "" if state.socket else f"{HOST}:{state.http_port}",
        "metrics": "" if state.socket else f"{HOST}:{state.metrics_port}",
        "version": state.version,
        "pid": state.server.pid if supervised and state.server else None,
        "supervisor": state.supervisor.pid if supervised else None,
        "owner": {"up": "shoal triton up", "serve": "shoal serve --triton"}[state.owner],
        "since": int(state.since),
        "restarts": state.restarts,
        "repository": state.repository,
        "binary": state.binary,
        "log": str(folder.log),
        "error": state.error,
    }


def _format_lines(facts: dict[str, Any]) -> list[str]:
    """Format facts as lines of name and value: times as an age, empty values left out."""
    from shoal.cli._tables import age_text

    shown = dict(facts)
    if "since" in shown:
        shown["since"] = age_text(time.time() - shown["since"])
    return [f"{name:<11} {value}" for name, value in shown.items() if value not in (None, "")]


def _read_new(log: Path, size: int) -> tuple[str, int]:
    """Return the text written since the log had `size` bytes, and its size now. A truncated log is read from the
    start."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(size if end >= size else 0)
            text = file.read()
            return text.decode(errors="replace"), file.tell()
    except OSError:
        return "", size
