"""Models over servers in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.backends import parse_address
from shoal.backends.base import backoff
from shoal.backends.base.backend import Target
from shoal.backends.tei import engine as engine_module
from shoal.backends.tei.open import TeiModel, open_tei
from shoal.config.settings import ModelTable, Settings
from shoal.core.protocols import Engine, ModelFacts, Observer, Pipeline, Runner
from shoal.core.scheduling.lane import Lane, LaneOptions
from shoal.core.scheduling.planner import Limits
from shoal.core.threads import Threads
from tests.fakes.tei import FakeTei
from tests.unit.backends.tei.open.kit import Open


@pytest.fixture(autouse=True)
def fast_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll all the time while waiting for a server, without extra calls of the model."""
    monkeypatch.setattr(backoff, "RETRY_S", (0.001,))
    monkeypatch.setattr(engine_module, "LOOK_S", 0.001)
    monkeypatch.setattr(engine_module, "LOOK_AGAIN_S", 0.001)
    monkeypatch.setattr(engine_module, "ASK_EVERY", 10**9)


@pytest.fixture
async def server() -> AsyncIterator[FakeTei]:
    async with FakeTei() as made:
        yield made


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    """Open the model of these servers, and close it at the end."""
    runners: list[Runner] = []
    threads = Threads("prepare", 1)

    def lane(pipeline: Pipeline, engines: Sequence[Engine], facts: ModelFacts) -> Lane:
        options = LaneOptions(model="m", limits=Limits(), max_items=4096, space=facts.space)
        return Lane(pipeline, engines, options, threads=threads, observer=Observer())

    async def open_(
        *servers: FakeTei, model: str = "", notes: list[str] | None = None, key: str | None = None, **fields: Any
    ) -> TeiModel:
        tail = f"#{model}" if model else ""
        overrides = fields.pop("settings", {})
        target = Target(
            name="m",
            source=",".join(f"{one.address}{tail}" for one in servers),
            addresses=[parse_address(f"{one.address}{tail}") for one in servers],
            settings=Settings(
                home=str(tmp_path), offline=True, connect_timeout_s=30.0, upstream_api_key=key, **overrides
            ),
            table=ModelTable(**fields),
        )
        messages: list[str] = [] if notes is None else notes
        runner = await open_tei(target, lane, messages.append)
        assert isinstance(runner, TeiModel)
        runners.append(runner)
        return runner

    yield open_
    for runner in runners:
        await runner.aclose()
    threads.close()
