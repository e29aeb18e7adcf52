"""Metrics of several processes as one."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from shoal.observability.process_totals import ProcessTotals

SUMS = ("process_virtual_memory_bytes", "process_resident_memory_bytes")


@pytest.fixture
def other() -> Iterator[int]:
    """Return the id of another process that waits."""
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has started
        yield process.pid
        process.kill()


def read(*others: int) -> dict[str, float]:
    return {
        sample.name: sample.value for metric in ProcessTotals(lambda: others).collect() for sample in metric.samples
    }


def test_alone_it_is_the_usual_collector() -> None:
    """Without others, the metrics are those of this process."""
    alone = read()
    assert alone["process_open_fds"] > 0
    assert set(alone) == {
        "process_virtual_memory_bytes",
        "process_resident_memory_bytes",
        "process_start_time_seconds",
        "process_cpu_seconds_total",
        "process_open_fds",
        "process_max_fds",
    }


def test_sizes_are_added(other: int) -> None:
    """Memory and processor time of all processes are one number each."""
    alone, both = read(), read(other)
    for name in SUMS:
        assert both[name] > alone[name]
    assert both["process_cpu_seconds_total"] >= alone["process_cpu_seconds_total"]
    assert set(both) == set(alone)


def test_the_start_is_the_first_one(other: int) -> None:
    assert read(other)["process_start_time_seconds"] == read()["process_start_time_seconds"]


def test_files_and_their_limit_are_those_of_one_process(other: int) -> None:
    """The one that is nearest to its limit: the share that an alert reads is never that of a sum."""
    alone = read()
    files = {"process_open_fds", "process_max_fds"}
    assert {name: read(other, other)[name] for name in files} == {name: alone[name] for name in files}
    resource.prlimit(other, resource.RLIMIT_NOFILE, (5, 5))
    both = read(other)
    assert both["process_max_fds"] == 5
    assert 0 < both["process_open_fds"] <= 5


def test_this_process_twice_is_twice() -> None:
    """Each id counts, whatever it is."""
    assert read(os.getpid())["process_virtual_memory_bytes"] >= 1.9 * read()["process_virtual_memory_bytes"]


def test_a_process_that_has_ended_is_left_out() -> None:
    """A front that died a moment ago does not fail the metrics, also before it was waited for."""
    alone = read()
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    as_zombie = read(process.pid)
    process.wait()
    gone = read(process.pid)
    assert set(as_zombie) == set(gone) == set(alone)


def test_it_registers() -> None:
    """A registry accepts the collector and renders each metric once."""
    registry = CollectorRegistry()
    registry.register(ProcessTotals(list))
    names = [metric.name for metric in registry.collect()]
    assert len(names) == len(set(names)) == 6
