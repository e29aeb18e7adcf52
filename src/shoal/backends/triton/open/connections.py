"""The connections of this process to Triton servers, made from the settings."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.backends.triton.client import Client, Tls
from shoal.backends.triton.control import Control
from shoal.backends.triton.engine import Endpoint
from shoal.backends.triton.schema import TensorNames
from shoal.config.settings import ModelTable, Settings
from shoal.core.closing import close_all
from shoal.errors import ConfigError
from shoal.models.address import Address


class TritonConnections:
    """The connections to Triton servers: one per server, shared by all its models."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._servers: dict[tuple[str, bool], tuple[Client, Control]] = {}
        self._lock = asyncio.Lock()

    async def connect(self, target: str, *, tls: bool) -> tuple[Client, Control]:
        """Return the client of `host[:port]` or a socket's path. Raises ConfigError for an unreadable TLS file."""
        async with self._lock:
            found = self._servers.get((target, tls))
            if found is None:
                tls_files = await asyncio.to_thread(self._read_tls) if tls else None
                client = Client(with_port(target), tls=tls_files, metadata=self._metadata())
                found = self._servers[target, tls] = (client, Control(client))
            return found

    async def endpoint(self, address: Address, table: ModelTable, settings: Settings) -> Endpoint:
        """Return the endpoint of an address with a model."""
        client, control = await self.connect(address.target, tls=address.scheme == "tritons")
        return Endpoint(
            client=client,
            control=control,
            address=str(address),
            model=address.model,
            version=address.revision,
            names=TensorNames(
                inputs=_to_strings(table.input_names),
                outputs=_to_strings(table.output_names),
                scores=not {"rerank", "classify"}.isdisjoint(table.tasks),
            ),
            rpc_timeout_s=settings.connect_timeout_s,
            load_timeout_s=settings.load_timeout_s,
        )

    async def aclose(self) -> None:
        servers, self._servers = self._servers, {}
        await close_all(*(client.aclose for client, _ in servers.values()))

    def _read_tls(self) -> Tls:
        files = (self._settings.triton_ca_file, self._settings.triton_cert_file, self._settings.triton_key_file)
        return Tls(*(_read_file(name) for name in files))

    def _metadata(self) -> list[tuple[str, str]]:
        pairs = (line.partition(":") for line in self._settings.triton_metadata)
        return [(name.strip().lower(), value.strip()) for name, _, value in pairs]


def _to_strings(names: Mapping[Any, str]) -> dict[str, str]:
    return {str(usual): own for usual, own in names.items()}


def with_port(target: str) -> str:
    """Return `host:port`, with Triton's default port if there is none; a socket's path unchanged."""
    if target.startswith("/"):
        return target
    host, colon, port = target.rpartition(":")
    return target if colon and port.isdigit() and host else f"{target}:8001"


def _read_file(name: str | None) -> bytes | None:
    if name is None:
        return None
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from error
