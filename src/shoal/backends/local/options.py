"""What a local engine is asked for, and how it divides the processor."""

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
"""More slots than this make batches small under a load that few large ones would serve faster; cores beyond go to the
threads of each stream."""


ISA_SWITCHES = ("ONEDNN_MAX_CPU_ISA", "OV_CPU_MAX_ISA", "ATEN_CPU_CAPABILITY")
"""Variables by which somebody holds an engine's kernels down to an older processor's."""

VARIANTS = ("int8", "fp16")
"""Precisions of a graph's weights, and not of the arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to load one graph.

    `streams`: batches side by side, `threads`: of all streams together; 0 chooses from the cores. `max_length`: tokens
    of the longest item. `samples`: batches of real inputs for the precision check; without any, `auto` means f32.
    `checked`: an earlier outcome for this graph, used when its key still fits. `warm_up_s`: the time
    that warming may take before the engine is ready (the rest happens while it is idle); 0 warms nothing at all.
    `spec`: what the model's outputs mean, for an engine that runs a model's folder and not a graph. The precisions int8
    and fp16 mean, for a graph, that it is the variant with such weights; which arithmetic goes with them is the
    engine's to say.
    """

    precision: Literal["auto", "f32", "bf16", "fp16", "int8"] = "auto"
    streams: int = 0
    threads: int = 0
    max_batch_size: int = 64
    max_batch_tokens: int = 16384
    max_batch_ms: float = 40.0
    max_length: int = 512
    samples: Sequence[Tensors] = ()
    checked: PrecisionCheck | None = None
    warm_up_s: float = 1.0
    spec: TextSpec | None = None


def plan_threads(streams: int, threads: int, cores: int) -> tuple[int, int]:
    """(streams, threads) with the zeros chosen: every core a thread, a stream a core up to MAX_STREAMS."""
    threads = threads or max(cores, streams)
    return streams or min(threads, MAX_STREAMS), threads


def cpu_instructions() -> str:
    """The instructions for vectors and matrices that this processor has and the environment leaves to the engines: two
    machines that differ here round differently, whatever their processors are called."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text(errors="replace").splitlines() if listed.is_file() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    kinds = ("avx", "amx", "fma", "f16", "sve", "sme", "asimd", "bf16", "i8mm")
    held = [f"{name}={os.environ[name]}" for name in ISA_SWITCHES if os.environ.get(name)]
    return ",".join([*sorted(flag for flag in flags if flag.startswith(kinds)), *held])
