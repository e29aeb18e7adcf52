"""Models on a Reef server: a made-up API over HTTP, to show what a backend is made of.

- `GET /models` answers `{"models": [{"name": "m", "kind": "embed", "dimension": 8}, {"name": "c", "kind": "chat"}]}`.
- `POST /vectors` with `{"model": ..., "texts": [...]}` answers `{"vectors": [[...], ...]}`.
- `POST /complete` with `{"model": ..., "prompt": ..., "max_tokens": ...}` streams plain text.
"""

from __future__ import annotations

from shoal.backends.base.backend import Backend, Target
from shoal.core.lifecycle.loading import ProgressReporter
from shoal.core.protocols import Runner
from shoal.models.address import Address, ServedModel


class ReefBackend(Backend):
    name = "reef"
    remote = True

    async def offers(self, address: Address) -> dict[str, ServedModel | str]:
        from .open import list_offers

        return await list_offers(address)

    async def open(self, target: Target, report: ProgressReporter) -> Runner:
        from .open import open_model

        return await open_model(target, self.resources)


BACKEND = ReefBackend
