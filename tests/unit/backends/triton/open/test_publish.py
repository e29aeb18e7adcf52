"""`shoal pull --to triton` and `shoal rm`, without a Shoal server."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.backends.triton.open import publish, withdraw
from shoal.config.settings import Settings
from shoal.models.store import StoredModel
from tests.fakes.triton import FakeTriton
from tests.unit.backends.triton.open.kit import reads

NAME = "org/mini"
FOLDER = "org~mini"


class TestCommandLine:
    async def test_published_and_loaded(
        self, stored: StoredModel, writing: Settings, triton: FakeTriton, folder: Path
    ) -> None:
        reads(triton, folder)
        message = await publish(NAME, stored, writing)
        assert message == f"written to {folder} and loaded by Triton at {triton.target}"

    async def test_published_for_a_triton_that_is_away(
        self, stored: StoredModel, writing: Settings, triton: FakeTriton, folder: Path
    ) -> None:
        await triton.stop()
        message = await publish(NAME, stored, writing)
        assert message.startswith(f"written to {folder}; not loaded: Triton is not reachable")

    async def test_published_for_no_triton(self, stored: StoredModel, writing: Settings, folder: Path) -> None:
        message = await publish(NAME, stored, msgspec.structs.replace(writing, triton_url=""))
        assert message == (
            f"written to {folder} for the onnxruntime backend; name a running Triton with --triton-url to load it"
        )
        assert (folder / FOLDER).is_dir()

    async def test_withdrawn(self, stored: StoredModel, writing: Settings, triton: FakeTriton, folder: Path) -> None:
        """It is unloaded first; a second call finds nothing."""
        reads(triton, folder)
        await publish(NAME, stored, writing)
        assert await withdraw(NAME, writing)
        assert triton.models[FOLDER].state == "UNAVAILABLE"
        assert not (folder / FOLDER).exists()
        assert not await withdraw(NAME, msgspec.structs.replace(writing, triton_url=""))
