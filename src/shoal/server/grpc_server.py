"""The gRPC server: ports, limits and graceful shutdown, for any table of calls. Imported only where it is used."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import grpc
import grpc.aio

from shoal.errors import SetupError

_MAX_SOCKET_PATH = 107
_OWNER_ONLY = 0o177


class GrpcServer:
    """Serves calls on a port of `host`, on a Unix socket that only this user can open, or on both.

    It listens from its construction on, so that a conflict shows at once; early clients wait until `start`. Create it
    within a running event loop, and leave its context to stop it. `max_bytes` limits a request, `max_calls` those in
    progress. `max_connections` are divided among the addresses that it listens on; a connection beyond them is closed.
    `port`: the one it listens on.
    """

    def __init__(
        self, host: str, port: int | None, path: str | None, *, max_bytes: int, max_calls: int, max_connections: int
    ) -> None:
        self.max_connections = max_connections
        listeners = (_count_addresses(host) if port is not None else 0) + (path is not None)
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", max_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # a second server on the same port must fail instead of taking half of the calls
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # else clients' keepalive ends connections
            ("grpc.server_handshake_timeout_ms", 5_000),  # silent and idle connections hold file descriptors
            ("grpc.max_allowed_incoming_connections", max(1, max_connections // listeners)),  # of each listener
            ("grpc.max_connection_idle_ms", 300_000),
            ("grpc.keepalive_time_ms", 120_000),  # a stream of a lost host would hold its place for hours
            ("grpc.keepalive_timeout_ms", 20_000),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=max_calls)
        self.port = self._listen(_to_target(host, port)) if port is not None else None
        if path is not None:
            self._listen_on_socket(Path(path))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(0.0)

    async def start(self, calls: grpc.GenericRpcHandler) -> None:
        """Start to answer calls."""
        self._server.add_generic_rpc_handlers((calls,))
        await self._server.start()

    async def stop(self, timeout_s: float) -> None:
        """Refuse new calls, and return once those in progress are answered; after `timeout_s` they are canceled."""
        await self._server.stop(timeout_s)

    def _listen(self, target: str) -> int:
        try:
            return self._server.add_insecure_port(target)
        except RuntimeError:
            raise SetupError(
                f"cannot listen for gRPC on {target}: it is in use, or not an address of this machine; choose another "
                "with --grpc-port or --grpc-socket"
            ) from None

    def _listen_on_socket(self, path: Path) -> None:
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            raise SetupError(
                f"the path {path} of grpc_socket is longer than {_MAX_SOCKET_PATH} bytes: choose a shorter one"
            )
        if not path.parent.is_dir():
            raise SetupError(f"the folder of grpc_socket, {path.parent}, does not exist: create it")
        if _is_answered(path):
            raise SetupError(f"another server listens on {path}: stop it, or choose another grpc_socket")
        before = os.umask(_OWNER_ONLY)
        try:
            self._listen(f"unix:{quote(str(path))}")
        finally:
            os.umask(before)


def _is_answered(path: Path) -> bool:
    """Whether a server accepts connections on a Unix socket; gRPC would take over its file."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _count_addresses(host: str) -> int:
    """Return how many addresses a host has; gRPC listens on each. A wrong host counts as one: listening on it fails."""
    try:
        return len({address[0] for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError:
        return 1


def _to_target(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
