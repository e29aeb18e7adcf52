"""Servers in this process, and fixtures that open their models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.backends import parse_address
from shoal.backends.base import backoff
from shoal.backends.base.backend import Target
from shoal.backends.openai import engine as engine_module
from shoal.backends.openai.open import open_upstream
from shoal.config.settings import ModelTable, Settings
from shoal.core.protocols import Engine, ModelFacts, Observer, Pipeline, Runner
from shoal.core.scheduling.lane import Lane, LaneOptions
from shoal.core.scheduling.planner import Limits
from shoal.core.threads import Threads
from tests.fakes.openai_server import FakeUpstream
from tests.unit.backends.openai.open.kit import Open, chats


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll all the time while waiting for a server."""
    monkeypatch.setattr(backoff, "RETRY_S", (0.001,))
    monkeypatch.setattr(engine_module, "LOOK_S", 0.001)
    monkeypatch.setattr(engine_module, "LOOK_AGAIN_S", 0.001)


@pytest.fixture
async def server() -> AsyncIterator[FakeUpstream]:
    """A server that embeds and chats."""
    async with FakeUpstream() as made:
        made.on("/chat/completions", chats)
        yield made


@pytest.fixture
async def opened(server: FakeUpstream, tmp_path: Path) -> AsyncIterator[Open]:
    """Open the model of these servers (by default `server`), and close it at the end."""
    runners: list[Runner] = []
    threads = Threads("prepare", 1)

    def lane(pipeline: Pipeline, engines: Sequence[Engine], facts: ModelFacts) -> Lane:
        options = LaneOptions(model="m", limits=Limits(), max_items=4096, space=facts.space)
        return Lane(pipeline, engines, options, threads=threads, observer=Observer())

    async def open_(
        *servers: FakeUpstream, model: str = "up/model", notes: list[str] | None = None, **fields: Any
    ) -> Runner:
        addresses = [parse_address(f"openai+http://{one.target}#{model}") for one in servers or (server,)]
        settings = fields.pop("settings", Settings(home=str(tmp_path), offline=True, connect_timeout_s=30.0))
        target = Target(
            name="m",
            source=",".join(map(str, addresses)),
            addresses=addresses,
            settings=settings,
            table=ModelTable(**fields),
        )
        messages: list[str] = [] if notes is None else notes
        runner = await open_upstream(target, lane, messages.append)
        runners.append(runner)
        return runner

    yield open_
    for runner in runners:
        await runner.aclose()
    threads.close()
