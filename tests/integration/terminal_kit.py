"""Programs on pseudo-terminals."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROWS = 40
SHOAL = (sys.executable, "-m", "shoal")

# Not `pty.fork`: a fork of a process with gRPC's threads may crash before it can execute anything.
_OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True, slots=True)
class Terminal:
    """A program and our side of its terminal."""

    process: subprocess.Popen[bytes]
    side: int

    def read_until(self, text: str) -> str:
        """Read until `text`, or until the program has ended."""
        output = b""
        while text.encode() not in output:
            try:
                output += os.read(self.side, 65536)
            except OSError:  # the other side has ended
                break
        return output.decode()

    def type(self, line: str) -> None:
        os.write(self.side, line.encode() + b"\n")

    def end(self) -> tuple[int, str]:
        """Return the exit code of a program that ends, and what it has yet to show."""
        shown = self.read_until("\0")
        os.close(self.side)
        return self.process.wait(), shown


def start(
    *words: str, folder: Path, columns: int = 80, term: str = "dumb", env: Mapping[str, str] | None = None
) -> Terminal:
    """Start `shoal` with these words in this folder, on a terminal of its own."""
    side, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _OWN_TERMINAL, *SHOAL, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={**environ, "TERM": term, **(env or {})},
        start_new_session=True,
    )
    os.close(theirs)
    return Terminal(process, side)
