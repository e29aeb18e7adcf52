"""What Shoal cannot build itself, by PyTorch: graphs of other architectures, and weights that exist only as pickles.

All of it happens in a process of its own (`export_process`): PyTorch takes gigabytes, and its exporter can only be
stopped with its process. Pickles are opened there alone, with `weights_only`. The process is told to stay offline, has
no token in its environment, and its model's code is never run; it is no sandbox.

Its memory is watched and not limited by RLIMIT_AS: PyTorch reserves many times the address space that it ever touches,
and files that are mapped count there, so that any limit that stops a runaway export would stop sound ones as well.
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
from shoal.models.progress import Stop

PACKAGES = ("torch", "transformers", "onnxscript", "onnx", "safetensors")
"""What the process needs; `onnxscript` is what PyTorch's exporter is made with."""

PROGRAM = (sys.executable, "-P", "-m", "shoal.models.convert.export_process")
"""-P: a file named like a package, in whatever folder this runs, is not that package."""

LOOK_S = 0.1
TIMEOUT_S = 1800.0
LAST_WORDS = 300
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SYSTEMROOT")
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
    """`folder` holds a whole model as if it had been published so, with every weight in safetensors. `graph`: int64
    `inputs` in, `last_hidden_state` (of the `kind` "encoder") or `logits` out; "" where none was asked for.
    `converted`: files that were written from pickles. `verification`: how the graph compares with PyTorch, in words."""

    folder: str
    kind: Kind = "encoder"
    graph: str = ""
    inputs: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    verification: str = ""


class Line(msgspec.Struct, Generic[Result], frozen=True, kw_only=True, omit_defaults=True):
    """A line of the process: progress (`stage`, `fraction`), and at its end `done` or `error` of a `kind`."""

    stage: str = ""
    fraction: float = 0.0
    done: Result | None = None
    error: str = ""
    kind: Literal["", "model_file", "verification"] = ""
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(Generic[Result]):
    """What runs in a process of its own: `command` writes lines of the type `line`. `file` is named by errors that name
    none, and `elsewhere` says what to do where this machine cannot."""

    command: Sequence[str]
    line: type[Line[Result]]
    file: str = "config.json"
    elsewhere: str = "export it elsewhere with `optimum-cli export onnx` and serve the folder"


def can_export() -> bool:
    """Whether the extra `convert` is installed."""
    return all(find_spec(package) is not None for package in PACKAGES)


def export(
    folder: Path,
    into: Path,
    *,
    graph: bool = True,
    progress: Callable[[str, float], None] | None = None,
    stop: Stop | None = None,
    max_memory_mb: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> ExportResult:
    """Make the empty folder `into` the model of `folder`, as `ExportResult` says; without `graph` only pickles are
    turned.

    `progress` hears (stage, fraction), on this thread. `max_memory_mb` is of the process (0: three quarters of the
    machine's). Blocks, for minutes with a large model. Raises MissingExtra, ModelFileError (it cannot be exported, or
    not within memory and time), VerificationFailed (the graph computes something else), Cancelled once the process is
    dead.
    """
    if not can_export():
        raise MissingExtra("Exporting a model that Shoal has no graph for", "convert")
    program = Program(command=[*PROGRAM, str(folder), str(into), str(int(graph))], line=Line[ExportResult])
    return run_program(program, progress=progress, stop=stop, max_memory_mb=max_memory_mb, timeout_s=timeout_s)


def run_program(
    program: Program[Result],
    *,
    progress: Callable[[str, float], None] | None = None,
    stop: Stop | None = None,
    max_memory_mb: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> Result:
    """What the program's process makes, within bounds and with errors as `export` says; it is dead at the end."""
    stop = stop or Stop()
    limit = (max_memory_mb or _three_quarters()) * 2**20
    end = time.monotonic() + timeout_s

    def to_error(why: str) -> ModelFileError:
        return ModelFileError(f"{why}, or {program.elsewhere}", file=program.file)

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
                raise to_error(f"exporting it takes more than {limit >> 20} MiB of memory; allow more")
            if time.monotonic() > end:
                raise to_error(f"exporting it took more than {timeout_s:.0f} s; allow more")
        raise to_error(
            f"the process that exports it {_describe_exit(run.wait())}{_read_last_words(words)}; free memory"
        )


@contextmanager
def _run_process(command: Sequence[str], words: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process with all that it starts; dead at the end, whatever the end is. Its standard input says nothing, and
    ends with this process, by which it knows that nobody waits for it any more."""
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
    """What the process says, None at its end. What is no line of ours is what a library prints."""
    said: queue.Queue[Line[Result] | None] = queue.Queue()
    output, decode = run.stdout, json_decoder(kind).decode
    assert output is not None

    def read() -> None:
        with output:
            for line in output:
                with contextlib.suppress(msgspec.MsgspecError):
                    said.put(decode(line))
        said.put(None)

    threading.Thread(target=read, name="export", daemon=True).start()
    return said


def read_memory(pid: int) -> int:
    """Bytes that only this process holds, without files that it maps; 0 where the system does not tell, or it ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            found = [line for line in status if line.startswith(("RssAnon:", "RssShmem:"))]
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in found) << 10


def _three_quarters() -> int:
    """Of the machine's memory, in MiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4 >> 20


def _error(line: Line[Result], file: str) -> ShoalError:
    if line.kind == "verification":
        return VerificationFailed(line.error)
    return ModelFileError(line.error, file=line.file or file)


def _describe_exit(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with {code}"


def _read_last_words(words: IO[bytes]) -> str:
    """The last of what the process wrote to its standard error."""
    words.seek(0, os.SEEK_END)
    words.seek(max(0, words.tell() - 4096))
    lines = words.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f" ({last[-LAST_WORDS:]})" if last else ""
