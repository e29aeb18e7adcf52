"""Tritons that crash, start late or restart, under load."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal.backends.triton.run_state import process_start
from tests.integration.llm_kit import free_port
from tests.integration.server_kit import Server, ShoalServer
from tests.integration.triton_app_kit import TINY, Traffic, embeddings, hub_of, logged, serving, until, vectors
from tests.integration.triton_kit import PATIENCE_S, OwnTriton, Triton, triton_home

pytestmark = pytest.mark.timeout(PATIENCE_S)

OUTAGE = re.compile(r"50[234] ")
"""Statuses of requests during an outage."""


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    with hub_of(tmp_path / "hub") as hub:
        yield {"SHOAL_HOME": str(triton_home(tmp_path / "home")), "HF_ENDPOINT": hub}


def crash(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: process_start(pid) is None, what="the end of Triton")


def check_recovery(server: Server, model: str, pid: int) -> None:
    """Kill Triton under load: failures are reported soon, and the same Shoal then answers all requests again."""
    before = vectors(server, model, "fish")
    with Traffic(server, model) as traffic:
        traffic.more()
        crash(pid)
        time.sleep(0.5)
        traffic.more(50)
        failed = len(traffic.failures)
        traffic.more(50)
        assert len(traffic.failures) == failed, traffic.failures[failed:]
    assert not [line for line in traffic.failures if not OUTAGE.match(line)], traffic.failures
    assert traffic.longest_s < 31, "longer than embed_timeout_s"
    assert np.allclose(vectors(server, model, "fish"), before, atol=1e-5)
    until(server.ready, what="readiness")
    assert server.process.poll() is None
    assert "Traceback" not in logged(server)


def test_triton_started_by_shoal(tmp_path: Path, env: dict[str, str]) -> None:
    """`--triton`: the supervisor restarts it with nothing loaded, and Shoal loads its model."""
    with serving(tmp_path / "server", [TINY], "--triton", env=env) as server:
        [pid] = re.findall(r"is ready at \S+, pid (\d+)", logged(server))
        check_recovery(server, TINY, int(pid))


@pytest.mark.parametrize("pushed", [False, True], ids=["written", "pushed"])
def test_triton_with_models_from_shoal(
    own_triton: OwnTriton, tmp_path: Path, env: dict[str, str], pushed: bool
) -> None:
    """The model is loaded again from its repository; pushed files are pushed again."""
    triton = own_triton()
    place = ["--triton-url", triton.url] + ([] if pushed else ["--triton-repository", str(triton.repository)])
    with serving(tmp_path / "server", [TINY], *place, env=env) as server:
        check_recovery(server, TINY, triton.pid)


def test_triton_run_by_others(own_triton: OwnTriton, tmp_path: Path) -> None:
    """Under load, and again while idle: the next request is answered."""
    triton = own_triton()
    with serving(tmp_path / "server", [f"triton://{triton.url}#near_free"]) as server:
        check_recovery(server, "near_free", triton.pid)
        pid = triton.pid
        crash(pid)
        until(lambda: triton.server.phase == "ready" and triton.server.pid not in (None, pid), what="the restart")
        status, _, answer = embeddings(server, "near_free", "a")
        assert status == 200, answer
        assert triton.state("near_free") == "READY"


def test_triton_that_starts_late(own_triton: OwnTriton, shoal_server: ShoalServer) -> None:
    """Shoal starts, is alive, logs the address that it waits for, and serves once Triton is up."""
    port = free_port()
    server = shoal_server([f"triton://127.0.0.1:{port}#near_free"], wait=False)
    until(lambda: server.request("GET", "/health/ready")[0] == 503, what="its answer")
    until(lambda: f"waiting for triton://127.0.0.1:{port}#near_free: " in server.log.read_text(), what="the reason")
    assert server.request("GET", "/health/live")[0] == 200
    status, _, answer = embeddings(server, "near_free", "a", **{"x-request-timeout": 2})
    assert status == 503, answer
    triton: Triton = own_triton(grpc_port=port)
    until(server.ready, what="readiness")
    assert vectors(server, "near_free", "a").shape == (1, 1024)
    assert triton.state("near_free") == "READY"


def test_a_whole_server_that_starts_late(own_triton: OwnTriton, shoal_server: ShoalServer) -> None:
    """With an address that names no model, Shoal is not ready until the server lists its models."""
    port = free_port()
    server = shoal_server([f"triton://127.0.0.1:{port}"], wait=False)
    until(lambda: server.request("GET", "/health/ready")[0] == 503, what="its answer")
    own_triton(grpc_port=port).load("near_free")
    until(lambda: embeddings(server, "near_free", "a")[0] == 200, what="the first answer")
    assert server.ready()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_triton_of_the_tests(own_triton: OwnTriton, capsys: pytest.CaptureFixture[str], hangs: bool) -> None:
    """`Triton.recover` shows why it died, and loads its models again. It kills one that hangs while it dies."""
    triton = own_triton()
    triton.load("near_free", "slow")
    triton.unload("slow")
    triton.recover()
    assert capsys.readouterr().out == ""
    if hangs:
        with triton.server.log.open("a") as log:
            log.write("Signal (11) received.\n")
    else:
        os.kill(triton.pid, signal.SIGSEGV)
        until(lambda: triton.server.restarts, what="the end of Triton")
    triton.recover()
    shown = capsys.readouterr().out
    assert "Signal (11) received" in shown
    assert f"tritonserver was ended by {'SIGKILL' if hangs else 'SIGSEGV'}" in shown
    assert (triton.state("near_free"), triton.state("slow")) == ("READY", "")
    triton.recover()
    assert capsys.readouterr().out == ""
