"""Engines and links over a gRPC server in this process."""

from __future__ import annotations

from typing import Any

from shoal.backends.tei.engine import TeiEngine
from shoal.backends.tei.grpc_link import GrpcLink
from tests.fakes.tei_grpc import FakeTeiGrpc
from tests.unit.backends.tei.kit import FakeAdmission, info_from


def link_to(server: FakeTeiGrpc, *, key: str | None = None, **more: Any) -> GrpcLink:
    return GrpcLink(server.target, key=key or server.script.api_key or None, connect_timeout_s=2.0, **more)


async def engine_to(server: FakeTeiGrpc, admission: FakeAdmission | None = None, **more: Any) -> TeiEngine:
    """Return an engine in service, and clear the server's calls of its start."""
    link = link_to(server)
    more.setdefault("serving", True)
    engine = TeiEngine(link, await info_from(link), "tei-0", admit=admission or FakeAdmission(), **more)
    server.calls.clear()
    return engine
