"""A Triton that Shoal starts accepts nothing from others: neither another user of the machine nor a web page."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pybase64
import pytest

from shoal.backends.triton.run_state import process_start
from tests.integration.server_kit import environment
from tests.integration.test_triton_server import children, until
from tests.integration.triton_kit import PATIENCE_S, Triton, running_triton

pytestmark = pytest.mark.timeout(PATIENCE_S)

NOBODY = 65534

# Switches to the other user only after all imports: that user may not be able to read Shoal's folder.
CALLS = """
import asyncio, json, os, sys
import grpc.aio
from shoal.backends.triton.client import grpc_target
from shoal.backends.triton.errors import rpc_error

async def ask(target):
    outcomes = {}
    for path in sys.argv[3:]:
        name = path.rpartition("/")[2]
        async with grpc.aio.insecure_channel(grpc_target(target)) as channel:
            try:
                await channel.unary_unary(path)(b"", timeout=10)  # an empty request of any type
                outcomes[name] = "answered"
            except grpc.aio.AioRpcError as error:
                outcomes[name] = type(rpc_error(error)).__name__
    return outcomes

if int(sys.argv[2]):
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
print(json.dumps(asyncio.run(ask(sys.argv[1]))))
"""


SHARED_MEMORY = [
    f"{kind}SharedMemory{call}" for kind in ("System", "Cuda") for call in ("Status", "Register", "Unregister")
]
RPC_NAMES = [
    *("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelInfer", "ModelConfig"),
    *("ModelStatistics", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    *("TraceSetting", "LogSettings", *SHARED_MEMORY),
]
PATHS = [*(f"/inference.GRPCInferenceService/{name}" for name in RPC_NAMES), "/grpc.health.v1.Health/Check"]
"""Triton's unary calls."""


def calls(target: str, user: int = 0) -> dict[str, str]:
    """Return the outcome of each call of Triton's API for a client of that user (0: the current one)."""
    result = subprocess.run(
        [sys.executable, "-c", CALLS, target, str(user), *PATHS],
        env=environment(),
        capture_output=True,
        check=True,
        timeout=300,
    )
    outcomes: dict[str, str] = json.loads(result.stdout)
    return outcomes


def open_files(pid: int) -> list[str]:
    """Return the link targets of its file descriptors, without a descriptor or process that ends meanwhile."""
    targets: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                targets.append(os.readlink(link))
    return targets


def listening(pid: int) -> list[str]:
    """Return the IPv4 and IPv6 addresses that a process and its children listen on."""
    sockets = {target for one in (pid, *children(pid)) for target in open_files(one)}
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return [fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets]


def is_private(path: Path) -> bool:
    return not stat.S_IMODE(path.stat().st_mode) & 0o077


@pytest.fixture(scope="module")
def closed() -> Iterator[Triton]:
    """A Triton with users' settings, below folders that everybody may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with running_triton(Path(folder), open_ports=False, load=("near_free",), backoff_s=0.1) as started:
            yield started


def check_closed(triton: Triton) -> None:
    socket = Path(triton.url)
    assert stat.S_ISSOCK(socket.stat().st_mode)
    assert is_private(socket.parent)
    assert not is_private(socket.parent.parent), "the socket's own folder is what keeps others out"
    assert children(triton.pid), "a model is loaded, whose process is looked at too"
    assert listening(triton.pid) == []


def test_it_listens_only_on_a_private_socket(closed: Triton) -> None:
    """No port of HTTP, gRPC or metrics, so nothing for a web page; a socket in a folder of the current user."""
    check_closed(closed)


def test_another_user_reaches_no_call(closed: Triton) -> None:
    """Health, metadata, inference, shared memory, configuration, repository, statistics, trace and logs: all calls
    fail. Only root can run them as another user; the file modes that protect them are checked above for everyone."""
    own = calls(closed.url)
    assert own["ServerLive"] == own["ServerMetadata"] == own["RepositoryIndex"] == own["LogSettings"] == "answered"
    assert "TransportFailed" not in own.values()
    if os.geteuid() == 0:
        assert set(calls(closed.url, NOBODY).values()) == {"TransportFailed"}


def test_no_secret_is_on_its_command_line(closed: Triton) -> None:
    """Every user may read it, so it must not help to get in."""
    line = Path(f"/proc/{closed.pid}/cmdline").read_bytes().decode().split("\0")
    assert not [argument for argument in line if "restricted" in argument or "key" in argument]
    assert f"--grpc-address=unix:{closed.url.rpartition(':')[0]}" in line


def test_a_restart_is_as_closed(closed: Triton) -> None:
    """After kill -9 it has the same address, and is as private."""
    before, url = closed.pid, closed.url
    os.kill(before, signal.SIGKILL)
    until(lambda: closed.server.restarts == 1 and closed.server.phase == "ready", "the restart of Triton")
    assert process_start(before) is None
    assert closed.url == url
    check_closed(closed)


CODE = """\
import os
import triton_python_backend_utils as utils
open({place!r}, "w").close()
class TritonPythonModel:
    pass
"""


def test_open_ports_let_web_pages_run_code(triton: Triton, tmp_path: Path) -> None:
    """A web page can send this plain-text request without a preflight, and its code runs. So ports open only on
    request, and the checks above detect open ones."""
    place = tmp_path / "code ran"
    config = {"name": "from_a_page", "backend": "python", "input": [], "output": []}
    code = pybase64.b64encode(CODE.format(place=str(place)).encode()).decode()
    body = {"parameters": {"config": json.dumps(config), "file:1/model.py": code}}
    host, _, port = triton.server.http_url.partition(":")
    connection = HTTPConnection(host, int(port), timeout=60)
    headers = {"content-type": "text/plain", "origin": "https://example.com", "sec-fetch-site": "cross-site"}
    connection.request("POST", "/v2/repository/models/from_a_page/load", json.dumps(body), headers)
    connection.getresponse().read()
    connection.close()
    assert place.exists()
    assert len(listening(triton.pid)) == 3
    if os.geteuid() == 0:
        assert calls(triton.url, NOBODY)["RepositoryIndex"] == "answered"
