"""The process that tries guides: `python -m shoal.backends.genai.trial SOCKET PATH VOCABULARY`.

It has the model's tokenizer and no model, so that a guide which takes too long or too much ends this process and hurts
no answer. It says that it is ready, then answers each Guide with a Verdict, in frames as in `messages`.
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
"""Of address space that one guide may take."""

OUT_OF_MEMORY_MESSAGE = "the form asked of the answer takes too much memory to compile: ask for a simpler one"

WORN_BYTES = 2**29
"""What was compiled stays in memory: after so much a new process goes on."""


def main(sock: socket.socket, path: Path, vocabulary: int, limit_s: float) -> None:
    """Until the other end closes the socket. A guide that takes longer than `limit_s` ends the process by SIGALRM, also
    in the middle of the library, and also when nobody waits for it any more."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    openvino, genai = import_libraries()
    grammars = GuideCompiler(openvino, genai, genai.Tokenizer(str(path)), vocabulary)
    grammars.try_out(Guide(kind="json_object"))  # threads and tables that every guide needs
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
            verdict = Verdict(refused=refused, size=max(0, after - before), worn=full or after - began > WORN_BYTES)
            _send_verdict(line, verdict)
            if verdict.worn:
                return


def _send_verdict(line: io.BufferedRWPair, verdict: Verdict) -> None:
    body = msgspec.msgpack.encode(verdict)
    line.write(LENGTH.pack(len(body)) + body)
    line.flush()


if __name__ == "__main__":
    process_limits.prefer_oom_kill()
    main(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
