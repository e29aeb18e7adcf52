"""A worker whose batches end on the test's command."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.core.protocols import Tensors
from shoal.types import Array


class StepWorker:
    """`finish` ends the batch; each output is the first input, or `error` is raised.

    `refuse`: raised by `start`. `running`: whether a batch is running. `batches` and `aborts` are counts. With
    `at_once`, batches end as they start.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once
        self.error: Exception | None = None
        self.refuse: Exception | None = None
        self.running = False
        self.batches = 0
        self.aborts = 0
        self.shapes: list[tuple[int, ...]] = []
        self._outcome: dict[str, Array] = {}
        self._done: Callable[[], None] | None = None

    def start(self, feeds: Tensors, outputs: Sequence[str], done: Callable[[], None]) -> None:
        assert not self.running, "a worker holds one batch at a time"
        if self.refuse is not None:
            raise self.refuse
        self.running = True
        self.batches += 1
        array = next(iter(feeds.values()))
        self.shapes.append(array.shape)
        self._outcome = dict.fromkeys(outputs, array)
        self._done = done
        if self.at_once:
            self.finish()

    def finish(self) -> None:
        assert self.running
        assert self._done is not None
        self.running = False
        self._done()

    def result(self) -> dict[str, Array]:
        if self.error is not None:
            raise self.error
        return self._outcome

    def abort(self) -> None:
        self.aborts += 1
