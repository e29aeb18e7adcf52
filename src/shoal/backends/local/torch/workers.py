"""Run one batch at a time on a network: on the processor, or on a GPU's stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from shoal.backends.local.slots import Outputs, PooledWorker
from shoal.backends.local.torch.graphs import Graphs, Stage
from shoal.backends.local.torch.heads import Tensor
from shoal.backends.local.torch.network import Network
from shoal.core.protocols import Tensors


class CpuWorker(PooledWorker):
    def __init__(self, network: Network, pool: ThreadPoolExecutor) -> None:
        super().__init__(pool)
        self._network = network
        self._stop = threading.Event()

    def start(self, feeds: Tensors, outputs: Sequence[str], done: Callable[[], None]) -> None:
        self._network.check(feeds)
        self._stop = threading.Event()
        super().start(feeds, outputs, done)

    def abort(self) -> None:
        self._stop.set()

    def _compute(self, feeds: Tensors, outputs: Sequence[str]) -> Outputs:
        found = self._network.run(feeds, outputs, self._stop)
        return {name: found[name].numpy() for name in outputs}


class Gpu(NamedTuple):
    """What the workers of a network share: the stream that everything runs on, the lock that is held while a batch is
    put onto it, and the recordings, None if batches are not recorded."""

    stream: Any
    turn: threading.Lock
    graphs: Graphs | None


class GpuWorker(CpuWorker):
    """A recorded batch is queued by the thread that calls `start`, an event loop: its calls release the interpreter,
    for which another thread would have to wait each time. The pool's thread waits for the outputs, and does all else.
    """

    def __init__(self, network: Network, pool: ThreadPoolExecutor, gpu: Gpu) -> None:
        import torch

        super().__init__(network, pool)
        self._gpu = gpu
        self._stage = Stage()
        self._ready = torch.cuda.Event(blocking=True)  # wait without spinning

    def start(self, feeds: Tensors, outputs: Sequence[str], done: Callable[[], None]) -> None:
        self._network.check(feeds)
        self._stop = threading.Event()
        here = None
        if self._gpu.turn.acquire(blocking=False):  # this thread must not wait
            try:
                here = self._queue(feeds, outputs, is_loop=True)
            finally:
                self._gpu.turn.release()
        self._submit(partial(self._compute, feeds, outputs) if here is None else partial(self._wait, here), done)

    def _compute(self, feeds: Tensors, outputs: Sequence[str]) -> Outputs:
        with self._gpu.turn:
            here = self._queue(feeds, outputs)
        assert here is not None
        return self._wait(here)

    def _queue(self, feeds: Tensors, outputs: Sequence[str], is_loop: bool = False) -> dict[str, Tensor] | None:
        """Queue a batch and the copy of its outputs, and return where they will be: None, with `is_loop`, if the batch
        was not recorded."""
        import torch

        with torch.inference_mode(), torch.cuda.stream(self._gpu.stream):
            found = self._replay(feeds, can_record=not is_loop)
            if found is None and is_loop:
                return None
            if found is None:
                found = self._network.run(feeds, outputs, self._stop)
            here = self._stage.fetch(found, outputs, len(feeds["input_ids"]))
            self._ready.record()
            return here

    def _replay(self, feeds: Tensors, *, can_record: bool) -> dict[str, Tensor] | None:
        """Queue a batch's recording, if there is one, and return where the device will have the outputs."""
        graphs = self._gpu.graphs
        if graphs is None:
            return None
        arrays = self._network.host_arrays(feeds)
        layout = graphs.layout(arrays)
        if layout is None:
            return None
        recording = graphs.find(layout) or (graphs.record(layout) if can_record else None)
        return None if recording is None else graphs.start(recording, self._stage.fill(arrays, layout))

    def _wait(self, here: Mapping[str, Tensor]) -> Outputs:
        self._ready.synchronize()
        return {name: tensor.numpy().copy() for name, tensor in here.items()}
