"""Servers of language models in their own processes: start, kill, restart, and read metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from tests.integration.server_kit import LISTENING, PATIENCE_S, Server, environment, wait_until

MODEL = "talker"
FAKE = f"{MODEL}=fake:"
UNBOUNDED_QUEUE = ("--max-queue-ms", "0")
"""Flags of a server that queues a burst of requests for as long as a busy machine takes, up to their deadlines."""


@contextmanager
def running(
    folder: Path, *addresses: str, flags: tuple[str, ...] = (), port: int = 0, wait: bool = True
) -> Iterator[Server]:
    """Run `shoal serve` with these addresses and flags, ready unless `wait` is false; kill it at the end. `folder`
    holds its home, its log and all other files it writes; it may exist already."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"server-{len(list(folder.glob('server-*.log')))}.log"
    command = [sys.executable, "-m", "shoal", "serve", *addresses, "--port", str(port), *flags]
    env = environment({"SHOAL_HOME": str(folder / "home")})
    with ExitStack() as stack:
        file = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file, env=env, cwd=folder
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        wait_until(lambda: bool(LISTENING.search(log.read_text())), process, log)
        match = LISTENING.search(log.read_text())
        assert match
        server = Server(process, int(match[1]), log)
        if wait:
            wait_until(server.ready, process, log)
        yield server


def upstream_of(server: Server, model: str = MODEL) -> str:
    """Return the address of that server's model, for another server."""
    return f"openai+{server.base_url}/v1#{model}"


def user_messages(text: str) -> list[dict[str, str]]:
    """Return a conversation of one message."""
    return [{"role": "user", "content": text}]


def metric(server: Server, name: str, **labels: str) -> float:
    """Return the sum of a metric over its series with these labels; 0 if there is none."""
    status, _, body = server.request("GET", "/metrics")
    assert status == 200
    total = 0.0
    for line in body.decode().splitlines():
        series, _, value = line.rpartition(" ")
        named = series == name or series.startswith(f"{name}{{")
        if named and all(f'{label}="{wanted}"' in series for label, wanted in labels.items()):
            total += float(value)
    return total


def until(true: Callable[[], bool]) -> None:
    """Wait with a generous timeout: tests must not depend on speed."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def free_port() -> int:
    """Return a free port of 127.0.0.1 below the range of ephemeral ports. A port of that range may be taken before a
    server listens on it, even by a client that connects to it and reaches itself."""
    while True:
        port = random.randint(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def encode_request(path: str, body: Mapping[str, Any] | bytes) -> bytes:
    """Return the bytes of a request on the wire."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def ask(server: Server, path: str, body: Mapping[str, Any] | bytes) -> socket.socket:
    """Send a request on a new connection; the caller reads the answer."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(encode_request(path, body))
    return connection


def read_until(connection: socket.socket, expected: bytes) -> bytes:
    """Read up to the piece that contains `wanted`; fail if the connection ends first."""
    received = b""
    while expected not in received:
        piece = connection.recv(65536)
        assert piece, received
        received += piece
    return received


@asynccontextmanager
async def running_beside(folder: Path, *addresses: str, **how: Any) -> AsyncIterator[Server]:
    """As `running`, without blocking the event loop, which may run the server's upstream."""
    with ExitStack() as stack:
        yield await asyncio.to_thread(stack.enter_context, running(folder, *addresses, **how))
