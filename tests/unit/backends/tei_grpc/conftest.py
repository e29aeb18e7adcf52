"""A server in this process, without pauses between checks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shoal.backends.base import backoff
from shoal.backends.tei import engine as engine_module
from shoal.backends.tei.engine import TeiEngine
from tests.fakes.tei_grpc import FakeTeiGrpc
from tests.unit.backends.tei.kit import FakeAdmission, close
from tests.unit.backends.tei.open.conftest import opened
from tests.unit.backends.tei_grpc.kit import engine_to
from tests.unit.backends.triton.open.kit import grpc_in_use

__all__ = ["opened"]


@pytest.fixture(autouse=True)
def fast_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "RETRY_S", (0.001,))
    monkeypatch.setattr(engine_module, "LOOK_S", 0.001)
    monkeypatch.setattr(engine_module, "LOOK_AGAIN_S", 0.001)
    monkeypatch.setattr(engine_module, "ASK_EVERY", 10**9)


@pytest.fixture(autouse=True)
async def threads() -> AsyncIterator[None]:
    async with grpc_in_use():
        yield


@pytest.fixture
async def server(threads: None) -> AsyncIterator[FakeTeiGrpc]:
    async with FakeTeiGrpc() as made:
        yield made


@pytest.fixture
def admission() -> FakeAdmission:
    return FakeAdmission()


@pytest.fixture
async def engine(server: FakeTeiGrpc, admission: FakeAdmission) -> AsyncIterator[TeiEngine]:
    made = await engine_to(server, admission)
    yield made
    await close(made)
