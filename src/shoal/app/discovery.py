"""Models of servers whose address names none: whatever they offer is served, as it comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from shoal.app.loader import ModelLoader
from shoal.backends import backend_class, backend_for_scheme
from shoal.backends.base.backend import Backend
from shoal.core.lifecycle.lifecycle import Job, Lifecycle
from shoal.core.registry import Registry
from shoal.errors import SetupError, ShoalError
from shoal.models.address import Address, ServedModel

logger = logging.getLogger("shoal")

RETRY_INTERVAL_S = 1.0
"""Between looks for a server that is not there."""

ABSENT_LOOKS = 6
"""Consecutive looks without a model, after which it counts as gone from its server."""

SERVED_OUTCOME = "is served"


def offers_all(served: ServedModel) -> bool:
    """Whether this is an address of a server without a model: whatever it offers is served, under the names that it has
    there."""
    first = served.addresses[0]
    if served.name or len(served.addresses) > 1 or first.model:
        return False
    return _backend_class(first).remote


def _backend_class(address: Address) -> type[Backend]:
    name = backend_for_scheme(address.scheme)
    assert name is not None, "addresses of unknown schemes are rejected during parsing"
    return backend_class(name)


class Discovery:
    """Serves the models that a server has, as they come; those that went are unloaded by whoever took them away.

    Those of the first look belong to the start: readiness and requests wait until each has come up or failed.
    `first_check` is set once the server was asked.
    """

    def __init__(self, address: Address, loader: ModelLoader, lifecycle: Lifecycle, registry: Registry) -> None:
        self.first_check = asyncio.Event()
        self._address = address
        self._source = str(address)
        self._loader = loader
        self._lifecycle = lifecycle
        self._registry = registry
        self._outcomes: dict[str, str] = {}
        self._absent: dict[str, int] = {}
        self._backend = _backend_class(address)
        self._has_loaded = False
        registry.pending_sources[self._source] = "not queried yet"
        registry.awaited_servers.expect(self._source)

    async def run(self) -> None:
        """Look again and again; never returns."""
        waiting = self._registry.pending_sources
        while True:
            self._registry.answered_sources.discard(self._source)
            try:
                await self._discover()
                waiting.pop(self._source, None)
            except ShoalError as error:
                waiting[self._source] = error.message
            except Exception as error:  # a bug, or an answer that nobody foresaw; it may be gone when it is asked again
                logger.exception("listing the models of %s failed", self._source)
                waiting[self._source] = f"its answer could not be processed: {error!r}"
            self.first_check.set()
            self._registry.awaited_servers.settle(self._source)
            await asyncio.sleep(self._backend.offers_every_s if self._source not in waiting else RETRY_INTERVAL_S)

    async def _discover(self) -> None:
        offered = await self._loader.list_offers(self._address)
        if self._backend.drops_absent:
            self._drop_absent(offered)
        self._outcomes = {name: reason for name, reason in self._outcomes.items() if name in offered}
        jobs: list[Job] = []
        for name, found in offered.items():
            if isinstance(found, str):
                outcome = f"is not served: {found}"
            elif self._registry.get(name) is not None or self._outcomes.get(name) == SERVED_OUTCOME:
                continue  # also one that is just being unloaded, and is not to come back for that
            else:
                outcome = self._serve(found, jobs)
            if self._outcomes.get(name) != outcome:
                self._outcomes[name] = outcome
                logger.info("%s of %s %s", name, self._source, outcome)
        if not self._has_loaded and jobs and not self._backend.drops_absent:  # those come and go at any time
            self._registry.pending_sources[self._source] = "its models are loading"
            self._registry.answered_sources.add(self._source)
            await asyncio.gather(*(job.done_event.wait() for job in jobs))
        self._has_loaded = True

    def _drop_absent(self, offered: Collection[str]) -> None:
        """Unload models that were not offered several times in a row, by whomever they were loaded."""
        for model in self._registry:
            if (
                model.required
                or model.plan is None
                or model.plan.backend != self._backend.name
                or model.name in offered
            ):
                self._absent.pop(model.name, None)
                continue
            self._absent[model.name] = self._absent.get(model.name, 0) + 1
            if self._absent[model.name] >= ABSENT_LOOKS and model.runner is not None:
                logger.info("%s of %s is gone", model.name, self._source)
                self._loader.mark_gone(model.plan, model.runner)
                self._lifecycle.unload(model.name)
                del self._absent[model.name]

    def _serve(self, found: ServedModel, jobs: list[Job]) -> str:
        """Serve a model that the server offers, by a job more, and answer what became of it; one that cannot be keeps
        none of the others away."""
        try:
            jobs.append(self._lifecycle.add(self._loader.plan(found), required=False))
        except SetupError as error:
            return f"is not served: {error.message}"
        return SERVED_OUTCOME
