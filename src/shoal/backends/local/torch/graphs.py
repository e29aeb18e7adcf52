"""CUDA graphs: the kernels of a batch, recorded once for its shape and started by one call.

Without them Python starts some hundred kernels a batch one by one. That alone takes longer than a GPU needs to compute
a small batch, and each start releases the interpreter: beside a busy event loop, it may wait for the loop's turn to end
(up to 5 ms, `sys.getswitchinterval`). See "CUDA Graphs" in the CUDA C++ Programming Guide and torch.cuda.CUDAGraph.

A recording reads and writes fixed addresses. So batches are padded to its rows, it always has a mask and computes all
outputs, and all work is on one stream: a later batch overwrites inputs and outputs only after the earlier one's were
read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal.backends.local.errors import shorten_message
from shoal.backends.local.torch.heads import Tensor
from shoal.backends.local.torch.network import IDS, MASK, Network
from shoal.core.protocols import round_up
from shoal.types import Array

logger = logging.getLogger("shoal.backends")

DIFFERENCE = 0.01
"""Largest difference of a recording's outputs from those of the same kernels started one by one, as a part of the
largest output. Both round, to 16 bits in 16-bit precisions."""


class Layout(NamedTuple):
    """The shape of a recording: arrays [`size`, `length`] with these names."""

    names: tuple[str, ...]
    size: int
    length: int

    @property
    def numbers(self) -> int:
        """Numbers in all arrays."""
        return len(self.names) * self.size * self.length


class Recording(NamedTuple):
    """A graph, its inputs, int64 [numbers], and its outputs, all on the device."""

    graph: Any
    inputs: Tensor
    outputs: dict[str, Tensor]


class Buffer:
    """Memory that grows. Earlier pieces stay valid while they are referred to, but not their contents."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._memory: Tensor = None

    def take(self, shape: Sequence[int]) -> Tensor:
        import torch

        count = int(np.prod(shape))
        if self._memory is None or len(self._memory) < count:
            self._memory = torch.empty(1 << (count - 1).bit_length(), **self._options)
        return self._memory[:count].view(*shape)


