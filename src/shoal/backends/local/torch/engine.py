"""Loading, precision and concurrent batches of the torch engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np

from shoal.backends.local.engine import Lanes, LocalEngine
from shoal.backends.local.errors import engine_error
from shoal.backends.local.options import EngineOptions, plan_threads
from shoal.backends.local.precision import PrecisionCheck, compare, to_comparable_rows
from shoal.backends.local.shapes import WarmUp, is_probe, ladder, length_buckets, shapes, size_buckets
from shoal.backends.local.slots import Slots
from shoal.backends.local.tensor_inputs import Port, check_inputs
from shoal.backends.local.torch.graphs import Graphs
from shoal.backends.local.torch.network import Network, published_precision
from shoal.backends.local.torch.workers import CpuWorker, Gpu, GpuWorker
from shoal.core.protocols import EngineFacts, Tensors
from shoal.errors import ConfigError, MissingExtra
from shoal.machine_limits import usable_cores
from shoal.specs import TextSpec
from shoal.types import Array, compute_digest

CUDA_SLOTS = 2
"""One batch computes while the other is copied to the device and queued behind it. A third would only wait."""

CUDA_STEP = 8
"""Lengths on a GPU are multiples of this: the 16-bit kernels want aligned rows."""

CUDA_SIZES = 2
"""Steps between two powers of two in the numbers of rows for which a GPU's batches are recorded. Padding rows costs
less there than starting the kernels one by one, and every recording costs memory."""

HALVES: tuple[Literal["fp16", "bf16"], ...] = ("fp16", "bf16")
"""Precisions that `auto` tries, in this order: fp16 is eight times as fine, bf16 never overflows."""


async def open(graph: Path, *, name: str, options: EngineOptions) -> LocalEngine:
    """Load and time a model's folder. Implements `OpenEngine` of `backends.local.engines`; needs `options.spec`."""
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise MissingExtra("the engine torch", "torch")
    spec = options.spec
    if spec is None or not await asyncio.to_thread(graph.is_dir):
        raise ConfigError(
            f"the engine torch needs a model folder, and {graph.name} is not one; use another engine", param="engine"
        )
    ports = tuple(Port(input_name, np.dtype(np.int64), (None, None)) for input_name in spec.inputs)
    loaded = await asyncio.to_thread(_load, graph, spec, ports, options)
    network, device = loaded.network, loaded.device
    positions = min(options.max_length, network.positions or options.max_length)
    lengths = ladder(CUDA_STEP, CUDA_STEP, positions, 8) if device.cuda else ()
    is_recorded = device.cuda and options.cuda_graphs
    sizes = ladder(1, 1, options.max_batch_size, CUDA_SIZES) if is_recorded else size_buckets(options.max_batch_size)
    facts = EngineFacts(
        name=name,
        inputs=spec.inputs,
        outputs=spec.outputs,
        slots=device.slots,
        parallel=1,
        max_batch_size=options.max_batch_size,
        max_batch_tokens=options.max_batch_tokens,
        length_buckets=lengths,
        precision=network.precision,
        details={
            "engine": f"torch {device.version}",
            "device": device.title,
            "attention": network.attention,
            "streams": device.slots,
            "threads": device.threads,
            "precision_reason": loaded.reason,
            "precision_checked": loaded.precision_check,
        },
    )
    pool = ThreadPoolExecutor(device.slots, f"shoal-{name}", initializer=device.init_thread)
    gpu: Gpu | None = None
    if device.cuda:
        graphs = Graphs(name, network, spec.outputs, sizes, lengths) if is_recorded else None
        gpu = await asyncio.to_thread(_share_gpu, graphs, spec.inputs)
    slots = Slots(
        CpuWorker(network, pool) if gpu is None else GpuWorker(network, pool, gpu) for _ in range(device.slots)
    )

    async def rebuild() -> Lanes:
        await asyncio.to_thread(device.check_alive)
        return Lanes(slots)

    def end() -> None:
        pool.shutdown(wait=False)  # its threads are idle by then
        if gpu is not None and gpu.graphs is not None:
            gpu.graphs.clear()
        network.free()

    plan = shapes(lengths or length_buckets(positions), sizes, options.max_batch_tokens)
    if not is_recorded:
        plan = [shape for shape in plan if is_probe(shape)]
    engine = LocalEngine(
        facts,
        ports,
        Lanes(slots),
        max_length=options.max_length,
        warm=WarmUp(plan, options.max_batch_ms / 1e3, options.attention),
        rebuild=rebuild if device.cuda else None,
        end=end,
    )
    await engine.warm_up(options.warm_up_s)
    return engine


