"""Options of local engines, and how an engine divides the processor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.backends.local.precision import PrecisionCheck
from shoal.core.protocols import Tensors
from shoal.specs import TextSpec

MAX_STREAMS = 8
"""More slots would split a load into small batches, which are slower than a few large ones. Further cores become
threads of the streams."""


ISA_SWITCHES = ("ONEDNN_MAX_CPU_ISA", "OV_CPU_MAX_ISA", "ATEN_CPU_CAPABILITY")
"""Environment variables that limit an engine's kernels to those of an older processor."""

VARIANTS = ("int8", "fp16")
"""Precisions of a graph's weights, not of its arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to load one graph.

    `streams`: concurrent batches; `threads`: those of all streams together. 0 chooses from the cores. `max_length`:
    tokens of the longest item. `samples`: batches of real inputs for the precision check; without any, `auto` means
    f32. `precision_check`: an earlier result for this graph, used if its key still matches. `warm_up_s`: time to warm
    up before the engine is ready (the rest happens while it is idle); 0 disables warm-up. `spec`: the meaning of the
    model's outputs, for an engine that runs a model's folder. For a graph, the precisions int8 and fp16 mean the
    variant with such weights; the engine chooses the arithmetic. `attention`: see CostModel. `cuda_graphs`: record the
    work of batches on a GPU.
    """

    precision: Literal["auto", "f32", "bf16", "fp16", "int8"] = "auto"
    streams: int = 0
    threads: int = 0
    max_batch_size: int = 64
    max_batch_tokens: int = 16384
    max_batch_ms: float = 40.0
    max_length: int = 512
    samples: Sequence[Tensors] = ()
    precision_check: PrecisionCheck | None = None
    warm_up_s: float = 1.0
    spec: TextSpec | None = None
    attention: float = 0.0
    cuda_graphs: bool = True


def plan_threads(streams: int, threads: int, cores: int) -> tuple[int, int]:
    """Return (streams, threads) with zeros replaced: one thread per core, one stream per core up to MAX_STREAMS."""
    threads = threads or max(cores, streams)
    return streams or min(threads, MAX_STREAMS), threads


def cpu_instructions() -> str:
    """Return the vector and matrix instructions that this processor has and the environment lets engines use. Machines
    that differ here round differently, whatever their processors are called."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text(errors="replace").splitlines() if listed.is_file() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    kinds = ("avx", "amx", "fma", "f16", "sve", "sme", "asimd", "bf16", "i8mm")
    held = [f"{name}={os.environ[name]}" for name in ISA_SWITCHES if os.environ.get(name)]
    return ",".join([*sorted(flag for flag in flags if flag.startswith(kinds)), *held])
