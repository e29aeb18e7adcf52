"""Real servers in their own processes, for every test that needs one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.server_kit import LISTENING, Processes, Server, ShoalServer, environment, wait_until
from tests.integration.triton_kit import Triton, own_triton, triton

__all__ = ["own_triton", "triton"]  # pytest finds fixtures by name in this module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limit the test itself to 60 s, without its fixtures: the first start of a Triton on a machine downloads it."""
    for item in items:
        if {"triton", "own_triton"} & set(getattr(item, "fixturenames", ())) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(60, func_only=True))


@pytest.fixture(autouse=True)
def triton_recovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """If the tests' Triton dies, show its log with the test in which it did, and spare those after it."""
    shared: Triton | None = request.getfixturevalue("triton") if "triton" in request.fixturenames else None
    yield
    if shared is not None:
        shared.recover()


@contextmanager
def processes_in(folder: Path) -> Iterator[Processes]:
    """Start `python ARGUMENTS...` in this folder; yields (process, file of its standard error). Kills it at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, env: Mapping[str, str] | None = None) -> tuple[subprocess.Popen[bytes], Path]:
        log = folder / f"process-{len(started)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                env=environment(env),
                cwd=folder,
            )
        started.append(process)
        return process, log

    yield start
    for process in started:
        process.kill()
        process.wait()


def starting(processes: Processes) -> ShoalServer:
    def start(addresses: Sequence[str], *flags: str, env: Mapping[str, str] | None = None, wait: bool = True) -> Server:
        process, log = processes("-m", "shoal", "serve", *addresses, "--port", "0", *flags, env=env)
        wait_until(lambda: bool(LISTENING.search(log.read_text())), process, log)
        match = LISTENING.search(log.read_text())
        assert match
        server = Server(process, int(match[1]), log)
        if wait:
            wait_until(server.ready, process, log)
        return server

    return start


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """As `processes_in`, in an empty folder."""
    with processes_in(tmp_path) as start:
        yield start


@pytest.fixture
def shoal_server(processes: Processes) -> ShoalServer:
    """`shoal_server(addresses, *flags, env={}, wait=True)` returns a `Server` that is ready, on a port of its own."""
    return starting(processes)


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShoalServer]:
    """As `shoal_server`, for servers shared by the tests of one file, which must not change them."""
    with processes_in(tmp_path_factory.mktemp("shared")) as start:
        yield starting(start)