class Buffers:
    """A `Buffer` for each name."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._buffers: dict[str, Buffer] = {}

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = Buffer(**self._options)
        return self._buffers[name].take(shape)


class Stage:
    """Page-locked memory of one worker, through which a batch goes to the device and its outputs come back."""

    def __init__(self) -> None:
        import torch

        self._inputs = Buffer(dtype=torch.int64, pin_memory=True)
        self._outputs = Buffers(dtype=torch.float32, pin_memory=True)

    def fill(self, arrays: Mapping[str, Array], layout: Layout) -> Tensor:
        """Return the arrays as int64 [layout.numbers]. Rows that are added have token 0 everywhere, and full masks."""
        flat = self._inputs.take((layout.numbers,))
        places = flat.numpy().reshape(len(layout.names), layout.size, layout.length)
        for place, name in zip(places, layout.names, strict=True):
            rows = len(arrays[name])
            place[:rows] = arrays[name]
            place[rows:] = "mask" in name
        return flat

    def fetch(self, found: Mapping[str, Tensor], outputs: Sequence[str], rows: int) -> dict[str, Tensor]:
        """Queue the copy of the first rows of the outputs, and return where they will be."""
        here: dict[str, Tensor] = {}
        for name in outputs:
            here[name] = self._outputs.take(name, (rows, *found[name].shape[1:]))
            here[name].copy_(found[name][:rows], non_blocking=True)
        return here


class Graphs:
    """The recordings of one network, at most one for each of `sizes` and `lengths`.

    Every call needs torch's inference mode, the one stream and the caller's lock. `refusal` says why nothing more is
    recorded: some models wait for the device in the middle, which no graph can.
    """

    def __init__(
        self, name: str, network: Network, outputs: Sequence[str], sizes: Sequence[int], lengths: Sequence[int]
    ) -> None:
        import torch

        self.refusal = ""
        self._name = name
        self._network = network
        self._names = tuple(outputs)
        self._sizes = tuple(sizes)
        self._lengths = frozenset(lengths)
        self._recordings: dict[Layout, Recording] = {}
        self._too_large: set[Layout] = set()
        self._inputs = Buffer(dtype=torch.int64, device=network.device)
        self._outputs = Buffers(dtype=torch.float32, device=network.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._kept: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._recordings)

    def run_longest(self, inputs: Sequence[str]) -> None:
        """Run a text of the greatest length, so that tables that a model keeps by length have their final size before a
        recording refers to them."""
        longest = {name: np.full((1, max(self._lengths)), _example_value(name), np.int64) for name in inputs}
        self._network.run(longest, (), threading.Event())
        self._kept = self._network.kept_addresses()

    def layout(self, arrays: Mapping[str, Array]) -> Layout | None:
        """Return the layout that a batch is padded to, or None for a shape that is not recorded."""
        rows, length = arrays[MASK].shape
        size = round_up(rows, self._sizes)
        return Layout(tuple(arrays), size, length) if length in self._lengths and size in self._sizes else None

    def find(self, layout: Layout) -> Recording | None:
        return self._recordings.get(layout)

    def start(self, recording: Recording, flat: Tensor) -> dict[str, Tensor]:
        """Queue a batch: its inputs, from page-locked memory, and the kernels. Returns where the outputs will be."""
        recording.inputs.copy_(flat, non_blocking=True)
        recording.graph.replay()
        return recording.outputs

    def record(self, layout: Layout) -> Recording | None:
        """Run example inputs one by one, so that every kernel is loaded, then record and compare.

        Returns None where there is no room, and for this layout from then on: its batches, most of them smaller, may
        fit. Sets `refusal` where the model cannot be recorded. Raises what torch raises if it cannot be run either.
        """
        import torch

        if self.refusal or layout in self._too_large:
            return None
        made, problem = None, ""
        try:
            made, problem = self._try_recording(layout)
        except torch.OutOfMemoryError:
            self._too_large.add(layout)
            logger.warning("%s: no room on the GPU to record %d x %d tokens", self._name, layout.size, layout.length)
        if self._network.kept_addresses() != self._kept:
            self.clear()  # the recordings read the old tensors
            problem = "the model replaces tensors that it keeps"
        if problem:
            self.refusal = problem
            logger.warning("%s: the GPU's work is started kernel by kernel, which is slower: %s", self._name, problem)
            return None
        if made is not None:
            self._recordings[layout] = made
        return made

    def _try_recording(self, layout: Layout) -> tuple[Recording | None, str]:
        """Return a recording, or why there can be none. Raises torch's OutOfMemoryError where there is no room."""
        import torch

        inputs = self._inputs.take((layout.numbers,))
        arrays = inputs.view(len(layout.names), layout.size, layout.length)
        placed = dict(zip(layout.names, arrays, strict=True))
        for name in layout.names:
            placed[name].fill_(_example_value(name))
        placed[MASK][0, -1] = 0
        right = {name: tensor.clone() for name, tensor in self._compute(placed).items()}
        outputs = {name: self._outputs.take(name, tensor.shape) for name, tensor in right.items()}
        try:
            graph = self._capture(placed, outputs)
            graph.replay()
            wrong = [name for name in outputs if not _close(outputs[name], right[name])]
        except Exception as error:  # models raise anything where they notice the recording
            if isinstance(error.__context__, torch.OutOfMemoryError):  # the end of a broken recording fails as well
                raise error.__context__ from None
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return None, shorten_message(str(error)) or type(error).__name__
        return Recording(graph, inputs, outputs), f"a recording computes another {wrong[0]}" if wrong else ""

    def clear(self) -> None:
        self._recordings.clear()

    def _capture(self, placed: dict[str, Tensor], outputs: dict[str, Tensor]) -> Any:
        import torch

        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other models may use the device
        try:
            for name, tensor in self._compute(placed).items():
                outputs[name].copy_(tensor)
        finally:
            graph.capture_end()
        return graph

    def _compute(self, placed: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._network.compute(placed, self._names, threading.Event())


def _example_value(name: str) -> int:
    """Return the number that fills an example input: a token whose vector is not that of padding, full masks, and the
    first kind of token, which every model has."""
    return 1 if name == IDS or "mask" in name else 0


def _close(found: Tensor, right: Tensor) -> bool:
    import torch

    most = DIFFERENCE * float(right.nan_to_num().abs().max())
    return bool(torch.allclose(found, right, rtol=0.0, atol=most, equal_nan=True))
