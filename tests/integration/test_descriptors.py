"""A server with few file descriptors."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from typing import Any

import grpc
import pytest

from shoal.kserve import SERVICE
from tests.integration.server_kit import LISTENING, Processes, Server, wait_until

FEW = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from shoal.cli import main
sys.exit(main())
"""
GRPC_LISTENING = re.compile(r"listening for gRPC on \S+ port (\d+)")
REQUEST = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def flags() -> tuple[str, ...]:
    return ()


@pytest.fixture
def server(processes: Processes, flags: tuple[str, ...]) -> Server:
    process, log = processes("-c", FEW, "serve", "fake:", "--port", "0", *flags)
    wait_until(lambda: bool(LISTENING.search(log.read_text())), process, log)
    match = LISTENING.search(log.read_text())
    assert match
    server = Server(process, int(match[1]), log)
    wait_until(server.ready, process, log)
    return server


def test_the_limit_is_logged_and_the_server_recovers(server: Server) -> None:
    """With more connections than descriptors, accepted ones are served and the others wait for a free descriptor. One
    log line says what to do; nothing is reset, and models can still open files."""

    def answered(connection: socket.socket) -> bool:
        connection.sendall(REQUEST)
        return connection.recv(65536).startswith(b"HTTP/1.1 200")

    def complaints() -> list[str]:
        records = [json.loads(line) for line in server.log.read_text().splitlines()]
        return [record["message"] for record in records if "descriptors" in record["message"]]

    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30)) for _ in range(200)
        ]
        assert answered(clients[0])
        wait_until(lambda: bool(complaints()), server.process, server.log)
        assert answered(clients[0])
        for one in clients[-60:]:
            one.sendall(REQUEST)
        for one in clients[:-60]:
            one.close()
        for one in clients[-60:]:
            assert one.recv(65536).startswith(b"HTTP/1.1 200")
    assert server.request("POST", "/v1/embeddings", {"model": "fake", "input": "a"})[0] == 200
    (line,) = complaints()
    assert "ulimit -n" in line


@pytest.mark.parametrize("flags", [("--grpc-port", "0")])
def test_grpc_connections_have_a_share(server: Server) -> None:
    """An eighth of the limit of 128. Further ones are closed, HTTP's have their own share, and both serve."""
    match = GRPC_LISTENING.search(server.log.read_text())
    assert match
    port = int(match[1])

    def is_open(connection: socket.socket) -> bool:
        connection.settimeout(0.5)
        try:
            return bool(connection.recv(1))
        except TimeoutError:
            return True
        except ConnectionError:
            return False

    with contextlib.ExitStack() as stack:
        https = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(100)]
        grpcs = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(60)]
        assert sum(map(is_open, grpcs)) == 16
        https[0].sendall(REQUEST)
        assert https[0].recv(65536).startswith(b"HTTP/1.1 200")
        assert server.request("POST", "/v1/embeddings", {"model": "fake", "input": "a"})[0] == 200
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        live: Any = channel.unary_unary(SERVICE + "ServerLive")
        assert live(b"", timeout=20, wait_for_ready=True) == b"\x08\x01"
