"""Staging folders of a Triton repository: one process at a time builds models there, out of Triton's sight.

Triton treats every folder in a repository as a model, even a hidden one. If it loads all models at start, one invalid
folder makes it exit. So the staging folder is beside the repository. If that place is not writable or on another
disk (a mounted volume), it is a hidden folder inside, which a Triton in explicit control mode ignores; Shoal needs that
mode anyway.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.backends.triton.folder_exchange import ASIDE
from shoal.downloads.disk import try_lock
from shoal.errors import Unavailable

LOCK = ".shoal.lock"
"""Held by the writing process. Triton ignores files next to its models. It is never deleted: two could hold it."""

PARTIAL = ".shoal-partial-"
_PAUSE_S = 0.05

_log = logging.getLogger(__name__)


@contextmanager
def staging(repository: Path, wait_s: float) -> Iterator[Path]:
    """Lock a repository and yield an empty folder on its disk, which is deleted at the end with its remaining content.

    Staging folders of a dead writer are deleted first. Blocks. Raises OSError, and Unavailable when another process has
    held the lock for `wait_s` seconds.
    """
    repository.mkdir(parents=True, exist_ok=True)
    lock = os.open(repository / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        _acquire(lock, repository, wait_s)
        places = _candidate_folders(repository)
        for leftover in _leftovers(places):
            _put_back(leftover, repository)
            shutil.rmtree(leftover, ignore_errors=True)
        partial = _make_folder(places)
        try:
            yield partial
        finally:
            # Triton may have added files of another user: a later process with permission deletes them.
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(lock)


def _put_back(leftover: Path, repository: Path) -> None:
    """Restore the models that a writer had moved aside when it died, before their successors were in place."""
    for aside in leftover.glob(f"*{ASIDE}"):
        place = repository / aside.name.removesuffix(ASIDE)
        if not os.path.lexists(place):
            aside.rename(place)


def _acquire(lock: int, repository: Path, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        if try_lock(lock):
            return
        if time.monotonic() >= deadline:
            raise Unavailable(
                f"another process has been writing to {repository} for {wait_s:g} s: try again", retry_after=wait_s
            )
        time.sleep(_PAUSE_S)


def _candidate_folders(repository: Path) -> list[tuple[Path, str]]:
    """Return the folders to stage in, each with a prefix for names, the best first."""
    beside = (repository.parent, f".{repository.name}{PARTIAL}")
    inside = (repository, PARTIAL)
    same_disk = repository.parent.stat().st_dev == repository.stat().st_dev
    return [beside, inside] if same_disk else [inside]


def _make_folder(places: list[tuple[Path, str]]) -> Path:
    for place, prefix in places[:-1]:
        try:
            return Path(tempfile.mkdtemp(dir=place, prefix=prefix))
        except OSError as error:
            _log.debug("cannot stage models in %s: %s", place, error)
    place, prefix = places[-1]
    return Path(tempfile.mkdtemp(dir=place, prefix=prefix))


def _leftovers(places: list[tuple[Path, str]]) -> Iterator[Path]:
    for place, prefix in places:
        try:
            with os.scandir(place) as found:
                names = [one.name for one in found if one.is_dir(follow_symlinks=False)]
        except OSError as error:
            _log.debug("%s cannot be read: %s", place, error)
            continue
        yield from (place / name for name in names if name.startswith(prefix))
