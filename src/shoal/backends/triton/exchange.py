"""Two folders trade places in one step, where the system can do that: no reader meets neither of them."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED_ERRNOS = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
"""What an old kernel or a file system without this (NFS, some overlays) answers."""


ASIDE = ".old"
"""Where two renames are needed, `other` lies for an instant beside `one` under its name and this: a process that dies
then leaves it there, for the next one to put back."""


def exchange(one: Path, other: Path) -> None:
    """Both must be there, on one file system. Raises OSError, with both where they were.

    Linux's renameat2; elsewhere by two renames, with an instant between them in which `other` is not there.
    """
    call = _renameat2()
    if call is not None:
        ctypes.set_errno(0)
        if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED_ERRNOS:
            raise OSError(number, os.strerror(number), str(other))
    _by_renames(one, other)


def _by_renames(one: Path, other: Path) -> None:
    aside = one.with_name(one.name + ASIDE)
    other.rename(aside)
    try:
        one.rename(other)
    except OSError:
        aside.rename(other)
        raise
    aside.rename(one)


@cache
def _renameat2() -> Any:
    """The C library's function; None where it has none."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return call
