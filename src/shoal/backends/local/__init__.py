"""Runs file-based models on this machine.

Models are fetched into the store. An engine in this process runs them, or a separate process for generative models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shoal.backends.base.backend import Backend, Target
from shoal.config.settings import Settings
from shoal.core.lifecycle.loading import Entry, ProgressReporter
from shoal.core.protocols import Runner
from shoal.errors import AddressError
from shoal.models.address import Address
from shoal.models.store import StoredModel


class LocalBackend(Backend):
    name = "local"

    @classmethod
    def explain_no_files(cls, settings: Settings) -> str:
        return ""

    async def open(self, target: Target, report: ProgressReporter) -> Runner:
        addresses = target.addresses
        if len(addresses) == 1:
            addresses = (await self.resources.source(target),)
        stored = await self.prepare(target, addresses[0], report)
        if stored.manifest.generation is not None:
            if len(addresses) > 1:
                raise AddressError(
                    f"{target.name}: a local language model must have one address, as it batches requests itself"
                )
            return await self._open_llm(target, stored)
        if stored.manifest.image is not None:
            return await self._open_dual_encoder(target, addresses, report)
        from shoal.backends.local.open import open_local
        from shoal.core.lane_runner import LaneRunner

        progress = self.resources.reporter(report)
        local = await open_local(target.name, addresses, target.settings, progress, table=target.table)
        lane = self.resources.lane(target, local.pipeline, local.engines, local.facts)
        return LaneRunner(lane, local.facts, local.codec)

    async def prepare(self, target: Target, address: Address, report: ProgressReporter) -> StoredModel:
        from shoal.backends.local.open import prepare_async

        return await prepare_async(address, target.settings, self.resources.reporter(report))

    async def entries(self) -> list[Entry]:
        return await asyncio.to_thread(self._entries)

    async def remove(self, name: str) -> bool:
        from shoal.models.open_clip_names import find_pair_repository

        store = self.resources.store
        # The files of an open_clip name pair belong to its repository.
        kept_as = name if self.resources.loaded.resolve_argument(name) != name else find_pair_repository(name) or name
        found = await asyncio.to_thread(store.find_by_name, kept_as)
        for one in found:
            await asyncio.to_thread(store.remove, one)
        return bool(found)

    def _entries(self) -> list[Entry]:
        return [
            Entry(
                name=one.manifest.id,
                source=one.manifest.address,
                backend=self.name,
                size=one.size,
                created=one.manifest.created,
                digest=one.manifest.digest,
            )
            for one in self.resources.store.entries()
        ]

    async def _open_dual_encoder(
        self, target: Target, addresses: Sequence[Address], report: ProgressReporter
    ) -> Runner:
        from shoal.backends.local.open_dual_encoder import open_dual_encoder
        from shoal.core.dual_encoder import DualEncoderRunner

        stored = [await self.prepare(target, address, report) for address in addresses]
        towers = await open_dual_encoder(target.name, stored, target.settings, target.table)
        return DualEncoderRunner(self.resources.lanes(target, towers.parts, towers.facts), towers.facts, towers.codec)

    async def _open_llm(self, target: Target, stored: StoredModel) -> Runner:
        from shoal.backends.base.chat_pipeline import load_generation_sampling
        from shoal.backends.genai.open import open_llm

        recommended = await asyncio.to_thread(load_generation_sampling, stored.path)
        pipeline, generator, facts = await open_llm(target.name, stored, target.settings, target.table)
        try:
            return self.resources.generation(target, pipeline, [generator], facts, recommended)
        except BaseException:  # the table's sampling is not supported: no runner owns the process, so close it here
            await generator.aclose()
            raise


BACKEND = LocalBackend
