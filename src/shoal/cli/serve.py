"""`shoal serve`: run the server from a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.backends import parse_served
from shoal.cli._completion import complete_model
from shoal.cli._errors import exit_code
from shoal.cli._options import with_settings
from shoal.cli.banner import announce, browser_url
from shoal.config import LoadedConfig, check_bind
from shoal.config.settings import ModelTable, Settings
from shoal.errors import SetupError, ShoalError

if TYPE_CHECKING:
    from shoal.app import App
    from shoal.app.front import Front
    from shoal.core.registry import ModelCard
    from shoal.server import HttpServer
    from shoal.server.grpc_server import GrpcServer

LOADING_NOTE_S = 10.0
"""Interval of the log lines about models that are still loading."""

POLL_INTERVAL_S = 0.5
"""Interval at which to check whether models are merely waiting. The banner waits for models that are still loading."""

MAX_FOLDER = 80
"""Bytes of the path of a folder for a Unix socket, whose own path may have 107."""

CORES_PER_FRONT = 4
"""With `workers` 0, one front for this many cores: the others compute."""

log = logging.getLogger("shoal")


@with_settings()
def serve(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ADDRESS",
            autocompletion=complete_model,
            help="[NAME=]ADDRESS[,ADDRESS...]: hf:org/name (hf: may be left out), pypi:package, file:path,"
            " triton://host:8001#model (without #model every one of that server); none serves the default model.",
        ),
    ] = None,
    *,
    loaded: LoadedConfig,
) -> None:
    """Serve models over HTTP."""
    import uvloop

    from shoal.server import bind
    from shoal.server.descriptors import raise_descriptor_limit

    settings = loaded.settings
    check_bind(settings)
    for address in loaded.served:  # report a malformed address before anything listens
        parse_served(address)
    raise_descriptor_limit()
    with contextlib.ExitStack() as stack:
        workers = _count_workers(settings.workers)
        if workers > 1:
            raise typer.Exit(_serve_by_workers(stack, loaded, workers))
        sockets = [stack.enter_context(one) for one in bind(settings.host, settings.port)]
        as_json = stack.enter_context(configure_logs(settings))
        _report_listening(settings, sockets)
        # Imported late: a port in use or a wrong setting is reported before the slow imports.
        from shoal.app import open_app
        from shoal.cli.progress import TerminalProgress

        progress = stack.enter_context(TerminalProgress(log=log))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        try:
            runner.run(_serve(open_app(loaded, loaded.served, progress), loaded, sockets))
        except ShoalError as error:
            if not as_json:
                raise
            log.error("%s", error.message)  # readers of the log expect no plain text after it
            raise typer.Exit(exit_code(error)) from None


def _count_workers(setting: int) -> int:
    """Return the number of front processes; 1 means none beside the process that has the models."""
    from shoal.machine_limits import usable_cores

    return setting or max(1, usable_cores() // CORES_PER_FRONT)


def configure_logs(settings: Settings) -> AbstractContextManager[bool]:
    from shoal.observability import logs

    return logs.configure(settings.log_level, settings.log_format, access=settings.access_log)


def _report_listening(settings: Settings, sockets: Sequence[socket.socket]) -> None:
    log.info("listening on %s, loading models", browser_url(settings.host, sockets[0].getsockname()[1]))


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """A temporary folder that only this user can open, with a path that a socket may have."""
    place = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="shoal-", dir=place if len(place) < MAX_FOLDER else "/tmp") as folder:
        yield Path(folder)


def _serve_by_workers(stack: contextlib.ExitStack, loaded: LoadedConfig, workers: int) -> int:
    """Serve with several processes, and return the exit code."""
    from shoal.cli._processes import describe_programs
    from shoal.server import bind_shared, stop_signals
    from shoal.workers.supervisor import Supervisor

    settings = loaded.settings
    fronts = bind_shared(settings.host, settings.port, workers)
    for each in fronts:
        for one in each:
            stack.enter_context(one)
    stack.enter_context(configure_logs(settings))
    _report_listening(settings, fronts[0])
    path = stack.enter_context(_private_folder()) / "models"
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(str(path))
    listener.listen(4 * workers)
    pulse = os.pipe()
    for end in pulse:
        stack.callback(os.close, end)
        os.set_blocking(end, False)
    programs = describe_programs(loaded, path, listener, fronts, pulse[1])

    async def run() -> int:
        stop = asyncio.Event()
        with stop_signals(stop):
            drain_s = settings.drain_delay_s + settings.drain_timeout_s
            return await Supervisor(*programs, drain_s, pulse=pulse[0]).run(stop)

    return asyncio.run(run())  # asyncio's own event loop starts processes safely, and this one has no requests


async def _serve(
    opening: AbstractAsyncContextManager[App], loaded: LoadedConfig, sockets: Sequence[socket.socket]
) -> None:
    """Serve until a signal arrives. Raises SetupError if none of the named models can be served."""
    from shoal.server import stop_signals

    settings, stop = loaded.settings, asyncio.Event()
    with stop_signals(stop):
        grpc_server = bind_grpc(settings)
        async with grpc_server or contextlib.nullcontext(), opening as app:
            if grpc_server is not None:
                await grpc_server.start(app.build_grpc_calls())
            server = build_http_server(app, sockets, settings, grpc_server)
            loading = asyncio.create_task(announce_models(app, loaded, sockets[0].getsockname()[1]))
            loading.add_done_callback(partial(stop_after_failure, stop))
            try:
                await server.run(app.gateway, stop)
            finally:
                loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading


def build_http_server(
    app: App | Front,
    sockets: Sequence[socket.socket],
    settings: Settings,
    grpc_server: GrpcServer | None = None,
) -> HttpServer:
    """Build the HTTP server of an application, which drains as the settings say, and `grpc_server` with it."""
    from shoal.server import HttpServer

    return HttpServer(
        app.asgi,
        sockets,
        app.asgi.render_error,
        drain_delay_s=settings.drain_delay_s,
        drain_timeout_s=settings.drain_timeout_s,
        drain_idle_s=settings.drain_idle_s,
        others=[] if grpc_server is None else [grpc_server],
    )


def stop_after_failure(stop: asyncio.Event, loading: asyncio.Task[None]) -> None:
    """Stop the server if `loading` ended with an error."""
    if not loading.cancelled() and loading.exception():
        stop.set()


def bind_grpc(settings: Settings) -> GrpcServer | None:
    if settings.grpc_port is None and settings.grpc_socket is None:
        return None
    from shoal.server.descriptors import max_grpc_connections
    from shoal.server.grpc_server import GrpcServer

    made = GrpcServer(
        settings.host,
        settings.grpc_port,
        settings.grpc_socket,
        max_bytes=settings.max_body_bytes,
        max_calls=settings.max_queue_items,
        max_connections=max_grpc_connections(),
    )
    if made.port is not None:
        log.info("listening for gRPC on %s port %d", settings.host, made.port)
    if settings.grpc_socket is not None:
        log.info("listening for gRPC on %s", settings.grpc_socket)
    return made


async def announce_models(app: App, loaded: LoadedConfig, port: int) -> None:
    """Announce the served models once they are known. Raises SetupError if models were named and all of them failed.

    Naming no model is not a failure, because clients load what they need. Neither is a model that waits for its server:
    the others are announced at once, and all of them again when that server is up.
    """
    loading = asyncio.create_task(app.wait_until_loaded())
    logged_failures: set[str] = set()
    try:
        next_note = time.monotonic() + LOADING_NOTE_S
        while not loading.done():
            await asyncio.wait({loading}, timeout=POLL_INTERVAL_S)
            if time.monotonic() >= next_note and not loading.done():
                next_note += LOADING_NOTE_S
                _note_loading(app.gateway.models())
            waiting = _find_waiting(app.gateway.models())
            if waiting and not loading.done():
                for card in waiting:
                    log.warning("%s is not served yet: %s", card.name, card.note)
                _report_models(app, loaded.settings, port, logged_failures)
                await loading
    finally:
        loading.cancel()
    _report_models(app, loaded.settings, port, logged_failures)
    if not app.gateway.pending_sources:  # their models are not known yet
        _warn_unused_tables(loaded.models, [card.name for card in app.gateway.models()])


def _note_loading(cards: Sequence[ModelCard]) -> None:
    """Log what is still loading, so that a long start does not look like a hang."""
    for card in cards:
        if card.state == "loading":
            log.info("%s is still loading%s", card.name, f": {card.note}" if card.note else "")


def _find_waiting(cards: Sequence[ModelCard]) -> list[ModelCard]:
    """Return the models that wait for a server, or none if some model is still loading otherwise."""
    from shoal.core.lifecycle.loading import is_blocked  # late, as the app

    loading = [card for card in cards if card.state == "loading"]
    return loading if all(is_blocked(card.note) for card in loading) else []


def _report_models(app: App, settings: Settings, port: int, logged_failures: set[str]) -> None:
    """Announce the served models. `logged_failures` holds the failures logged so far; new ones are added to it."""
    cards = app.gateway.models()
    failed = [card for card in cards if card.state == "failed"]
    if failed and len(failed) == len(cards):
        raise SetupError("; ".join(f"{card.name}: {card.error}" for card in failed))
    for card in failed:
        if card.name not in logged_failures:
            logged_failures.add(card.name)
            log.error("%s cannot be served: %s", card.name, card.error)
    for place, reason in app.gateway.pending_sources.items():
        log.warning("%s is not ready yet: %s", place, reason)
    announce(settings, port, cards)


def _warn_unused_tables(tables: Mapping[str, ModelTable], names: Sequence[str]) -> None:
    """Warn about tables without effect, most often because their name is an alias or misspelled.

    Without any model, tables are for the models that clients will load.
    """
    for name, table in tables.items():
        if names and name not in names and not table.backends:
            log.warning(
                '[models."%s"] has no backends and matches no served model (%s): it applies once a model of that name '
                "is loaded",
                name,
                ", ".join(names),
            )
