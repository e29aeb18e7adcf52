"""Wheels as archives that files are taken out of; nothing of them is installed."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shoal.downloads.disk import check_free_space
from shoal.errors import SourceError

_CHUNK = 1 << 20


@contextmanager
def open_wheel(wheel: Path, what: str) -> Iterator[zipfile.ZipFile]:
    """The archive, to be read inside the block. Raises SourceError where it shows to be broken; `what` names it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise SourceError(f"{what}: its wheel is broken ({error}); try again") from error


def extract(
    archive: zipfile.ZipFile,
    entries: Mapping[str, zipfile.ZipInfo],
    into: Path,
    *,
    check: Callable[[], None],
    report: Callable[[int, int], None],
) -> None:
    """Write entries under the names that they are given here, which the caller has checked to stay inside `into`.

    `check` is called before each piece and raises when the work is no longer wanted; `report` is told the bytes that
    are written, of all. Raises OSError, before anything is written where it would not fit.
    """
    total = sum(entry.file_size for entry in entries.values())
    check_free_space(into, total)
    done = 0
    for name, entry in entries.items():
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(entry) as source, target.open("xb") as file:
            while chunk := source.read(_CHUNK):
                check()
                file.write(chunk)
                done += len(chunk)
                report(done, total)
