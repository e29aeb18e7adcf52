"""NVIDIA Triton: its gRPC protocol, its models, and a server that Shoal manages."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from shoal.backends.base.backend import Backend, Resources, Target
from shoal.config.settings import ModelTable, Settings
from shoal.core.lifecycle.loading import Entry, ProgressReporter
from shoal.core.protocols import Runner
from shoal.errors import ConfigError, DeadlineExceeded, TransportFailed
from shoal.models.address import Address, ServedModel

if TYPE_CHECKING:
    from shoal.backends.triton.open.host import TritonHost

NO_TRITON = "no Triton server to load models into: start Shoal with --triton, or set --triton-url"


def quiet_grpc() -> None:
    """Stop gRPC's C core from writing to standard error at every failed connection: the errors are raised too, and the
    log is Shoal's to format. Call it before `grpc` is imported; GRPC_VERBOSITY takes precedence."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


class TritonBackend(Backend):
    """Models of Triton servers, and models from files that Shoal loads into the configured Triton, `host`."""

    name = "triton"
    remote = True

    @classmethod
    def explain_no_files(cls, settings: Settings) -> str:
        return "" if settings.triton or settings.triton_url else NO_TRITON

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        quiet_grpc()
        # Imported late: gRPC takes 0.2 s to import, and 20 MB.
        from shoal.backends.triton.open.connections import TritonConnections

        self.host: TritonHost | None = None
        self._tritons = TritonConnections(resources.loaded.settings)
        self._exit_stack = AsyncExitStack()
        self._exit_stack.push_async_callback(self._tritons.aclose)

    async def start(self) -> None:
        from shoal.backends.triton.open.host import TritonHost

        settings = self.resources.loaded.settings
        # Only a flag conflicts: a preset or a file may set it for other runs.
        if settings.triton and settings.triton_url and self.resources.loaded.sources["triton_url"].layer == "flag":
            raise ConfigError("triton starts Shoal's own server, and triton_url names another: set only one of them")
        opened = TritonHost.open_from_settings(settings, self._tritons, self.resources.progress)
        self.host = await self._exit_stack.enter_async_context(opened)

    async def aclose(self) -> None:
        await self._exit_stack.aclose()

    async def offers(self, address: Address) -> dict[str, ServedModel | str]:
        from shoal.backends.triton.open.targets import list_offers

        server = await self._tritons.endpoint(address, ModelTable(), self.resources.loaded.settings)
        return await list_offers(server, address, self.resources.table)

    async def open(self, target: Target, report: ProgressReporter) -> Runner:
        from shoal.backends.triton.open.files import open_files
        from shoal.backends.triton.open.models import open_triton
        from shoal.backends.triton.open.targets import make_target

        if target.addresses[0].local:
            if self.host is None:
                raise ConfigError(NO_TRITON)
            return await open_files(target, self.host, self.resources, report)
        servers = [await self._tritons.endpoint(one, target.table, target.settings) for one in target.addresses]
        lanes, talk = partial(self.resources.lanes, target), partial(self.resources.generation, target)
        return await open_triton(make_target(target, servers, self.resources, report), lanes, talk, report)

    async def unload(self, name: str, runner: Runner) -> None:
        from shoal.backends.triton.open.targets import TritonMixin

        assert isinstance(runner, TritonMixin)
        await runner.unload(self.resources.loaded.settings.load_timeout_s)
        if self.host is not None:
            self.host.forget(name)

    async def has_model(self, target: Target) -> bool:
        from shoal.backends.triton.open.files import is_in_repository

        try:
            return self.host is not None and await is_in_repository(target, self.host, self.resources)
        except (TransportFailed, DeadlineExceeded):
            return False

    async def entries(self) -> list[Entry]:
        return await self.host.entries() if self.host is not None else []

    async def remove(self, name: str) -> bool:
        return self.host is not None and await self.host.remove(name)


BACKEND = TritonBackend
