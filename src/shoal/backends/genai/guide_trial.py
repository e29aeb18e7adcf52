"""The process that tries guides: `python -m shoal.backends.genai.guide_trial SOCKET PATH VOCABULARY`.

It loads the model's tokenizer but no model, so that a guide over the limits of time or memory ends only this process
and fails no answer. It reports that it is ready, then answers each Guide with a Verdict, in frames as in `messages`.
"""

from __future__ import annotations

import io
import signal
import socket
import sys
from pathlib import Path

import msgspec

from shoal.backends.genai import guide_bounds, process_limits
from shoal.backends.genai.grammar import GuideCompiler
from shoal.backends.genai.messages import LENGTH, Verdict
from shoal.backends.genai.pipeline import import_libraries
from shoal.decoding import msgpack_decoder
from shoal.errors import InvalidValue
from shoal.types import Guide

ROOM_BYTES = 2**30
"""Address space that one guide may allocate."""

OUT_OF_MEMORY_MESSAGE = "the output format takes too much memory to compile: use a simpler one"

MAX_COMPILED_BYTES = 2**29
"""Memory limit of compiled guides, which are never freed: beyond it, a new process replaces this one."""


def main(sock: socket.socket, path: Path, vocabulary: int, limit_s: float) -> None:
    """Run until the gateway closes the socket. A guide that takes longer than `limit_s` ends the process by SIGALRM,
    even inside the library, and even if no request waits for it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    openvino, genai = import_libraries()
    grammars = GuideCompiler(openvino, genai, genai.Tokenizer(str(path)), vocabulary)
    grammars.try_out(Guide(kind="json_object"))  # creates the threads and tables that every guide needs
    _, began = process_limits.memory_sizes()
    guides = msgpack_decoder(Guide)
    with sock, sock.makefile("rwb") as line:
        _send_verdict(line, Verdict())
        while len(head := line.read(LENGTH.size)) == LENGTH.size:
            guide = guides.decode(line.read(LENGTH.unpack(head)[0]))
            process_limits.limit_growth(ROOM_BYTES)
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            _, before = process_limits.memory_sizes()
            refused, full = "", False
            try:
                guide_bounds.check(guide)
                grammars.try_out(guide)
            except InvalidValue as error:
                refused = error.message
            except MemoryError:
                refused, full = OUT_OF_MEMORY_MESSAGE, True
            signal.setitimer(signal.ITIMER_REAL, 0)
            _, after = process_limits.memory_sizes()
            verdict = Verdict(
                refused=refused, size=max(0, after - before), needs_restart=full or after - began > MAX_COMPILED_BYTES
            )
            _send_verdict(line, verdict)
            if verdict.needs_restart:
                return


def _send_verdict(line: io.BufferedRWPair, verdict: Verdict) -> None:
    body = msgspec.msgpack.encode(verdict)
    line.write(LENGTH.pack(len(body)) + body)
    line.flush()


if __name__ == "__main__":
    process_limits.prefer_oom_kill()
    main(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
