"""Folders that are expensive to make: built once, by one process at a time, and either complete or absent."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from shoal.downloads.disk import disk_error, try_lock
from shoal.errors import Cancelled

_PARTIAL = ".partial-"


class Progress(Protocol):
    """Receives progress, in the thread that does the work.

    `report_fetch`: bytes of `what` so far, of `total` (None: unknown). `report_work`: the `fraction` of `stage` that is
    done, 0 to 1.
    """

    def report_fetch(self, what: str, done: int, total: int | None) -> None: ...

    def report_work(self, stage: str, fraction: float) -> None: ...


class SilentProgress:
    """Progress that discards every report."""

    def report_fetch(self, what: str, done: int, total: int | None) -> None: ...

    def report_work(self, stage: str, fraction: float) -> None: ...


def check_stop(stop: threading.Event) -> None:
    """Raise Cancelled if `stop` is set."""
    if stop.is_set():
        raise Cancelled("setting up Triton was stopped; its partial files are removed")


def build_once(
    folder: Path, build: Callable[[Path], None], *, usable: Callable[[Path], bool], stop: threading.Event
) -> Path:
    """Return `folder`, which `build` fills in a temporary place beside it, unless the existing one is `usable`.

    Waits while another process or thread builds it. Removes leftovers of a dead one. Raises Cancelled, SourceError for
    file system errors, and the errors of `build`.
    """
    if usable(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _hold_lock(folder.with_name(f".{folder.name}.lock"), stop):
            if not usable(folder):
                _build(folder, build)
    except OSError as error:
        raise disk_error(error, folder.name) from error
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    mark = f"{_PARTIAL}{folder.name}-"
    for leftover in folder.parent.glob(f"{mark}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=mark, dir=folder.parent))
    try:
        made = partial / folder.name
        made.mkdir()
        build(made)
        if folder.exists():
            folder.rename(partial / "unusable")
        made.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _hold_lock(path: Path, stop: threading.Event) -> Iterator[None]:
    """Hold the lock. Its file is never deleted: that would let two processes hold it, if one opens it meanwhile."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while not try_lock(lock):
            stop.wait(0.1)
            check_stop(stop)
        yield
    finally:
        os.close(lock)
