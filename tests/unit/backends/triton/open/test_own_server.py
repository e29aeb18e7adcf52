"""Waiting for a Triton, and one that Shoal starts itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal.backends.triton.open import host as host_module
from shoal.backends.triton.open.connections import TritonConnections
from shoal.backends.triton.open.host import TritonHost
from shoal.backends.triton.repository import Repository
from shoal.backends.triton.server import TritonOptions
from shoal.config.settings import Settings
from shoal.errors import InternalError, SetupError
from shoal.models.progress import Progress
from shoal.models.store import StoredModel
from tests.fakes.triton import FakeTriton
from tests.unit.backends.triton.open.kit import reads, until

NAME = "org/mini"
FOLDER = "org~mini"


class TestReaching:
    async def test_a_server_that_is_there(self, pushing: TritonHost, triton: FakeTriton) -> None:
        """Readiness is not required: one model that failed to load makes the whole server not ready."""
        triton.ready = False
        notes: list[str] = []
        await pushing.wait_reachable(notes.append)
        assert notes == []

    async def test_why_it_is_waited_for(
        self, pushing: TritonHost, triton: FakeTriton, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        triton.live = False
        await triton.stop()
        notes: list[str] = []
        waiting = asyncio.create_task(pushing.wait_reachable(notes.append))
        await until(lambda: any("is not reachable" in note for note in notes))
        await triton.start()
        await until(lambda: notes[-1] == f"waiting for Triton at {triton.target}: it is not live yet")
        triton.live = True
        await waiting

    async def test_a_server_that_answers_nothing(
        self, settings: Settings, tritons: TritonConnections, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It counts as unreachable."""
        call, hung = triton.call, True

        async def hang(name: str, request: Any) -> Any:
            if hung:
                await asyncio.Event().wait()
            return await call(name, request)

        monkeypatch.setattr(triton, "call", hang)
        host = TritonHost(msgspec.structs.replace(settings, connect_timeout_s=0.02), tritons)
        notes: list[str] = []
        waiting = asyncio.create_task(host.wait_reachable(notes.append))
        await until(lambda: any("did not answer" in note for note in notes))
        hung = False
        await waiting


class FakeRunTriton:
    """Replaces `run_triton`: yields the fake server once `there` is set, or fails."""

    def __init__(self, triton: FakeTriton) -> None:
        self.triton = triton
        self.there = asyncio.Event()
        self.error: Exception | None = None
        self.options: TritonOptions | None = None
        self.running = False

    @asynccontextmanager
    async def __call__(self, options: TritonOptions, progress: Progress | None = None) -> AsyncIterator[Any]:
        self.options = options
        await self.there.wait()
        if self.error is not None:
            raise self.error
        self.running = True
        try:
            yield SimpleNamespace(url=self.triton.target, repository=options.folder, platforms=("python",))
        finally:
            self.running = False


class TestItsOwnServer:
    @pytest.fixture
    def own(self, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> FakeRunTriton:
        made = FakeRunTriton(triton)
        monkeypatch.setattr(host_module, "run_triton", made)
        return made

    @pytest.fixture
    def alone(self, tmp_path: Path) -> Settings:
        return Settings(home=str(tmp_path / "home"), triton=True, offline=True)

    async def test_it_runs_as_long_as_the_host(
        self, own: FakeRunTriton, alone: Settings, tritons: TritonConnections, triton: FakeTriton, tmp_path: Path
    ) -> None:
        """On free ports and with Shoal's own repository, which can be listed before the server is up."""
        async with TritonHost.open_from_settings(alone, tritons) as host:
            assert host is not None
            assert await host.find_entry(NAME) is None
            assert not await host.is_foreign(NAME)
            notes: list[str] = []
            waiting = asyncio.create_task(host.wait_reachable(notes.append))
            await until(lambda: notes == ["waiting for Triton to start"])
            own.there.set()
            await waiting
            assert (host.url, own.running) == (triton.target, True)
            assert isinstance(host.repository, Repository)
            assert host.repository.folder == tmp_path / "home" / "triton" / "repository"
        assert not own.running
        assert own.options is not None
        assert (own.options.grpc_port, own.options.http_port, own.options.offline) == (0, 0, True)

    async def test_its_backends_are_known(
        self,
        own: FakeRunTriton,
        alone: Settings,
        tritons: TritonConnections,
        triton: FakeTriton,
        stored: StoredModel,
        folder: Path,
    ) -> None:
        """Shoal does not try a backend that the server lacks."""
        chosen = msgspec.structs.replace(alone, triton_repository=str(folder))
        reads(triton, folder)
        own.there.set()
        async with TritonHost.open_from_settings(chosen, tritons) as host:
            assert host is not None
            await host.wait_reachable(print)
            await host.publish(NAME, stored, chosen)
        assert (folder / FOLDER / "1" / "model.py").is_file()
        assert triton.calls["RepositoryModelLoad"] == 1

    @pytest.mark.parametrize(
        ("error", "raised"),
        [(SetupError("no Triton for this machine"), SetupError), (ZeroDivisionError("a bug"), InternalError)],
    )
    async def test_every_load_gets_the_reason_of_a_failed_start(
        self, own: FakeRunTriton, alone: Settings, tritons: TritonConnections, error: Exception, raised: type[Exception]
    ) -> None:
        """Shoal continues without it."""
        own.error = error
        own.there.set()
        async with TritonHost.open_from_settings(alone, tritons) as host:
            assert host is not None
            for _ in range(2):
                with pytest.raises(raised, match=str(error)):
                    await host.wait_reachable(print)
            assert not await host.remove(NAME)

    async def test_leaving_stops_one_that_is_starting(
        self, own: FakeRunTriton, alone: Settings, tritons: TritonConnections
    ) -> None:
        before = asyncio.all_tasks()
        async with TritonHost.open_from_settings(alone, tritons):
            await until(lambda: own.options is not None)
        assert asyncio.all_tasks() <= before

    async def test_without_one_there_is_no_host(
        self, alone: Settings, settings: Settings, tritons: TritonConnections
    ) -> None:
        """A server that the settings name is used as it is."""
        async with TritonHost.open_from_settings(Settings(), tritons) as host:
            assert host is None
        async with TritonHost.open_from_settings(settings, tritons) as host:
            assert host is not None
            assert host.url == settings.triton_url
