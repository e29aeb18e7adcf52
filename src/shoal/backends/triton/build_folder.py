"""Folders that are expensive to make: built once, by one process at a time, and whole or not there at all."""

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
    """What a caller may want to see; called from the thread that does the work.

    `report_fetch`: bytes of `what` so far, of `total` (None: not known). `report_work`: `stage` is done to `fraction`
    of 1.
    """

    def report_fetch(self, what: str, done: int, total: int | None) -> None: ...

    def report_work(self, stage: str, fraction: float) -> None: ...


class SilentProgress:
    """Progress that nobody looks at."""

    def report_fetch(self, what: str, done: int, total: int | None) -> None: ...

    def report_work(self, stage: str, fraction: float) -> None: ...


def check_stop(stop: threading.Event) -> None:
    """Raise Cancelled when the work is no longer wanted."""
    if stop.is_set():
        raise Cancelled("setting up Triton was stopped; what was half done is removed")


def build_once(
    folder: Path, build: Callable[[Path], None], *, usable: Callable[[Path], bool], stop: threading.Event
) -> Path:
    """`folder`, made by `build` in a temporary one beside it unless what is there is `usable`.

    Waits while another process or thread makes it. What a dead one left behind is removed.
    Raises Cancelled, SourceError for this machine's file system, and what `build` raises.
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
    """Lock files stay: removing one while another process opens it would let two hold it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while not try_lock(lock):
            stop.wait(0.1)
            check_stop(stop)
        yield
    finally:
        os.close(lock)
