"""What `shoal serve` says of its models, and when it gives up."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from shoal.cli import app, serve
from shoal.config import LoadedConfig
from shoal.config.settings import ModelTable, Settings
from shoal.core.registry import ModelCard
from shoal.errors import SetupError

READY = ModelCard("good", (), "ready", 0, None, None, ())
FAILED = replace(READY, name="bad", state="failed", error="no such folder")
LOADING = replace(READY, name="big", state="loading", note="downloading model.onnx")
WAITING = replace(READY, name="far", state="loading", note="waiting for triton://far:8001: refused")


class Opened:
    """An App of these cards; `over` ends the loading of all of them."""

    def __init__(self, *cards: ModelCard) -> None:
        self.cards = cards
        self.over = asyncio.Event()
        self.gateway = self
        self.pending_sources: dict[str, str] = {}

    def models(self) -> tuple[ModelCard, ...]:
        return self.cards

    async def wait_until_loaded(self) -> None:
        await self.over.wait()


@pytest.fixture
def announcements(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names in each announcement."""
    names: list[list[str]] = []
    monkeypatch.setattr(serve, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(serve, "announce", lambda settings, port, cards: names.append([card.name for card in cards]))
    return names


def announcing(opened: Opened, **tables: ModelTable) -> asyncio.Task[None]:
    loaded = LoadedConfig(Settings(), {}, models=tables)
    return asyncio.create_task(serve._announce(cast(Any, opened), loaded, 80))


async def looks() -> None:
    """Time for the command to look several times."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_all_of_it_at_once(announcements: list[list[str]], caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is announced while a model loads; one that failed is an error in the log beside the others."""
    opened = Opened(LOADING, WAITING)
    task = announcing(opened)
    await looks()
    assert announcements == []
    opened.cards = (READY, FAILED)
    opened.over.set()
    await task
    assert announcements == [["good", "bad"]]
    assert caplog.text.count("no such folder") == 1
    assert "bad cannot be served: no such folder" in caplog.text


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_failure_is_the_last_line_of_the_log(form: str, tmp_path: Path) -> None:
    """Told once, as a record where the log is made of them."""
    result = CliRunner().invoke(
        app, ["serve", f"bad=file:{tmp_path}/nowhere", "--port", "0", "--log-format", form, "--home", str(tmp_path)]
    )
    lines = result.stderr.splitlines()
    assert result.exit_code == 1
    assert sum("does not exist" in line for line in lines) == 1
    if form == "json":
        found = [json.loads(line) for line in lines]
        assert found[-1]["level"] == "error"
        assert found[-1]["message"].startswith("bad: file:")
    else:
        assert lines[-1].startswith("error: bad: file:")


async def test_failures_are_told_once_beside_what_waits(
    announcements: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Though the announcement comes twice."""
    opened = Opened(READY, FAILED, WAITING)
    task = announcing(opened)
    await looks()
    opened.cards = (READY, FAILED)
    opened.over.set()
    await task
    assert len(announcements) == 2
    assert caplog.text.count("no such folder") == 1


@pytest.mark.parametrize(
    ("table", "cards", "told_of"),
    [
        ("other", (READY,), True),
        ("good", (READY,), False),
        ("later", (READY,), False),
        ("other", (), False),
    ],
    ids=["of nobody", "of a model", "of one that can be loaded", "for clients to load"],
)
async def test_a_table_that_changes_nothing_is_told(
    announcements: list[list[str]],
    caplog: pytest.LogCaptureFixture,
    table: str,
    cards: tuple[ModelCard, ...],
    told_of: bool,
) -> None:
    """Such as one under an alias: its settings would be missed without a word."""
    opened = Opened(*cards)
    opened.over.set()
    await announcing(opened, **{table: ModelTable(backends=("fake:",) if table == "later" else ())})
    words = '[models."other"] has no backends and names no model that is served (good): it counts once'
    assert (words in caplog.text) is told_of
    assert len(announcements) == 1


async def test_a_table_may_be_of_a_server_that_is_away(
    announcements: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows which models it has."""
    opened = Opened(READY)
    opened.pending_sources["openai+http://away/v1"] = "not reachable"
    opened.over.set()
    await announcing(opened, other=ModelTable())
    assert "is not there yet" in caplog.text
    assert "names no model" not in caplog.text


async def test_no_model_at_all_is_no_failure(announcements: list[list[str]]) -> None:
    """Clients load what they want."""
    opened = Opened()
    opened.over.set()
    await announcing(opened)
    assert announcements == [[]]


async def test_a_server_whose_models_are_not_known_yet(
    announcements: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """It was named without a model, and is not there: said, and no failure."""
    opened = Opened()
    opened.pending_sources["triton://far:8001"] = "connection refused"
    opened.over.set()
    await announcing(opened)
    assert "triton://far:8001 is not there yet: connection refused" in caplog.text
    assert announcements == [[]]


async def test_when_every_model_failed_it_gives_up(announcements: list[list[str]]) -> None:
    """With the reasons of all."""
    opened = Opened(FAILED, replace(FAILED, name="worse", error="not a model"))
    opened.over.set()
    with pytest.raises(SetupError, match="bad: no such folder; worse: not a model"):
        await announcing(opened)
    assert announcements == []


async def test_a_model_that_waits_holds_nothing_up(
    announcements: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """The rest is announced, the wait is said once, and everything again when the server came."""
    opened = Opened(READY, WAITING)
    with caplog.at_level(logging.WARNING):
        task = announcing(opened)
        await looks()
        assert announcements == [["good", "far"]]
        assert caplog.text.count("far is not served yet: waiting for triton://far:8001: refused") == 1
        opened.cards = (READY, replace(READY, name="far"))
        opened.over.set()
        await task
    assert announcements == [["good", "far"]] * 2


async def test_a_model_that_waits_outlives_failures(announcements: list[list[str]]) -> None:
    """The server stays for it."""
    opened = Opened(FAILED, WAITING)
    task = announcing(opened)
    await looks()
    assert announcements == [["bad", "far"]]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_leaving_ends_the_waiting(announcements: list[list[str]]) -> None:
    """No task is left behind when the server stops first."""
    before = asyncio.all_tasks()
    task = announcing(Opened(LOADING))
    await looks()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await looks()
    assert asyncio.all_tasks() == before
