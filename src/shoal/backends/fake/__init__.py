"""Backend for scripted models, which let users try overload, failures and cancellation without a real model."""

from __future__ import annotations

from shoal.backends.base.backend import Backend, Target
from shoal.core.lifecycle.loading import ProgressReporter
from shoal.core.protocols import Runner
from shoal.models.address import Address


class FakeBackend(Backend):
    name = "fake"

    @classmethod
    def check(cls, address: Address) -> None:
        from shoal.backends.fake.model import FakeScript

        FakeScript.parse(dict(address.options))

    async def open(self, target: Target, report: ProgressReporter) -> Runner:
        from shoal.backends.fake.open import open_fake

        return open_fake(target, self.resources)


BACKEND = FakeBackend
