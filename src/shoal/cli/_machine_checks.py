"""Checks of `shoal doctor` that look at this machine only: Python, engines, processor, memory, GPU, limits, disk."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shoal.cli._finding import Finding
from shoal.cli._tables import size_text
from shoal.config import LoadedConfig
from shoal.errors import install_command

GB = 10**9

MIN_PYTHON = (3, 11)

ENGINES = {
    "openvino": "local",
    "onnxruntime": "ort",
    "torch": "torch",
    "openvino-genai": "llm",
}
"""Packages that run models in this process, and the extra that installs each."""

LOW_MEMORY = 2 * GB
LOW_DISK = 5 * GB
LOW_DESCRIPTORS = 4096

GPU_TIMEOUT_S = 10.0


def check_python(_: LoadedConfig) -> Iterator[Finding]:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < MIN_PYTHON:
        yield Finding("python", "fail", found, "install Python 3.11 or newer")
    else:
        yield Finding("python", "ok", found)


def check_engines(_: LoadedConfig) -> Iterator[Finding]:
    installed = [f"{name} {found}" for name in ENGINES if (found := _version(name))]
    if installed:
        yield Finding("engines", "ok", ", ".join(installed))
    else:
        yield Finding(
            "engines",
            "warn",
            "none installed: models run only on other servers",
            f"{install_command('local,llm')}, to run models here",
        )


def check_processor(_: LoadedConfig) -> Iterator[Finding]:
    from shoal.machine_limits import usable_cores

    cores = usable_cores()
    limited = f" of {os.cpu_count()} (affinity or cgroup)" if cores < (os.cpu_count() or cores) else ""
    yield Finding("processor", "ok", f"{cores} core{'s' * (cores > 1)}{limited}, {_instructions()}")
    if _version("openvino"):
        yield _check_precision()


def _instructions() -> str:
    from shoal.backends.local.options import cpu_instructions

    kinds = (
        "amx_bf16",
        "amx_int8",
        "avx512_bf16",
        "avx512_vnni",
        "avx_vnni",
        "avx512f",
        "avx2",
        "asimd",
        "bf16",
        "sve",
    )
    found = [kind for kind in kinds if kind in cpu_instructions().split(",")]
    return " ".join(found) or f"{platform.machine()} without vector instructions that engines use"


def _check_precision() -> Finding:
    from shoal.backends.local.compile import has_bf16, import_openvino

    if has_bf16(import_openvino().Core()):
        return Finding("precision", "ok", "bf16 is fast here: `auto` uses it where a model's results agree with f32")
    return Finding(
        "precision", "ok", "no fast bf16: `auto` uses f32; int8 is faster (`--precision int8`), in its own vector space"
    )


def check_memory(_: LoadedConfig) -> Iterator[Finding]:
    from shoal.machine_limits import available_bytes, memory_limit

    free, limit = available_bytes(), memory_limit()
    found = f"{size_text(free)} available, " + ("no limit" if limit is None else f"cgroup limit {size_text(limit)}")
    if free < LOW_MEMORY and (free or limit is not None):
        yield Finding(
            "memory", "warn", found, "raise the limit, or serve small models: the default one needs about 1 GB"
        )
    else:
        yield Finding("memory", "ok", found)


def check_gpu(_: LoadedConfig) -> Iterator[Finding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        if Path("/dev/nvidia0").exists():
            yield Finding(
                "gpu", "warn", "there is an NVIDIA device, but no nvidia-smi", "install NVIDIA's driver tools"
            )
        else:
            yield Finding("gpu", "ok", "none: models run on the processor or on other servers")
        return
    command = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", "") or getattr(error, "stdout", "") or str(error)).strip()
        yield Finding("gpu", "fail", f"nvidia-smi fails: {reason}", "check the driver: `nvidia-smi` must list the GPU")
        return
    yield _judge_gpu(asked.stdout.strip().replace("\n", "; "))


def _judge_gpu(listed: str) -> Finding:
    torch = _version("torch")
    if not torch:
        return Finding("gpu", "warn", f"{listed}; unused", f"{install_command('torch')}, then --engine torch")
    if "+cpu" in torch:
        return Finding("gpu", "warn", f"{listed}; torch {torch} cannot use it", "install torch with CUDA")
    return Finding("gpu", "ok", f"{listed}; used with --engine torch")


def check_descriptors(_: LoadedConfig) -> Iterator[Finding]:
    from shoal.server.descriptors import MAX_DESCRIPTORS, connection_descriptors

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    found = f"up to {connection_descriptors(limit):,} connections (hard limit of file descriptors: {limit:,})"
    if limit < LOW_DESCRIPTORS:
        yield Finding("descriptors", "warn", found, "raise it: `ulimit -Hn 65536`, or LimitNOFILE=65536 with systemd")
    else:
        yield Finding("descriptors", "ok", found)


def check_disk(loaded: LoadedConfig) -> Iterator[Finding]:
    home = Path(loaded.settings.home).expanduser().absolute()
    # Path.exists() may raise PermissionError in a folder that this user cannot enter.
    existing = next(place for place in (home, *home.parents) if os.path.exists(place))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        advice = "set `home` (SHOAL_HOME) to a folder that this user can write"
        yield Finding("disk", "fail", f"{home} cannot be written", advice)
        return
    free = shutil.disk_usage(existing).free
    found = f"{size_text(free)} free for models in {home}"
    if free < LOW_DISK:
        yield Finding("disk", "warn", found, "free some space: `shoal list`, then `shoal rm NAME`; or set SHOAL_HOME")
    else:
        yield Finding("disk", "ok", found)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
