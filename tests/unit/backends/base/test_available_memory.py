"""What the kernel and the cgroup leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.backends.base import available_memory

MB = 2**20


def test_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's estimate is used; without one, the memory of the machine."""
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 9 kB\nMemAvailable:     2048 kB\n")
    assert available_memory._meminfo(info) == 2 * MB
    info.write_text("MemTotal: 9 kB\n")
    assert available_memory._meminfo(info) == 0
    assert available_memory._meminfo(tmp_path / "nowhere") > 2**26
    assert available_memory.available_bytes() > 0
    limits = {"memory.max": 3 * MB, "memory.current": 2 * MB}
    monkeypatch.setattr(available_memory, "_number", lambda path: limits[path.name])
    assert available_memory.available_bytes() == MB
    limits["memory.current"] = 4 * MB
    assert available_memory.available_bytes() == 0


def test_limits_of_a_control_group(tmp_path: Path) -> None:
    """The limit is a number, or absent."""
    (tmp_path / "limit").write_text("4096\n")
    (tmp_path / "free").write_text("max\n")
    assert available_memory._number(tmp_path / "limit") == 4096
    assert available_memory._number(tmp_path / "free") is None
    assert available_memory._number(tmp_path / "nowhere") is None
