"""Time out the wait for a stream's next chunk, with one timer per stream rather than one per token."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from shoal.errors import DeadlineExceeded, ShoalError


class StreamTimeout:
    """Aborts a wait that takes too long. Call `start_wait()` and `end_wait()` around each wait, inside one `with`
    block.

    `first_s` limits the first wait, `between_s` each later one, and `total_s` the whole block from construction on. The
    time between `end_wait` and the next `start_wait` is the reader's and counts only toward the total. On timeout the
    awaited work is cancelled and the block raises DeadlineExceeded; a cancellation from elsewhere passes through.
    `abort` ends the block with another error. It is in `active` while the block runs.
    """

    __slots__ = ("_active", "_between_s", "_deadline", "_error", "_loop", "_since", "_task", "_timer", "_wait_s")

    def __init__(
        self, first_s: float, between_s: float, total_s: float, active: set[StreamTimeout] | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._wait_s = first_s
        self._between_s = between_s
        self._deadline = self._loop.time() + total_s
        self._since: float | None = None
        self._task: asyncio.Task[object] | None = None
        self._error: ShoalError | None = None
        self._active = active if active is not None else set()

    def __enter__(self) -> Self:
        self._active.add(self)
        self._timer = self._loop.call_later(self._next_check_s(), self._check)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer.cancel()
        self._active.discard(self)
        if self._error and kind is asyncio.CancelledError and self._task is not None and self._task.uncancel() == 0:
            raise self._error from None

    def start_wait(self) -> None:
        """Start a wait in the current task. Raises DeadlineExceeded when the total time is up, and the error passed to
        `abort`."""
        if self._error is not None:
            raise self._error
        self._since = now = self._loop.time()
        if now >= self._deadline:
            raise DeadlineExceeded(_TOTAL)
        self._task = asyncio.current_task(self._loop)

    def end_wait(self) -> None:
        """End the current wait."""
        self._since = None
        if self._wait_s is not self._between_s:
            self._wait_s = self._between_s
            self._timer.cancel()
            self._timer = self._loop.call_later(self._next_check_s(), self._check)

    def abort(self, error: ShoalError) -> None:
        """End the current wait with this error, or raise it when the next one starts."""
        if self._error is None:
            self._error = error
            if self._since is not None and self._task is not None:
                self._task.cancel()

    def _next_check_s(self) -> float:
        """Seconds until the timer must check again: nothing can time out sooner."""
        now = self._loop.time()
        since = self._since if self._since is not None else now
        return max(0.0, min(since + self._wait_s, self._deadline) - now)

    def _check(self) -> None:
        now = self._loop.time()
        if self._since is not None and self._task is not None:
            if now >= self._deadline:
                self._error = DeadlineExceeded(_TOTAL)
            elif now - self._since >= self._wait_s:
                words = f"the model sent no token for {self._wait_s:g} s: try again, or request fewer tokens"
                self._error = DeadlineExceeded(words)
            if self._error is not None:
                self._task.cancel()
                return
        # After the deadline the reader may hold the stream: the next `start_wait` raises.
        self._timer = self._loop.call_later(max(self._next_check_s(), 0.01), self._check)


_TOTAL = "the answer was not complete before the request's deadline: request fewer tokens, or allow more time"
