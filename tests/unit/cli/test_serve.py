"""What `shoal serve` prints about its models, and when it exits."""

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


class FakeApp:
    """An App with these cards; `over` ends the loading of all models."""

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
    """Patch `announce` and return the model names of each call."""
    names: list[list[str]] = []
    monkeypatch.setattr(serve, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(serve, "announce", lambda settings, port, cards: names.append([card.name for card in cards]))
    return names


def start_announcing(fake_app: FakeApp, **tables: ModelTable) -> asyncio.Task[None]:
    loaded = LoadedConfig(Settings(), {}, models=tables)
    return asyncio.create_task(serve.announce_models(cast(Any, fake_app), loaded, 80))


async def let_command_poll() -> None:
    """Give the command time for several polls."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_models_are_announced_together(announcements: list[list[str]], caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is announced while a model loads; a failed model is logged as an error."""
    fake_app = FakeApp(LOADING, WAITING)
    task = start_announcing(fake_app)
    await let_command_poll()
    assert announcements == []
    fake_app.cards = (READY, FAILED)
    fake_app.over.set()
    await task
    assert announcements == [["good", "bad"]]
    assert caplog.text.count("no such folder") == 1
    assert "bad cannot be served: no such folder" in caplog.text


async def test_a_long_start_is_logged(
    announcements: list[list[str]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a model is doing is said every few seconds, so that a long start does not look like a hang."""
    monkeypatch.setattr(serve, "LOADING_NOTE_S", 0.0)
    caplog.set_level("INFO")
    fake_app = FakeApp(READY, LOADING)
    task = start_announcing(fake_app)
    await let_command_poll()
    assert "big is still loading: downloading model.onnx" in caplog.messages
    assert not [line for line in caplog.messages if line.startswith("good is still")]
    fake_app.over.set()
    await task


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_failure_is_the_last_line_of_the_log(form: str, tmp_path: Path) -> None:
    """A failure is printed once, or logged once as a JSON record."""
    result = CliRunner().invoke(
        app, ["serve", f"bad=file:{tmp_path}/nowhere", "--port", "0", "--log-format", form, "--home", str(tmp_path)]
    )
    lines = result.stderr.splitlines()
    assert result.exit_code == 1
    assert sum("does not exist" in line for line in lines) == 1
    if form == "json":
        events = [json.loads(line) for line in lines]
        assert events[-1]["level"] == "error"
        assert events[-1]["message"].startswith("bad: file:")
    else:
        assert lines[-1].startswith("error: bad: file:")


async def test_failures_are_logged_once_beside_waiting_models(
    announcements: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """A failure is logged once although the announcement is repeated."""
    fake_app = FakeApp(READY, FAILED, WAITING)
    task = start_announcing(fake_app)
    await let_command_poll()
    fake_app.cards = (READY, FAILED)
    fake_app.over.set()
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
async def test_a_table_without_effect_is_logged(
    announcements: list[list[str]],
    caplog: pytest.LogCaptureFixture,
    table: str,
    cards: tuple[ModelCard, ...],
    told_of: bool,
) -> None:
    """For example a table under an alias: its settings would be ignored silently."""
    fake_app = FakeApp(*cards)
    fake_app.over.set()
    await start_announcing(fake_app, **{table: ModelTable(backends=("fake:",) if table == "later" else ())})
    words = '[models."other"] has no backends and matches no served model (good): it applies once'
    assert (words in caplog.text) is told_of
    assert len(announcements) == 1


async def test_a_table_of_an_unreachable_server_is_not_reported(
    announcements: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Its models are not known."""
    fake_app = FakeApp(READY)
    fake_app.pending_sources["openai+http://away/v1"] = "not reachable"
    fake_app.over.set()
    await start_announcing(fake_app, other=ModelTable())
    assert "is not ready yet" in caplog.text
    assert "matches no served model" not in caplog.text


async def test_a_server_without_models_keeps_running(announcements: list[list[str]]) -> None:
    """A server may start without a model; clients load them."""
    fake_app = FakeApp()
    fake_app.over.set()
    await start_announcing(fake_app)
    assert announcements == [[]]


async def test_an_unreachable_server_without_a_model_name_is_logged(
    announcements: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """It was named without a model and is unreachable: this is logged, and is not a failure."""
    fake_app = FakeApp()
    fake_app.pending_sources["triton://far:8001"] = "connection refused"
    fake_app.over.set()
    await start_announcing(fake_app)
    assert "triton://far:8001 is not ready yet: connection refused" in caplog.text
    assert announcements == [[]]


async def test_the_command_exits_when_every_model_failed(announcements: list[list[str]]) -> None:
    """The command exits with the reasons of all failures."""
    fake_app = FakeApp(FAILED, replace(FAILED, name="worse", error="not a model"))
    fake_app.over.set()
    with pytest.raises(SetupError, match="bad: no such folder; worse: not a model"):
        await start_announcing(fake_app)
    assert announcements == []


async def test_a_waiting_model_does_not_delay_others(
    announcements: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """The other models are announced, the wait is logged once, and everything is announced again when the server is
    back."""
    fake_app = FakeApp(READY, WAITING)
    with caplog.at_level(logging.WARNING):
        task = start_announcing(fake_app)
        await let_command_poll()
        assert announcements == [["good", "far"]]
        assert caplog.text.count("far is not served yet: waiting for triton://far:8001: refused") == 1
        fake_app.cards = (READY, replace(READY, name="far"))
        fake_app.over.set()
        await task
    assert announcements == [["good", "far"]] * 2


async def test_the_server_runs_on_for_a_waiting_model(announcements: list[list[str]]) -> None:
    """The server keeps running for a model that is still waiting."""
    fake_app = FakeApp(FAILED, WAITING)
    task = start_announcing(fake_app)
    await let_command_poll()
    assert announcements == [["bad", "far"]]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_stopping_cancels_the_announcement(announcements: list[list[str]]) -> None:
    """No task is left when the server stops first."""
    before = asyncio.all_tasks()
    task = start_announcing(FakeApp(LOADING))
    await let_command_poll()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await let_command_poll()
    assert asyncio.all_tasks() == before
