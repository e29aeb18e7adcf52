"""Run as a file, `guard.py PARENT PROGRAM...`: becomes the program, which the kernel kills when PARENT's thread ends.

So no server outlives the Shoal that started it, even after a SIGKILL. It is a separate program because code between
fork and exec may deadlock in a process with threads. It imports nothing from Shoal, so it costs a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, program: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the line above
        sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
