"""Backend for Hugging Face text-embeddings-inference servers, one model each, over HTTP or gRPC."""

from __future__ import annotations

from functools import partial

from shoal.backends.base.backend import Backend, Target
from shoal.core.lifecycle.loading import ProgressReporter
from shoal.core.protocols import Runner
from shoal.models.address import Address, ServedModel


class TeiBackend(Backend):
    name = "tei"
    remote = True

    async def offers(self, address: Address) -> dict[str, ServedModel | str]:
        from shoal.backends.tei.open import list_offers

        return await list_offers(address, self.resources.loaded.settings)

    async def open(self, target: Target, report: ProgressReporter) -> Runner:
        from shoal.backends.tei.open import open_tei

        return await open_tei(target, partial(self.resources.lane, target), report)


BACKEND = TeiBackend
