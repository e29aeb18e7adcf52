"""The facts without which a benchmark's number means nothing: processor, cores, memory, versions."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import msgspec

from shoal.machine_limits import cores_in_affinity, total_bytes

PACKAGES = ("shoal", "openvino", "onnxruntime", "tokenizers", "numpy", "uvicorn", "uvloop", "starlette", "orjson")
ISA = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """`isa` holds those of ISA that the processor has; `memory_gb` is None where it cannot be read."""

    processor: str
    cores: int
    isa: list[str]
    memory_gb: float | None
    system: str
    python: str
    versions: dict[str, str]


def describe_machine(packages: tuple[str, ...] = PACKAGES) -> Machine:
    info = cpu_info(_read("/proc/cpuinfo"))
    flags = info.get("flags", "").split()
    return Machine(
        processor=_processor(info),
        cores=cores_in_affinity(),
        isa=[name for name in ISA if name in flags],
        memory_gb=_memory_gb(),
        system=f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        python=platform.python_version(),
        versions={name: version for name in packages if (version := _version(name))},
    )


def cpu_info(text: str) -> dict[str, str]:
    """The first processor of /proc/cpuinfo as key and value."""
    pairs = (line.split(":", 1) for line in text.split("\n\n", 1)[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _processor(info: dict[str, str]) -> str:
    """Its name with family and model, because clouds hide the exact name."""
    name = info.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in info:
        name += f" (family {info['cpu family']} model {info.get('model', '?')})"
    return name


def _memory_gb() -> float | None:
    try:
        return round(total_bytes() / 2**30, 1)
    except (ValueError, OSError):
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
