"""Real servers in processes of their own, for every test that needs one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.server_kit import LISTENING, Processes, Server, ShoalServer, environment, wait_until
from tests.integration.triton_kit import own_triton, triton

__all__ = ["own_triton", "triton"]  # fixtures are found by their names here


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first start of a Triton on a machine fetches it, which is no time of the test that happens to be first."""
    for item in items:
        if {"triton", "own_triton"} & set(getattr(item, "fixturenames", ())) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(60, func_only=True))


@contextmanager
def processes_in(folder: Path) -> Iterator[Processes]:
    """Start `python ARGUMENTS...` in this folder; (process, file of its standard error). Killed at the end."""
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
        found = LISTENING.search(log.read_text())
        assert found
        server = Server(process, int(found[1]), log)
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
    """`shoal_server(addresses, *flags, env={}, wait=True)` answers a `Server` that is ready, on a port of its own."""
    return starting(processes)


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShoalServer]:
    """As `shoal_server`; its servers live as long as the tests of one file, which leave them as they were."""
    with processes_in(tmp_path_factory.mktemp("shared")) as start:
        yield starting(start)
