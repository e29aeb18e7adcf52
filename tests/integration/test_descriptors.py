"""A server with few file descriptors."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from tests.integration.server_kit import LISTENING, Processes, Server, wait_until

FEW = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from shoal.cli import main
sys.exit(main())
"""
REQUEST = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def server(processes: Processes) -> Server:
    process, log = processes("-c", FEW, "serve", "fake:", "--port", "0")
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
