"""Export with PyTorch the graphs of architectures that Shoal does not build.

Everything runs in a separate process (`export_process`): PyTorch takes gigabytes, and its exporter can only be stopped
with its process. The process is set to stay offline, has no token in its environment, and never runs the model's code;
it is no sandbox.

Its memory is monitored, not limited by RLIMIT_AS. PyTorch reserves many times the address space that it touches, and
mapped files count there, so a limit that stops a runaway export would also stop normal ones.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Generic, Literal, TypeVar

import msgspec

from shoal.decoding import json_decoder
from shoal.errors import MissingExtra, ModelFileError, ShoalError, VerificationFailed
from shoal.machine_limits import memory_limit, total_bytes
from shoal.models.progress import Stop

PACKAGES = ("torch", "transformers", "onnxscript", "onnx", "safetensors")
"""Packages that the process needs; PyTorch's exporter is built on `onnxscript`."""

PROGRAM = (sys.executable, "-P", "-m", "shoal.models.convert.export_process")
"""-P: a file in the current folder that is named like a package must not replace it."""

LOOK_S = 0.1
TIMEOUT_S = 1800.0
LAST_WORDS = 300
_KEPT = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "SYSTEMROOT",
    "OMP_NUM_THREADS",
)
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "ORT_DISABLE_TELEMETRY": "1",
    "CUDA_VISIBLE_DEVICES": "",
}

Kind = Literal["encoder", "classifier", "masked"]
Result = TypeVar("Result")


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an export. `folder` holds a complete model. `graph`: int64 `inputs` in, `last_hidden_state` (`kind`
    "encoder") or `logits` out. `verification`: how the graph compares with PyTorch, in words."""

    folder: str
    kind: Kind = "encoder"
    graph: str = ""
    inputs: tuple[str, ...] = ()
    verification: str = ""


class Line(msgspec.Struct, Generic[Result], frozen=True, kw_only=True, omit_defaults=True):
    """One output line of the process: progress (`stage`, `fraction`), and at the end `done` or an `error` of a
    `kind`."""

    stage: str = ""
    fraction: float = 0.0
    done: Result | None = None
    error: str = ""
    kind: Literal["", "model_file", "verification"] = ""
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(Generic[Result]):
    """A program to run in a separate process: `command` writes lines of the type `line`. `file` is the file of errors
    that name none; `alternative` is the advice if this machine cannot run it."""

    command: Sequence[str]
    line: type[Line[Result]]
    file: str = "config.json"
    alternative: str = "export it elsewhere with `optimum-cli export onnx` and serve the folder"


def can_export() -> bool:
    """Whether the extra `convert` is installed."""
    return all(find_spec(package) is not None for package in PACKAGES)


def export(
    folder: Path,
    into: Path,
    *,
    progress: Callable[[str, float], None] | None = None,
    stop: Stop | None = None,
    max_memory_mb: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> ExportResult:
    """Export the model of `folder` into the empty folder `into`.

    `progress` receives (stage, fraction), on this thread. `max_memory_mb` limits the process (0: three quarters of the
    machine's memory). Blocks, for minutes with a large model. Raises MissingExtra, ModelFileError (it cannot be
    exported, or not within memory and time), VerificationFailed (the graph computes something else), Cancelled once the
    process is dead.
    """
    if not can_export():
        raise MissingExtra("Exporting a model whose architecture Shoal does not build", "convert")
    program = Program(command=[*PROGRAM, str(folder), str(into)], line=Line[ExportResult])
    return run_program(program, progress=progress, stop=stop, max_memory_mb=max_memory_mb, timeout_s=timeout_s)


def run_program(
    program: Program[Result],
    *,
    progress: Callable[[str, float], None] | None = None,
    stop: Stop | None = None,
    max_memory_mb: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> Result:
    """Run the program's process and return its result, with the limits and errors of `export`; the process is dead at
    the end."""
    stop = stop or Stop()
    limit = (max_memory_mb or _three_quarters()) * 2**20
    end = time.monotonic() + timeout_s

    def to_error(why: str) -> ModelFileError:
        return ModelFileError(f"{why}, or {program.alternative}", file=program.file)

    with tempfile.TemporaryFile() as words, _run_process(program.command, words) as run:
        lines = _lines(run, program.line)
        while True:
            stop.check()
            with contextlib.suppress(queue.Empty):
                line = lines.get(timeout=LOOK_S)
                if line is None:
                    break
                if line.done is not None:
                    return line.done
                if line.error:
                    raise _error(line, program.file)
                if progress is not None:
                    progress(line.stage, line.fraction)
            if read_memory(run.pid) > limit:
                raise to_error(f"the export needs more than {limit >> 20} MiB of memory; allow more")
            if time.monotonic() > end:
                raise to_error(f"the export took more than {timeout_s:.0f} s; allow more")
        raise to_error(f"the export process {_describe_exit(run.wait())}{_read_last_words(words)}; free memory")


@contextmanager
def _run_process(command: Sequence[str], words: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Run the process with all its children; kill them at the end in any case. Its standard input stays empty and
    closes with this process, which tells it to exit."""
    environ = {name: os.environ[name] for name in _KEPT if name in os.environ} | _OFFLINE
    run = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=words,
        env=environ,
        cwd=tempfile.gettempdir(),
        start_new_session=True,
    )
    try:
        yield run
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        if run.stdin is not None:
            run.stdin.close()


def _lines(run: subprocess.Popen[bytes], kind: type[Line[Result]]) -> queue.Queue[Line[Result] | None]:
    """Queue the lines of the process, then None. Other lines, printed by libraries, are skipped."""
    lines: queue.Queue[Line[Result] | None] = queue.Queue()
    output, decode = run.stdout, json_decoder(kind).decode
    assert output is not None

    def read() -> None:
        with output:
            for line in output:
                with contextlib.suppress(msgspec.MsgspecError):
                    lines.put(decode(line))
        lines.put(None)

    threading.Thread(target=read, name="export", daemon=True).start()
    return lines


def read_memory(pid: int) -> int:
    """Return the bytes that only this process holds, without mapped files; 0 if the system does not tell, or it has
    ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            found = [line for line in status if line.startswith(("RssAnon:", "RssShmem:"))]
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in found) << 10


def _three_quarters() -> int:
    """Three quarters of the memory that this process may have, in MiB."""
    whole, limit = total_bytes(), memory_limit()
    return (whole if limit is None else min(whole, limit)) * 3 // 4 >> 20


def _error(line: Line[Result], file: str) -> ShoalError:
    if line.kind == "verification":
        return VerificationFailed(line.error)
    return ModelFileError(line.error, file=line.file or file)


def _describe_exit(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with {code}"


def _read_last_words(words: IO[bytes]) -> str:
    """Return the last line that the process wrote to its standard error."""
    words.seek(0, os.SEEK_END)
    words.seek(max(0, words.tell() - 4096))
    lines = words.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f" ({last[-LAST_WORDS:]})" if last else ""
