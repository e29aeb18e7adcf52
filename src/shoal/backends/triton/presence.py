"""Tracks whether a model on a Triton server is in service, for engines and generators."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from shoal.backends.base.presence import Presence
from shoal.errors import ConfigError, Crashed, ShoalError, TransportFailed

logger = logging.getLogger("shoal.triton")


class _Schema(Protocol):
    """How a model is called. `tensors` are equal while it can be called as before."""

    @property
    def tensors(self) -> tuple[object, ...]: ...


S = TypeVar("S", bound=_Schema)


class _Endpoint(Protocol):
    """A model on a server. `engine.Endpoint` implements it and documents the errors."""

    @property
    def users(self) -> set[object]: ...

    async def is_serving(self) -> bool: ...

    async def find(self, *, again: bool = ..., reload: bool = ...) -> Any: ...


class ModelPresence(Presence, Generic[S]):
    """The health of one model; `schema` describes how it is called.

    A lost model is found or loaded again. A model whose tensors changed meanwhile stays out of service until they match
    again. A Triton server answers a health check within 1 ms, so one error takes the model out of service. Until
    `aclose` it is a user of the model.
    """

    def __init__(
        self, name: str, endpoint: _Endpoint, schema: S, admit: Callable[[], Awaitable[None]], *, serving: bool = False
    ) -> None:
        super().__init__(name, logger, look=self._check_serving, admit=self._find_model, serving=serving, slow_looks=1)
        self.schema = schema
        self._endpoint = endpoint
        self._admit_schema = admit
        self._has_served = serving
        self._crashed = False
        endpoint.users.add(self)

    async def aclose(self) -> None:
        try:
            await super().aclose()
        finally:
            self._endpoint.users.discard(self)

    def mark_lost(self, error: ShoalError) -> None:
        # Triton reports a model as ready after its process died. Only a reload helps.
        self._crashed = self._crashed or isinstance(error, Crashed)
        super().mark_lost(error)

    async def _check_serving(self) -> None:
        if self.ready and not await self._endpoint.is_serving():
            raise TransportFailed("the model is no longer loaded on the server")

    async def _find_model(self) -> None:
        found = await self._endpoint.find(again=self._has_served, reload=self._crashed)
        if found.tensors != self.schema.tensors:
            if self._has_served:
                raise ConfigError("the model's tensors have changed: reload it to serve the new version")
            raise ConfigError("the model's tensors differ from the other replicas': serve it under a separate name")
        self.schema = found
        await self._admit_schema()
        self._has_served, self._crashed = True, False
