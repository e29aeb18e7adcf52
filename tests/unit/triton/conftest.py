"""A server in this process, connections to it, and no pauses between looks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

import pytest

from shoal.backends.triton import control as control_module
from shoal.backends.triton import engine as engine_module
from shoal.settings import Settings
from shoal.triton import connections, host, models
from shoal.triton.connections import Tritons
from tests.fakes.triton import FakeTriton
from tests.unit.triton.kit import grpc_in_use


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a server looks all the time."""
    monkeypatch.setattr(engine_module, "LOOK_S", 0.001)
    for module in (engine_module, models, host):
        monkeypatch.setattr(module, "RETRY_S", (0.001,))
    monkeypatch.setattr(connections, "Control", partial(control_module.Control, pauses=(0.001,)))


@pytest.fixture
async def triton() -> AsyncIterator[FakeTriton]:
    async with grpc_in_use(), FakeTriton() as server:
        yield server


@pytest.fixture
async def tritons(triton: FakeTriton) -> AsyncIterator[Tritons]:
    made = Tritons(Settings())
    yield made
    await made.aclose()
