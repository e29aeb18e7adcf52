"""A Triton that Shoal starts takes nothing from anybody else: another user of the machine, or a web page."""

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

# Becomes another user only after all imports: Shoal may be installed where that user may not read.
CALLS = """
import asyncio, json, os, sys
import grpc.aio
from shoal.backends.triton.client import grpc_target
from shoal.backends.triton.errors import rpc_error

async def ask(target):
    told = {}
    for path in sys.argv[3:]:
        name = path.rpartition("/")[2]
        async with grpc.aio.insecure_channel(grpc_target(target)) as channel:
            try:
                await channel.unary_unary(path)(b"", timeout=10)  # an empty request of any type
                told[name] = "answered"
            except grpc.aio.AioRpcError as error:
                told[name] = type(rpc_error(error)).__name__
    return told

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
"""Triton's calls with one answer."""


def calls(target: str, user: int = 0) -> dict[str, str]:
    """What a client of that user (0: this one) gets for each call of Triton's API."""
    result = subprocess.run(
        [sys.executable, "-c", CALLS, target, str(user), *PATHS],
        env=environment(),
        capture_output=True,
        check=True,
        timeout=300,
    )
    found: dict[str, str] = json.loads(result.stdout)
    return found


def open_files(pid: int) -> list[str]:
    """What its file descriptors are links to; a descriptor or a process that ends meanwhile is left out."""
    found: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(link))
    return found


def listening(pid: int) -> list[str]:
    """The addresses of the network, of both versions of IP, that a process and its children listen on."""
    sockets = {target for one in (pid, *children(pid)) for target in open_files(one)}
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return [fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets]


def is_private(path: Path) -> bool:
    return not stat.S_IMODE(path.stat().st_mode) & 0o077


@pytest.fixture(scope="module")
def closed() -> Iterator[Triton]:
    """A Triton as users get it, below folders that everybody may enter."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        with running_triton(Path(made), open_ports=False, load=("near_free",), backoff_s=0.1) as started:
            yield started


def check_closed(triton: Triton) -> None:
    socket = Path(triton.url)
    assert stat.S_ISSOCK(socket.stat().st_mode)
    assert is_private(socket.parent)
    assert not is_private(socket.parent.parent), "the socket's own folder is what keeps others out"
    assert children(triton.pid), "a model is loaded, whose process is looked at too"
    assert listening(triton.pid) == []


def test_it_listens_on_nothing_that_others_may_open(closed: Triton) -> None:
    """No port of HTTP, gRPC or metrics, so nothing for a web page; a socket in a folder of this user's."""
    check_closed(closed)


def test_another_user_reaches_no_call(closed: Triton) -> None:
    """Health, metadata, inference, shared memory, configuration, repository, statistics, trace and logs: nothing
    answers. Only root can try it as somebody else; everybody checks the modes, above, that it depends on."""
    own = calls(closed.url)
    assert own["ServerLive"] == own["ServerMetadata"] == own["RepositoryIndex"] == own["LogSettings"] == "answered"
    assert "TransportFailed" not in own.values()
    if os.geteuid() == 0:
        assert set(calls(closed.url, NOBODY).values()) == {"TransportFailed"}


def test_no_secret_is_on_its_command_line(closed: Triton) -> None:
    """Which every user may read: there is none, so whoever reads all of it is no nearer."""
    line = Path(f"/proc/{closed.pid}/cmdline").read_bytes().decode().split("\0")
    assert not [argument for argument in line if "restricted" in argument or "key" in argument]
    assert f"--grpc-address=unix:{closed.url.rpartition(':')[0]}" in line


def test_a_restart_is_as_closed(closed: Triton) -> None:
    """After kill -9: at the same address, and for nobody else."""
    before, url = closed.pid, closed.url
    os.kill(before, signal.SIGKILL)
    until(lambda: closed.server.restarts == 1 and closed.server.phase == "ready")
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


def test_what_open_ports_let_in(triton: Triton, tmp_path: Path) -> None:
    """A web page can send this request, of plain text and without being asked for leave: its code runs. So ports are
    opened on purpose alone, and the checks above notice those that are open."""
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
