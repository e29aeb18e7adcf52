"""What notices that a model or its Triton server goes, and brings it back into service: for engines and generators."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from shoal.backends.triton.control import retry_pauses
from shoal.errors import ConfigError, Crashed, InternalError, ShoalError, TransportFailed

logger = logging.getLogger("shoal.triton")


class _Schema(Protocol):
    """`tensors`: equal while the model can be called as before."""

    @property
    def tensors(self) -> tuple[object, ...]: ...


S = TypeVar("S", bound=_Schema)


class _Endpoint(Protocol):
    """A model on a server: `Endpoint` of the engine, whose docstrings say what they raise."""

    async def is_serving(self) -> bool: ...

    async def find(self, *, again: bool = ..., reload: bool = ...) -> Any: ...


class Watch(Generic[S]):
    """Whether a model serves, `schema` being how it is called and `reason` why it does not.

    Each time that it comes (back), `admit` is awaited, which raises a ShoalError to keep it out. A model whose tensors
    changed meanwhile is kept out until they are as before.
    """

    def __init__(
        self, name: str, endpoint: _Endpoint, schema: S, admit: Callable[[], Awaitable[None]], *, serving: bool = False
    ) -> None:
        self.schema = schema
        self.reason = "" if serving else "it was not reached yet"
        self.ready = serving
        self._name = name
        self._endpoint = endpoint
        self._admit = admit
        self._served = serving
        self._broken = False
        self._look = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, *, look_s: float, retry_s: Sequence[float]) -> None:
        """Begin, once: with `look_s` between looks at a model that serves, and `retry_s` at one that does not, of
        which the last goes on for ever."""
        self._task = asyncio.create_task(self._watch(look_s, retry_s), name=f"watch {self._name}")

    def mark_lost(self, error: ShoalError) -> None:
        """A request has found the model gone: it is out of service, and looked at now."""
        # Triton goes on calling a model ready whose process has died; only loading it anew heals it.
        self._broken = self._broken or isinstance(error, Crashed)
        if self.ready:
            logger.warning("%s is out of service: %s", self._name, error.message)
        self.ready = False
        self.reason = error.message
        self._look.set()

    async def aclose(self) -> None:
        self.ready = False
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self, look_s: float, retry_s: Sequence[float]) -> None:
        pauses = retry_pauses(retry_s)
        failing = False
        while True:
            self._look.clear()  # before the look, so that what a request notices during it is looked at next
            try:
                await self._check_model()
                failing, pauses = False, retry_pauses(retry_s)
            except ShoalError as error:
                # One that is away stays so in one breath or another; one that came back and is kept out is news.
                news = not failing or not isinstance(error, TransportFailed)
                if news and not self.ready and error.message != self.reason:
                    logger.warning("%s cannot serve: %s", self._name, error.message)
                self.mark_lost(error)
                failing = True
            except Exception as error:  # a bug here must not end the watch: the model would never come back
                logger.exception("watching %s failed in an unforeseen way", self._name)
                self.mark_lost(InternalError(f"watching the model failed: {error!r}"))
                failing = True
            await self._pause(next(pauses) if failing else look_s, wake=not failing)

    async def _check_model(self) -> None:
        if self.ready:
            if await self._endpoint.is_serving():
                return
            raise TransportFailed("the model is not loaded on the server any more")
        found = await self._endpoint.find(again=self._served, reload=self._broken)
        if found.tensors != self.schema.tensors:
            if self._served:
                raise ConfigError("the model's tensors are not what they were: load it anew to serve it as it is now")
            raise ConfigError("the model's tensors are not those of its peers: serve it under a name of its own")
        self.schema = found
        await self._admit()
        self.ready = self._served = True
        self._broken = False
        self.reason = ""
        logger.info("%s is in service", self._name)

    async def _pause(self, seconds: float, *, wake: bool) -> None:
        if not wake:
            await asyncio.sleep(seconds)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._look.wait()
        except TimeoutError:
            pass
