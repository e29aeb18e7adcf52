"""Backend for servers that speak OpenAI's API: passes requests and streams through byte for byte, and embeds."""

from __future__ import annotations

from functools import partial

from shoal.backends.base.backend import Backend, Target
from shoal.core.lifecycle.loading import ProgressReporter
from shoal.core.protocols import Runner
from shoal.models.address import Address, ServedModel


class OpenAiBackend(Backend):
    name = "openai"
    remote = True

    async def offers(self, address: Address) -> dict[str, ServedModel | str]:
        from shoal.backends.openai.open import list_offers

        return await list_offers(address, self.resources.loaded.settings)

    async def open(self, target: Target, report: ProgressReporter) -> Runner:
        from shoal.backends.openai.open import open_upstream

        return await open_upstream(target, partial(self.resources.lane, target), report)


BACKEND = OpenAiBackend
