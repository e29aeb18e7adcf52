"""The processes of `shoal serve --workers`: `python -m shoal.cli._processes ROLE ...`, started by the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.cli._errors import exit_code, say
from shoal.config import LoadedConfig
from shoal.errors import ShoalError
from shoal.parent_process import end_with_parent
from shoal.workers.supervisor import SETUP_FAILED, TICK_S, Program

if TYPE_CHECKING:
    from shoal.config.settings import Settings
    from shoal.server.grpc_server import GrpcServer

CONNECT_S = 3.0
"""Time that a front waits for the model process before it answers that this one is starting."""


class Setup(msgspec.Struct, frozen=True):
    """What a process is started with. `path`: the Unix socket of the model process; `port`: where the `fronts`
    listen; `pulse`: the descriptor to which the model process writes that it is alive."""

    loaded: LoadedConfig
    path: str
    port: int
    parent: int
    fronts: int
    pulse: int


def describe_programs(
    loaded: LoadedConfig, path: Path, listener: socket.socket, fronts: Sequence[Sequence[socket.socket]], pulse: int
) -> tuple[Program, list[Program]]:
    """Return the model process, which accepts the fronts from `listener` at `path` and writes to the pipe `pulse`, and
    a front for each of the sets of sockets."""
    port = fronts[0][0].getsockname()[1]
    payload = pickle.dumps(Setup(loaded, str(path), port, os.getpid(), len(fronts), pulse))
    descriptors = [[listener.fileno()], *([one.fileno() for one in sockets] for sockets in fronts)]
    models, *rest = (
        Program(
            name="the model process" if not number else f"front process {number}",
            module=__name__,
            arguments=["front" if number else "models", *map(str, files)],
            payload=payload,
            files=files if number else [*files, pulse],
        )
        for number, files in enumerate(descriptors)
    )
    return models, rest


def main(role: str, *descriptors: str) -> None:
    """Run one of the processes."""
    import uvloop

    from shoal.cli.serve import configure_logs
    from shoal.server.descriptors import raise_descriptor_limit

    setup: Setup = pickle.loads(sys.stdin.buffer.read())
    end_with_parent(setup.parent)
    raise_descriptor_limit()
    sockets = [socket.socket(fileno=int(each)) for each in descriptors]
    for one in sockets:
        one.setblocking(False)
    with (
        configure_logs(setup.loaded.settings) as as_json,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve_front(setup, sockets) if role == "front" else _serve_models(setup, sockets[0], as_json))


async def _serve_front(setup: Setup, sockets: Sequence[socket.socket]) -> None:
    from shoal.app.front import open_front
    from shoal.cli.serve import build_http_server
    from shoal.server import stop_signals

    stop = asyncio.Event()
    with stop_signals(stop, quiet=True):
        async with open_front(setup.loaded, setup.path, setup.fronts) as front:
            server = build_http_server(front, sockets, setup.loaded.settings)
            await front.gateway.wait_until_connected(CONNECT_S)  # until then connections wait in the backlog
            await server.run(front.gateway, stop)


async def _serve_models(setup: Setup, listener: socket.socket, as_json: bool) -> None:
    from shoal.app import open_app
    from shoal.app.front_tokenizers import describe_tokenizer
    from shoal.app.loaded_models import note_loaded, restore_loaded
    from shoal.app.remote_models import describe_remote
    from shoal.cli.progress import TerminalProgress
    from shoal.cli.serve import announce_models, bind_grpc, log
    from shoal.server import stop_signals
    from shoal.workers.models import ModelServer

    settings, stop = setup.loaded.settings, asyncio.Event()
    servers: list[ModelServer] = []
    try:
        with stop_signals(stop, quiet=True), TerminalProgress(log=log) as progress:
            grpc_server = bind_grpc(settings)
            opening = open_app(
                setup.loaded,
                setup.loaded.served,
                progress,
                lambda: [setup.parent, *(pid for server in servers for pid in server.pids())],
                lambda: [each for server in servers for each in server.replicas()],
            )
            async with grpc_server or contextlib.nullcontext(), opening as app:
                if grpc_server is not None:
                    await grpc_server.start(app.build_grpc_calls())
                server = ModelServer(
                    app.gateway,
                    app.asgi,
                    observer=app.counts,
                    record_lag=app.observer.record_lag,
                    describe_remote=describe_remote,
                    describe_tokenizer=describe_tokenizer,
                )
                servers.append(server)
                if app.log is not None:
                    app.log.connect(server.look_up)
                drain_s = settings.drain_delay_s + settings.drain_timeout_s + 2.0
                lifecycle, file = app.gateway.lifecycle, Path(setup.path).with_name("loaded")
                assert lifecycle is not None
                await restore_loaded(lifecycle, file)
                async with asyncio.TaskGroup() as group:
                    lasting = [group.create_task(each) for each in (note_loaded(lifecycle, file), _beat(setup.pulse))]
                    loading = group.create_task(announce_models(app, setup.loaded, setup.port))
                    serving_grpc = group.create_task(_serve_grpc(grpc_server, settings, stop))
                    await server.run(listener, stop, drain_s)
                    await serving_grpc
                    for each in (loading, *lasting):
                        each.cancel()
    except (ShoalError, ExceptionGroup) as failure:
        error = failure if isinstance(failure, ShoalError) else failure.exceptions[0]
        if not isinstance(error, ShoalError):
            raise
        if as_json:
            log.error("%s", error.message)
        else:
            say("error", error.message, "bold red")
        raise SystemExit(SETUP_FAILED + exit_code(error)) from None


async def _beat(pulse: int) -> None:
    """Tell the supervisor that this event loop is alive."""
    while True:
        with contextlib.suppress(BlockingIOError):  # the supervisor is stopped
            os.write(pulse, b".")
        await asyncio.sleep(TICK_S)


async def _serve_grpc(server: GrpcServer | None, settings: Settings, stop: asyncio.Event) -> None:
    """Stop the gRPC server after `stop`, as the fronts stop theirs."""
    await stop.wait()
    if server is not None:
        await asyncio.sleep(settings.drain_delay_s)
        await server.stop(settings.drain_timeout_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
