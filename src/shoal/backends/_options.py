"""What a local engine is asked for, and how it divides the processor."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.core.protocols import Tensors

MOST_STREAMS = 8
"""More slots than this make batches small under a load that few large ones would serve faster; cores beyond go to the
threads of each stream."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome of a precision check, worth keeping: `key` names the engine, its version, the processor's
    arithmetic and the samples, `min_cosine` is bf16 against f32 over the samples."""

    key: str
    min_cosine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to load one graph.

    `streams`: batches side by side, `threads`: of all streams together; 0 chooses from the cores. `max_length`: tokens
    of the longest item. `samples`: batches of real inputs for the precision check; without any, `auto` means f32.
    `checked`: an earlier outcome for this graph, used when its key still fits. `warm_up_s`: the time
    that warming may take before the engine is ready (the rest happens while it is idle); 0 warms nothing at all.
    """

    precision: Literal["auto", "f32", "bf16"] = "auto"
    streams: int = 0
    threads: int = 0
    max_batch_size: int = 64
    max_batch_tokens: int = 16384
    max_batch_ms: float = 40.0
    max_length: int = 512
    samples: Sequence[Tensors] = ()
    checked: Checked | None = None
    warm_up_s: float = 1.0


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
