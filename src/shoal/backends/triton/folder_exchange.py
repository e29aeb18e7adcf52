"""Exchanges two folders atomically where the system supports it: readers always see exactly one of them."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from pathlib import Path
from typing import Any

from shoal.c_library import find_function

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED_ERRNOS = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
"""Errors of an old kernel, or of a file system without this call (NFS, some overlays)."""


ASIDE = ".old"
"""Suffix for an exchange by renames: `other` is briefly renamed to the name of `one` with this suffix. If the process
dies in between, the next one restores it."""


def exchange(one: Path, other: Path) -> None:
    """Exchange two existing folders on one file system. Raises OSError and leaves both in place.

    Uses Linux's renameat2; elsewhere two renames, between which `other` is briefly missing.
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
    """Return the C library's function, None if it has none."""
    call = find_function("renameat2")
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return call
