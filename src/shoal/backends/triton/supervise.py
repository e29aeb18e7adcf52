"""Servers that outlive the command that starts them: a separate process supervises them.

`python -m shoal.backends.triton.supervise OPTIONS` is that process, OPTIONS being TritonOptions as JSON. It writes one
line of JSON to its standard output when the server is ready or has failed to start, and runs until SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from shoal.backends.triton.build_folder import Progress
from shoal.backends.triton.run_state import RunFolder, State, run_folders
from shoal.backends.triton.server import TritonOptions, obtain, run_triton
from shoal.decoding import json_decoder
from shoal.errors import SetupError, ShoalError

_DOWN_MARGIN_S = 5.0


class _StartResult(msgspec.Struct):
    """The `port` of the gRPC API, or the error."""

    port: int = 0
    error: str = ""


_RESULT = json_decoder(_StartResult)


def start(options: TritonOptions, progress: Progress | None = None) -> tuple[RunFolder, State, bool]:
    """Return a supervised server for the options, and whether it was started now; a running one is reused.

    Blocks until it is ready. Raises SetupError, SourceError and Cancelled as `run_triton` does.
    """
    folder = RunFolder(options.run / str(options.grpc_port))
    if (running := _find_running(folder, options)) is not None:
        return folder, running, False
    obtain(options, progress)  # here, where the progress is shown
    options.run.mkdir(parents=True, exist_ok=True)
    with (options.run / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, _encode(options)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            cwd=options.run,
        )
    with process:
        assert process.stdout is not None, "its standard output is a pipe"
        try:
            line = process.stdout.readline()
        except BaseException:  # Ctrl-C before it is ready: do not leave it running in the background
            process.terminate()
            raise
        answer = _RESULT.decode(line) if line else _StartResult(error="its supervisor exited immediately")
        if answer.error:
            raise SetupError(answer.error if line else f"{answer.error}; see {options.run / 'supervisor.log'}")
        process.returncode = 0  # it keeps running: leaving this block must not wait for its end
    folder = RunFolder(options.run / str(answer.port))
    if (state := folder.read()) is None:
        raise SetupError(f"Triton was ready on port {answer.port} but has exited; see {folder.log}")
    return folder, state, True


def _find_running(folder: RunFolder, options: TritonOptions) -> State | None:
    """Return the server that already has the wanted port. Raises SetupError if it differs or is not ready."""
    state = folder.read() if options.grpc_port and folder.is_supervised() else None
    if state is None:
        return None
    if state.repository != str(options.folder):
        raise SetupError(
            f"Shoal already runs a Triton on port {options.grpc_port} with the repository {state.repository}:"
            " choose other ports (0 picks free ones), or run `shoal triton down` first"
        )
    if bool(state.socket) == options.open_ports:
        runs = "without open ports" if state.socket else "with open ports"
        raise SetupError(
            f"Shoal already runs a Triton on port {options.grpc_port} {runs}: run `shoal triton down` first"
        )
    if state.phase != "ready":
        raise SetupError(f"the Triton on port {options.grpc_port} is {state.phase}: see `shoal triton logs`")
    return state


def list_servers(run: Path) -> list[tuple[RunFolder, State, bool]]:
    """Return every server under a run folder, by port, and whether it is still supervised; else its state is stale."""
    found = ((folder, folder.read()) for folder in run_folders(run))
    return [(folder, state, folder.is_supervised()) for folder, state in found if state is not None]


def stop(folder: RunFolder, state: State, options: TritonOptions) -> bool:
    """End a server and its supervisor; return False for a stale one. Raises SetupError if `up` did not start it."""
    if not folder.is_supervised():
        # Its supervisor has ended: claiming the folder clears its shared memory.
        if folder.claim():
            folder.release(keep_log=True)
        return False
    if state.owner != "up":
        raise SetupError(
            f"the Triton on port {state.grpc_port} belongs to `shoal serve --triton` (pid {state.supervisor.pid}) and"
            " stops with it: stop that process"
        )
    state.supervisor.signal(signal.SIGTERM)
    end = time.monotonic() + options.exit_timeout_s + _DOWN_MARGIN_S
    while folder.is_supervised():
        if time.monotonic() > end:
            state.supervisor.signal(signal.SIGKILL)  # the kernel then kills its server
        time.sleep(0.05)
    return True


def _encode(options: TritonOptions) -> str:
    """Encode options as JSON with absolute paths: the supervisor runs in another folder."""
    options = replace(options, home=options.home.expanduser().absolute(), repository=options.folder)
    return msgspec.json.encode(options, enc_hook=str).decode()


def _decode(text: str) -> TritonOptions:
    return json_decoder(TritonOptions, dec_hook=_to_path).decode(text)


def _to_path(kind: type, value: Any) -> Any:
    return kind(value)


async def supervise(options: TritonOptions) -> None:
    """Run a server until SIGTERM, or supervision gives up. Raises as `run_triton` does, and SetupError on giving up."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    starting = asyncio.create_task(_run(options))
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        await starting
    stopping.cancel()
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting


async def _run(options: TritonOptions) -> None:
    async with run_triton(options) as server:
        _send_result(_StartResult(port=int(server.url.rpartition(":")[2])))
        await server.wait()


def _send_result(answer: _StartResult) -> None:
    """Write the one line and close the pipe: its reader may exit after that."""
    os.write(1, msgspec.json.encode(answer) + b"\n")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def main() -> None:
    try:
        asyncio.run(supervise(_decode(sys.argv[1])))
    except ShoalError as error:
        with contextlib.suppress(OSError):
            _send_result(_StartResult(error=error.message))
        sys.exit(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {error.message}")


if __name__ == "__main__":
    main()