def _share_gpu(graphs: Graphs | None, inputs: Sequence[str]) -> Gpu:
    """Prepare what the workers of a network share. Raises what torch raises if the longest text cannot be run."""
    import torch

    torch.cuda.synchronize()  # the weights are there, for every stream
    gpu = Gpu(torch.cuda.Stream(), threading.Lock(), graphs)
    if graphs is not None:
        with torch.inference_mode(), torch.cuda.stream(gpu.stream):
            graphs.run_longest(inputs)
    return gpu


@dataclass(frozen=True, slots=True)
class _Device:
    """The device of a network. `name` is torch's name, `title` the one to show."""

    name: str
    title: str
    slots: int
    threads: int
    version: str

    @property
    def cuda(self) -> bool:
        return self.name != "cpu"

    def init_thread(self) -> None:
        """Initialize a compute thread, because torch keeps the number of threads per thread."""
        import torch

        if not self.cuda:
            torch.set_num_threads(max(1, self.threads // self.slots))

    def check_alive(self) -> None:
        """Raise BackendError if the device no longer works, as happens to a GPU after some errors."""
        import torch

        try:
            torch.cuda.empty_cache()
            torch.zeros(1, device=self.name).add_(1).item()
        except RuntimeError as error:
            raise engine_error(error) from error


def _pick_device(options: EngineOptions) -> _Device:
    import torch

    if torch.cuda.is_available():
        title = f"cuda ({torch.cuda.get_device_name(0)})"
        return _Device("cuda:0", title, options.streams or CUDA_SLOTS, 1, torch.__version__)
    _, threads = plan_threads(options.streams or 1, options.threads, usable_cores())
    return _Device("cpu", "cpu", options.streams or 1, threads, torch.__version__)


@dataclass(frozen=True, slots=True)
class _LoadedNetwork:
    network: Network
    device: _Device
    reason: str
    precision_check: PrecisionCheck | None


def _load(folder: Path, spec: TextSpec, ports: Sequence[Port], options: EngineOptions) -> _LoadedNetwork:
    """Load in the configured precision, or in one that passes the check. Raises ModelFileError and ConfigError."""
    device = _pick_device(options)

    def network(precision: str) -> Network:
        return Network(folder, spec, precision, device.name)

    def loaded(precision: str, reason: str, found: PrecisionCheck | None = None) -> _LoadedNetwork:
        return _LoadedNetwork(network(precision), device, reason, found)

    if options.precision != "auto":
        if options.precision == "int8":
            raise ConfigError(
                "the engine torch does not support int8; use precision auto, or another engine", param="precision"
            )
        if options.precision == "fp16" and not device.cuda:
            raise ConfigError("fp16 requires a GPU, and there is none; use precision f32 or auto", param="precision")
        return loaded(options.precision, "as configured")
    if not device.cuda:
        return loaded("f32", "f32 is fastest on this processor")
    published = published_precision(folder, spec)
    if published != "f32":
        return loaded(published, "as published")
    if not options.samples:
        return loaded("f32", "no samples for the 16-bit check")
    keys = {_cache_key(device, half, options.samples): half for half in HALVES}
    kept = options.precision_check
    if kept is not None and kept.key in keys:
        half = keys[kept.key]
        return loaded(half if kept.agrees else "f32", kept.reason, kept)
    exact = network("f32")
    right = _run_samples(exact, ports, options)
    for key, half in keys.items():
        fast = network(half)
        found = PrecisionCheck(key, half, compare(right, _run_samples(fast, ports, options), spec))
        if found.agrees:
            exact.free()
            return _LoadedNetwork(fast, device, found.reason, found)
        fast.free()
    return _LoadedNetwork(exact, device, found.reason, found)


def _cache_key(device: _Device, precision: str, samples: Sequence[Tensors]) -> str:
    return f"torch {device.version}; {device.title}; {precision}; samples {compute_digest(samples)}"


def _run_samples(network: Network, ports: Sequence[Port], options: EngineOptions) -> list[Mapping[str, Array]]:
    """Run the samples and return the outputs for comparison."""
    assert options.spec is not None
    rows: list[Mapping[str, Array]] = []
    for sample in options.samples:
        feeds = check_inputs(sample, ports, options.max_length)
        answers = network.run(feeds, options.spec.outputs, threading.Event())
        rows.append(to_comparable_rows({name: one.cpu().numpy() for name, one in answers.items()}, feeds, options.spec))
    return rows
