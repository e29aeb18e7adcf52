"""ONNX Runtime in f32: on a GPU if its package has the CUDA provider, else on the CPU.

One session serves all slots with its threads, without spinning. On two cores, two concurrent batches then reach the
throughput of two one-thread sessions, and a lone batch runs at 1.3x the speed of one. No kernels are compiled per
shape, so there are no buckets, and warm-up only measures.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.backends.local.engine import Lanes, LocalEngine
from shoal.backends.local.errors import shorten_message
from shoal.backends.local.options import VARIANTS, EngineOptions, plan_threads
from shoal.backends.local.shapes import WarmUp, is_probe, length_buckets, shapes, size_buckets
from shoal.backends.local.slots import Outputs, PooledWorker, Slots
from shoal.backends.local.tensor_inputs import Port
from shoal.core.protocols import EngineFacts, Tensors
from shoal.errors import ConfigError, MissingExtra, ModelFileError
from shoal.machine_limits import usable_cores

SLOTS = 2
"""All slots share one device or one set of threads. A second keeps it busy while results are returned or copied; a
third would only wait."""

TYPES = {
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
}
LOG_FATAL_ONLY = 4

MOST_SCORES = 2**22
"""Attention scores of a head, from which a batch's memory is returned to the system after it. The scores of all heads
are in memory at once, 6.4 GB for 8,192 tokens and 12 heads, and the session would keep as much."""


async def open(graph: Path, *, name: str, options: EngineOptions) -> LocalEngine:
    """Load and time a graph. Implements `OpenEngine` of `shoal.backends.local.engines`."""
    if options.precision == "bf16":
        raise ConfigError("onnxruntime runs f32 only; use precision f32, or another engine", param="precision")
    loaded = await asyncio.to_thread(_load, graph, options)
    session, slots = loaded.session, loaded.slots
    ports = tuple(_to_port(node_arg, graph) for node_arg in session.get_inputs())
    facts = EngineFacts(
        name=name,
        inputs=tuple(port.name for port in ports),
        outputs=tuple(output.name for output in session.get_outputs()),
        slots=slots,
        parallel=1,
        precision=options.precision if options.precision in VARIANTS else "f32",
        max_batch_size=options.max_batch_size,
        max_batch_tokens=options.max_batch_tokens,
        pads_batches=any(port.has_length for port in ports),
        details={
            "engine": f"onnxruntime {loaded.version}",
            "device": loaded.device,
            "streams": slots,
            "threads": loaded.threads,
        },
    )
    pool = ThreadPoolExecutor(slots, thread_name_prefix=f"shoal-{name}")
    lengths = length_buckets(options.max_length) if any(port.has_length for port in ports) else (1,)
    plan = shapes(lengths, size_buckets(options.max_batch_size), options.max_batch_tokens)
    engine = LocalEngine(
        facts,
        ports,
        Lanes(Slots(_SessionWorker(session, pool) for _ in range(slots))),
        max_length=options.max_length,
        warm=WarmUp([shape for shape in plan if is_probe(shape)], options.max_batch_ms / 1e3, options.attention),
        end=partial(pool.shutdown, wait=False),  # its threads are idle by then
    )
    await engine.warm_up(options.warm_up_s)
    return engine


def import_onnxruntime() -> Any:
    """Import the `onnxruntime` package. This is the only place where Shoal imports it.

    Unless the environment disables it beforehand, the package reports to its vendor, and creates a machine id and a
    database in the user's cache for that. The call is for Windows, where the environment variable has no effect. Raises
    MissingExtra.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        import onnxruntime
    except ImportError:
        raise MissingExtra("the engine onnxruntime", "ort") from None
    onnxruntime.disable_telemetry_events()
    return onnxruntime


class _LoadedSession(NamedTuple):
    """A loaded session. `device` is "cpu" or "cuda"."""

    session: Any
    device: str
    slots: int
    threads: int
    version: str


def _load(graph: Path, options: EngineOptions) -> _LoadedSession:
    """Create the session. Raises MissingExtra and ModelFileError."""
    onnxruntime = import_onnxruntime()
    slots, threads = plan_threads(options.streams or SLOTS, options.threads, usable_cores())
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = LOG_FATAL_ONLY
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    available = onnxruntime.get_available_providers()
    providers = [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in available]
    try:
        session = onnxruntime.InferenceSession(str(graph), settings, providers=providers)
    except Exception as error:  # its exception classes share no base but Exception
        raise ModelFileError(
            f"ONNX Runtime cannot load this graph: {shorten_message(str(error))}; convert the model again",
            file=graph.name,
        ) from error
    device = "cuda" if session.get_providers()[0] == "CUDAExecutionProvider" else "cpu"
    return _LoadedSession(session, device, slots, threads, onnxruntime.__version__)


def _to_port(node_arg: Any, graph: Path) -> Port:
    if node_arg.type not in TYPES:
        raise ModelFileError(f"inputs of type {node_arg.type} are not supported", file=graph.name, key=node_arg.name)
    shape = tuple(axis if isinstance(axis, int) else None for axis in node_arg.shape)
    return Port(node_arg.name, np.dtype(TYPES[node_arg.type]), shape)


class _SessionWorker(PooledWorker):
    """Makes one run of the session at a time."""

    def __init__(self, session: Any, pool: ThreadPoolExecutor) -> None:
        super().__init__(pool)
        self._on_cpu = session.get_providers()[0] == "CPUExecutionProvider"
        self._session = session
        self._settings: Callable[[], Any] = import_onnxruntime().RunOptions
        self._current: Any = None

    def start(self, feeds: Tensors, outputs: Sequence[str], done: Callable[[], None]) -> None:
        self._current = self._settings()
        size, length, *_ = (*next(iter(feeds.values())).shape, 1)
        if self._on_cpu and size * length * length >= MOST_SCORES:
            self._current.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        super().start(feeds, outputs, done)

    def abort(self) -> None:
        self._current.terminate = True

    def _compute(self, feeds: Tensors, outputs: Sequence[str]) -> Outputs:
        return dict(zip(outputs, self._session.run(list(outputs), feeds, self._current), strict=True))
