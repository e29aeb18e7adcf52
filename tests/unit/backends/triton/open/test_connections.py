"""Connections to Triton servers: one per server, made from the settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shoal.backends import parse_address
from shoal.backends.triton.client import Client, Tls
from shoal.backends.triton.open import connections
from shoal.backends.triton.open.connections import TritonConnections, with_port
from shoal.config.settings import ModelTable, Settings
from shoal.errors import ConfigError
from tests.fakes.triton import FakeTriton


@pytest.fixture
async def tritons(triton: FakeTriton) -> AsyncIterator[TritonConnections]:
    made = TritonConnections(Settings(triton_metadata=("triton-grpc-protocol-model: se:cret", "x: y")))
    yield made
    await made.aclose()


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("gpu1", "gpu1:8001"),
        ("gpu1:9000", "gpu1:9000"),
        ("[::1]", "[::1]:8001"),
        ("[::1]:9000", "[::1]:9000"),
        ("10.0.0.1", "10.0.0.1:8001"),
        ("/run/8001/grpc:8001", "/run/8001/grpc:8001"),
        ("/run/grpc", "/run/grpc"),
    ],
)
def test_tritons_port_is_the_default(target: str, expected: str) -> None:
    assert with_port(target) == expected


async def test_a_server_has_one_connection(tritons: TritonConnections) -> None:
    """Concurrent callers share it; with TLS there is another one."""
    found = await asyncio.gather(*(tritons.connect("gpu1", tls=False) for _ in range(5)))
    assert len({id(client) for client, _ in found}) == 1
    assert (await tritons.connect("gpu1", tls=True))[0] is not found[0][0]
    assert (await tritons.connect("gpu2", tls=False))[0] is not found[0][0]


async def test_metadata_goes_with_every_call(triton: FakeTriton, tritons: TritonConnections) -> None:
    """Only the first colon separates a name from its value."""
    triton.key = ("triton-grpc-protocol-model", "se:cret")
    client, _ = await tritons.connect(triton.target, tls=False)
    assert await client.server_live(deadline=asyncio.get_running_loop().time() + 30)
    assert triton.metadata[0]["x"] == "y"


async def test_files_of_tls_are_read_when_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read as bytes, and only for `tritons:` addresses; the error names a missing file."""
    made: list[Any] = []

    def client(target: str, *, tls: Tls | None = None, **options: Any) -> Client:
        made.append(tls)
        return Client(target, tls=tls, **options)

    monkeypatch.setattr(connections, "Client", client)
    for name in ("ca", "cert"):
        (tmp_path / name).write_bytes(name.encode())
    tritons = TritonConnections(Settings(triton_ca_file=str(tmp_path / "ca"), triton_cert_file=str(tmp_path / "cert")))
    await tritons.connect("gpu1", tls=False)
    await tritons.connect("gpu1", tls=True)
    assert made == [None, Tls(b"ca", b"cert", None)]
    await tritons.aclose()
    absent = TritonConnections(Settings(triton_ca_file=str(tmp_path / "absent")))
    await absent.connect("gpu1", tls=False)
    with pytest.raises(ConfigError, match=r"absent cannot be read: No such file"):
        await absent.connect("gpu1", tls=True)
    await absent.aclose()


async def test_an_address_becomes_a_target(tritons: TritonConnections) -> None:
    """With the version, the tensor names of the model's table, and the timeouts of the settings."""
    table = ModelTable(input_names={"input_ids": "ids"}, output_names={"embedding": "out"})
    settings = Settings(connect_timeout_s=2.0, load_timeout_s=20.0)
    target = await tritons.endpoint(parse_address("triton://gpu1#m@3"), table, settings)
    assert (target.model, target.version, target.address) == ("m", "3", "triton://gpu1#m@3")
    assert (target.names.inputs, target.names.outputs) == ({"input_ids": "ids"}, {"embedding": "out"})
    assert (target.rpc_timeout_s, target.load_timeout_s, target.load, target.ensemble) == (2.0, 20.0, None, "")
    other = await tritons.endpoint(parse_address("triton://gpu1#n"), ModelTable(), settings)
    assert other.client is target.client
    assert (await tritons.endpoint(parse_address("tritons://gpu1#n"), table, settings)).client is not target.client


async def test_closing_closes_every_connection(tritons: TritonConnections) -> None:
    """Even if closing one of them fails."""
    closed: list[str] = []
    for name in ("a", "b"):
        client, _ = await tritons.connect(name, tls=False)

        async def aclose(name: str = name) -> None:
            closed.append(name)
            if name == "b":
                raise OSError("stuck")

        client.aclose = aclose  # type: ignore[method-assign]
    with pytest.raises(OSError, match="stuck"):
        await tritons.aclose()
    assert sorted(closed) == ["a", "b"]
