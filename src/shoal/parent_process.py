"""Ends a process with the one that started it, also after a SIGKILL of that one.

Run as a file, `python -I -S parent_process.py PARENT PROGRAM...`, it becomes a program that ends so: code between fork
and exec may deadlock in a process with threads. It imports nothing of Shoal, so it costs a few milliseconds. Without
`-I`, files beside it would hide modules of Python.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""prctl(2): sets the signal that this process receives when the thread that started it ends."""


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends. Raises SystemExit if the process `parent`
    has already ended. Elsewhere than on Linux it only does the latter."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        sys.stderr.write("this process cannot be set to end with its parent: prctl failed\n")
    if os.getppid() != parent:  # it ended before the line above
        raise SystemExit("the process that started this one has ended")


def main(parent: int, program: list[str]) -> None:
    end_with_parent(parent)
    os.execv(program[0], program)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
