"""What a local engine is asked for, and how it divides the processor."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.core.protocols import Tensors
from shoal.specs import TextSpec

MOST_STREAMS = 8
"""More slots than this make batches small under a load that few large ones would serve faster; cores beyond go to the
threads of each stream."""


VARIANTS = ("int8", "fp16")
"""Precisions of a graph's weights, and not of the arithmetic."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome of a precision check, worth keeping: `key` names the engine, its version, the processor's
    arithmetic and the samples, the others are `precision` against f32 over the samples: `min_cosine` of vectors,
    `max_difference` of scores, each as it is where the model gives the other."""

    key: str
    min_cosine: float = 1.0
    max_difference: float = 0.0
    precision: Literal["bf16", "fp16"] = "bf16"


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
    checked: Checked | None = None
    warm_up_s: float = 1.0
    spec: TextSpec | None = None


def layout(streams: int, threads: int, cores: int) -> tuple[int, int]:
    """(streams, threads) with the zeros chosen: every core a thread, a stream a core up to MOST_STREAMS."""
    threads = threads or max(cores, streams)
    return streams or min(threads, MOST_STREAMS), threads


def usable_cores() -> int:
    """Cores that this process may use: its affinity, narrowed by the control group's quota."""
    try:
        affinity = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        affinity = os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    return cores_within(affinity, quota.read_text() if quota.is_file() else "max")


def cores_within(affinity: int, cpu_max: str) -> int:
    """Cores under a quota written as in cgroup v2's `cpu.max`: "max" or "<quota us> <period us>"."""
    quota, _, period = cpu_max.strip().partition(" ")
    if quota == "max":
        return affinity
    return max(1, min(affinity, math.ceil(int(quota) / int(period or 100_000))))
