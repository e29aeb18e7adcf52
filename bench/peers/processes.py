"""Processor time of a whole process tree, from /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class Stat(NamedTuple):
    """What a line of /proc/PID/stat says; `ticks` are user and system time, those of waited-for children included."""

    parent: int
    session: int
    ticks: int


def read_stat(line: str) -> Stat:
    """A program's name may hold spaces and brackets: fields count from the last one."""
    fields = line.rpartition(")")[2].split()
    return Stat(parent=int(fields[1]), session=int(fields[3]), ticks=sum(map(int, fields[11:15])))


def read_stats(proc: Path = PROC) -> dict[int, Stat]:
    """All processes, by id."""
    stats: dict[int, Stat] = {}
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            try:
                stats[int(entry.name)] = read_stat((entry / "stat").read_text())
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended since the folder was listed
    return stats


def find_tree(root: int, stats: dict[int, Stat]) -> set[int]:
    """A process, its descendants, and what else runs in a session of its own: parents may have ended before."""
    tree = {pid for pid, stat in stats.items() if root in {pid, stat.session}}
    while grown := {pid for pid, stat in stats.items() if stat.parent in tree and pid not in tree}:
        tree |= grown
    return tree


def tree_cpu_s(root: int, proc: Path = PROC) -> float:
    """Seconds that the tree has used so far. Raises ProcessLookupError when the root has ended."""
    stats = read_stats(proc)
    if root not in stats:
        raise ProcessLookupError(f"process {root} has ended")
    return sum(stats[pid].ticks for pid in find_tree(root, stats)) / os.sysconf("SC_CLK_TCK")
