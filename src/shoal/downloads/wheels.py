"""Extracts files from wheels without installing them."""

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
    """Open a wheel for the duration of the block. Raises SourceError if it is corrupt; `what` names it in the
    message."""
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
    """Write archive entries under the given names, which the caller has verified to stay inside `into`.

    `check` is called before each chunk and raises if the work was canceled. `report` receives the bytes written and the
    total. Raises OSError, before anything is written if the files would not fit.
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
