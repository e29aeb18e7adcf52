"""OpenVINO on the CPU: one infer request per slot, completion by callback, no thread per call.

The defaults were measured with all-MiniLM-L6-v2 on two AVX512-BF16 cores. There are as many streams as cores: two
streams give 1.05x (100 tokens) to 1.25x (16 tokens) the texts per second of one stream on both cores, and more beside a
busy event loop. There is a wide lane, because one stream alone takes 1.7x the time for a single user. The wide lane
costs 55 MB and 0.15 s at load. The model cache is not used: it saves 0.2 s of 0.4 s and costs 90 MB of disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.backends.local.compile import CompiledGraph, compile_graph, import_openvino
from shoal.backends.local.engine import Lanes, LocalEngine
from shoal.backends.local.options import VARIANTS, EngineOptions
from shoal.backends.local.shapes import WarmUp, length_buckets, shapes, size_buckets
from shoal.backends.local.slots import Outputs, Slots
from shoal.core.protocols import EngineFacts, Tensors

FIRST_CHECK_S, LONGEST_CHECK_S = 0.02, 1.0
"""Seconds until the checks whether a batch in flight has failed, doubling. A successful batch reports itself. A check
takes the interpreter from the engine, so long batches get few: a failure is seen after twice its time."""


async def open(graph: Path, *, name: str, options: EngineOptions) -> LocalEngine:
    """Load and warm up a graph. Implements `OpenEngine` of `shoal.backends.local.engines`."""
    compiled = await asyncio.to_thread(compile_graph, graph, options)
    lengths = length_buckets(options.max_length) if any(port.has_length for port in compiled.ports) else ()
    sizes = size_buckets(options.max_batch_size)
    variant = options.precision in VARIANTS
    facts = EngineFacts(
        name=name,
        inputs=tuple(port.name for port in compiled.ports),
        outputs=compiled.outputs,
        slots=compiled.streams,
        max_batch_size=options.max_batch_size,
        max_batch_tokens=options.max_batch_tokens,
        pads_batches=bool(lengths),
        length_buckets=lengths,
        size_buckets=sizes,
        precision=options.precision if variant else compiled.precision,
        details=_details(compiled),
    )
    final_options = options if variant else replace(options, precision=compiled.precision)

    async def rebuild() -> Lanes:
        return _lanes(await asyncio.to_thread(compile_graph, graph, final_options))

    engine = LocalEngine(
        facts,
        compiled.ports,
        _lanes(compiled),
        max_length=options.max_length,
        warm=WarmUp(
            shapes(lengths or (1,), sizes, options.max_batch_tokens), options.max_batch_ms / 1e3, options.attention
        ),
        rebuild=rebuild,
    )
    await engine.warm_up(options.warm_up_s)
    return engine


def _lanes(compiled: CompiledGraph) -> Lanes:
    return Lanes(
        Slots(_Request(compiled.narrow) for _ in range(compiled.streams)),
        None if compiled.wide is None else Slots([_Request(compiled.wide)]),
    )


def _details(compiled: CompiledGraph) -> dict[str, Any]:
    return {
        "engine": f"openvino {compiled.version}",
        "streams": compiled.streams,
        "threads": compiled.threads,
        "wide": compiled.wide is not None,
        "precision_reason": compiled.reason,
        "arithmetic": compiled.precision,
        "precision_checked": compiled.precision_check,
    }


class _Request:
    """A Worker that wraps an infer request. Its inputs are the caller's memory; its outputs are copied once."""

    def __init__(self, model: Any) -> None:
        self._tensor = import_openvino().Tensor
        self._request = model.create_infer_request()
        # The request's callback must not hold this object. That would be a reference cycle through C++, which the
        # garbage collector cannot see, so the request and the model's memory would never be freed.
        finished = weakref.WeakMethod(self._on_finished)

        def done(_: None) -> None:
            call = finished()
            if call is not None:
                call(None)

        self._request.set_callback(done, None)
        self._outputs: tuple[str, ...] = ()
        self._callbacks: list[Callable[[], None]] = []
        self._watch: asyncio.TimerHandle | None = None

    def start(self, feeds: Tensors, outputs: Sequence[str], done: Callable[[], None]) -> None:
        self._outputs = tuple(outputs)
        for name, array in feeds.items():
            self._request.set_tensor(name, self._tensor(array, shared_memory=True))
        self._callbacks = [done]
        self._request.start_async()
        self._check_later(FIRST_CHECK_S)

    def result(self) -> Outputs:
        if self._watch is not None:
            self._watch.cancel()
        self._request.wait()
        return {name: self._request.get_tensor(name).data.copy() for name in self._outputs}

    def abort(self) -> None:
        """Let the batch end by itself. A canceled request leaves the shapes of two batches in its stream, and the next
        batch fails."""

    def _on_finished(self, _: None) -> None:
        """Report the end of the batch. Runs on an engine thread; only the first call for a batch counts."""
        with contextlib.suppress(IndexError):
            self._callbacks.pop()()

    def _check_later(self, pause: float) -> None:
        self._watch = asyncio.get_running_loop().call_later(pause, self._check, pause)

    def _check(self, pause: float) -> None:
        """Check for a failed batch, for which the engine makes no callback."""
        try:
            self._request.wait_for(0)
        except RuntimeError:  # `result` raises it again, to a caller who handles it
            self._on_finished(None)
            return
        if self._callbacks:
            self._check_later(min(2 * pause, LONGEST_CHECK_S))
