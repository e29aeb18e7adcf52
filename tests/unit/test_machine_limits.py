"""What the machine and its control groups leave, of both versions and at every level."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal import machine_limits
from shoal.machine_limits import available_bytes, memory_limit, usable_cores

GB = 2**30
Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write files of control groups, and the process's own groups; the machine has 8 cores and 64 GiB free."""
    monkeypatch.setattr(machine_limits, "_GROUPS", tmp_path)
    monkeypatch.setattr(machine_limits, "_OWN", tmp_path / "own")
    monkeypatch.setattr(machine_limits, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine_limits, "cores_in_affinity", lambda: 8)

    def write(own: str = "0::/\n", free: int = 64 * GB, **files: object) -> None:
        (tmp_path / "own").write_text(own)
        (tmp_path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:  {free // 1024} kB\n")
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")

    return write


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max", 8), ("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), ("", 8)],
)
def test_a_quota_narrows_the_affinity(write: Write, quota: str, cores: int) -> None:
    """Half a core counts as one, one and a half as two, and a quota never adds cores."""
    write(**{"cpu.max": quota})
    assert usable_cores() == cores


def test_limits_of_every_level_hold(write: Write) -> None:
    """systemd writes them to the unit's group or to its slice."""
    files = {
        "system.slice/cpu.max": "300000 100000",
        "system.slice/shoal.service/cpu.max": "max 100000",
        "system.slice/memory.max": 4 * GB,
        "system.slice/memory.current": 3 * GB,
        "system.slice/shoal.service/memory.max": 3 * GB,
        "system.slice/shoal.service/memory.current": GB,
    }
    write("0::/system.slice/shoal.service\n", **files)
    assert (usable_cores(), memory_limit(), available_bytes()) == (3, 3 * GB, GB)


def test_version_1(write: Write) -> None:
    """A container sees its own group as the root; what it reads of the host's path is not there."""
    own = "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n"
    files = {
        "cpu/cpu.cfs_quota_us": 200000,
        "cpu/cpu.cfs_period_us": 100000,
        "memory/memory.limit_in_bytes": 4 * GB,
        "memory/memory.usage_in_bytes": 4 * GB,
        "memory/memory.stat": f"cache 7\ninactive_file 5\ntotal_inactive_file {2 * GB}\ntotal_active_file {GB}",
    }
    write(own, **files)
    assert (usable_cores(), memory_limit(), available_bytes()) == (2, 4 * GB, 3 * GB)
    write(own, **{"cpu/cpu.cfs_quota_us": -1, "memory/memory.limit_in_bytes": 9223372036854771712})
    assert (usable_cores(), memory_limit(), available_bytes()) == (8, None, 64 * GB)


def test_files_in_memory_count_as_free(write: Write) -> None:
    """A model that was just fetched fills a limit with pages that the kernel drops when they are needed."""
    stat = f"anon {GB}\ninactive_file {2 * GB}\nactive_file {GB}"
    write(**{"memory.max": 4 * GB, "memory.current": 4 * GB, "memory.stat": stat})
    assert available_bytes() == 3 * GB
    write(free=GB)
    assert available_bytes() == GB
    write(**{"memory.current": 9 * GB})
    assert available_bytes() == 0


def test_a_group_outside_of_the_container(write: Write) -> None:
    write("0::/../../other\n", **{"cpu.max": "200000 100000"})
    assert usable_cores() == 2


def test_a_system_without_control_groups(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write()
    assert (usable_cores(), memory_limit(), available_bytes()) == (8, None, 64 * GB)
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\n")
    assert available_bytes() == 0
    monkeypatch.setattr(machine_limits, "_OWN", tmp_path / "nowhere")
    monkeypatch.setattr(machine_limits, "_MEMINFO", tmp_path / "nowhere")
    assert memory_limit() is None
    assert available_bytes() > 2**26


def test_this_machine() -> None:
    assert usable_cores() >= 1
    assert available_bytes() > 0
