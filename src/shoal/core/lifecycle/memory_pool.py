"""Track which models hold memory, wait for it, or have been idle too long; `eviction` decides what to do about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.core.lifecycle.eviction import LoadedModel, MemoryLimits, choose_evictions, find_expired
from shoal.core.registry import Model


class MemoryPool:
    """Tracks models that are loaded or about to be. `working` tells whether a job runs on a name. `put_to_sleep` starts
    to unload a model and leaves its state as "unloading"."""

    def __init__(
        self,
        bounds: MemoryLimits,
        keep_alive_s: float,
        working: Callable[[str], bool],
        put_to_sleep: Callable[[Model], None],
        *,
        clock: Callable[[], float],
    ) -> None:
        self.bounds = bounds
        self._keep_alive_s = keep_alive_s
        self._has_job = working
        self._put_to_sleep = put_to_sleep
        self._clock = clock
        self._sizes: dict[Model, int] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def take(self, model: Model, size: int) -> bool | None:
        """Reserve memory for a model. Returns True if it fits, False if others are going to sleep for it, None if all
        are busy. Unless it returned True, try again after `wait_for_change`."""
        out = choose_evictions(self._loaded_models(), size, self.bounds)
        if out is None:
            self._sizes[model] = size
            return True
        for each in [each for each in self._sizes if each.name in out]:
            self._put_to_sleep(each)
        return False if any(each.state == "unloading" for each in self._sizes) else None

    def fits(self, size: int) -> bool:
        """Whether a model of that size fits now, without putting another to sleep."""
        return self.bounds.has_room(self._loaded_models(), size)

    def free(self, model: Model) -> None:
        """Release the model's memory."""
        self._sizes.pop(model, None)
        self.notify()

    def mark_idle(self, model: Model) -> None:
        model.last_used = self._clock()
        self.notify()

    def notify(self) -> None:
        """Wake all waiters after something was released or ended, and arm the keep-alive timer."""
        waiting, self._waiters = self._waiters, []
        for each in waiting:
            if not each.done():
                each.set_result(None)
        if self._keep_alive_s and self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s, self._expire)

    async def wait_for_change(self) -> None:
        """Wait until something may have changed."""
        self._waiters.append(news := asyncio.get_running_loop().create_future())
        await news

    def seconds_until_sleep(self, model: Model) -> float | None:
        """Return the seconds until the model's idle timeout, counted from now if it is in use; None: no timeout."""
        if not self._keep_alive_s:
            return None
        idle_since = self._clock() if model.inflight else model.last_used
        return max(0.0, idle_since + self._keep_alive_s - self._clock())

    def close(self) -> None:
        """Stop putting models to sleep."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _loaded_models(self) -> list[LoadedModel]:
        return [self._to_loaded_model(model, size) for model, size in self._sizes.items()]

    def _to_loaded_model(self, model: Model, size: int) -> LoadedModel:
        if model.state == "unloading":
            return LoadedModel(model.name, size, "leaving")
        # A broken model also holds memory, and releases it like any other.
        idle = model.state in ("ready", "failed") and not model.inflight and not self._has_job(model.name)
        return LoadedModel(model.name, size, "idle" if idle else "busy", model.last_used)

    def _expire(self) -> None:
        out, again = find_expired(self._loaded_models(), self._clock(), self._keep_alive_s)
        # Busy models set the timer again when they become idle.
        self._timer = None if again is None else asyncio.get_running_loop().call_later(again, self._expire)
        for each in [each for each in self._sizes if each.name in out]:
            self._put_to_sleep(each)


__all__ = ["MemoryPool"]
