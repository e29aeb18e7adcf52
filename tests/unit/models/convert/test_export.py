"""The export process: its output is reported, and it always ends. No PyTorch here."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.errors import Cancelled, MissingExtra, ModelFileError, VerificationFailed
from shoal.models.convert import export as module
from shoal.models.convert.export import ExportResult, can_export, export, read_memory
from shoal.models.progress import Stop

SetProgram = Callable[[str], None]
DONE = '{"done": {"folder": "x", "kind": "encoder", "graph": "onnx/model.onnx", "verification": "fine"}}'


@pytest.fixture
def set_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetProgram:
    """Sets the program that replaces the exporter; it writes its process id to `pid`."""

    def program(text: str) -> None:
        file = tmp_path / "program.py"
        file.write_text(f"import os, sys, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n{text}")
        monkeypatch.setattr(module, "PROGRAM", (sys.executable, str(file)))
        monkeypatch.setattr(module, "can_export", lambda: True)

    return program


def is_dead(tmp_path: Path) -> bool:
    try:
        os.kill(int((tmp_path / "pid").read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def run(tmp_path: Path, **options: object) -> ExportResult:
    return export(tmp_path / "model", tmp_path / "into", **options)  # type: ignore[arg-type]


def test_progress_and_the_outcome_are_reported(tmp_path: Path, set_program: SetProgram) -> None:
    """Shoal's lines in order, on the caller's thread; output of libraries between them is ignored."""
    set_program(
        f"""print('{{"stage": "load", "fraction": 0.5}}')
print("Some library says hello")
print('{{"stage": "export", "fraction": 1}}')
print('{DONE}'.replace('"x"', '"' + sys.argv[2] + '"'))
"""
    )
    reports: list[tuple[str, float, int]] = []
    result = run(tmp_path, progress=lambda stage, at: reports.append((stage, at, threading.get_ident())))
    assert reports == [("load", 0.5, threading.get_ident()), ("export", 1.0, threading.get_ident())]
    assert result == ExportResult(
        folder=str(tmp_path / "into"), kind="encoder", graph="onnx/model.onnx", verification="fine"
    )
    assert is_dead(tmp_path)


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ('{"error": "no", "kind": "model_file", "file": "a.bin"}', ModelFileError, "a.bin: no"),
        ('{"error": "no", "kind": "model_file"}', ModelFileError, "config.json: no"),
        ('{"error": "differs", "kind": "verification"}', VerificationFailed, "differs"),
    ],
)
def test_its_errors_are_ours(
    tmp_path: Path, set_program: SetProgram, line: str, kind: type[Exception], message: str
) -> None:
    set_program(f"print('{line}')")
    with pytest.raises(kind, match=message):
        run(tmp_path)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("sys.exit(3)", r"ended with 3; free memory"),
        ("sys.exit('out of luck')", r"ended with 1 \(out of luck\)"),
        ("os.kill(os.getpid(), 9)", r"was killed by signal 9; free memory"),
        ("print('nothing of ours')", r"ended with 0"),
    ],
)
def test_an_end_without_an_outcome_is_an_error(
    tmp_path: Path, set_program: SetProgram, program: str, message: str
) -> None:
    """With the last output of the process and the next step."""
    set_program(program)
    with pytest.raises(ModelFileError, match=message):
        run(tmp_path)


def test_it_is_killed_with_all_that_it_started(tmp_path: Path, set_program: SetProgram) -> None:
    """On cancellation; the program runs longer than a test may."""
    set_program(
        f"""import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, 'w').write(str(child.pid))
print('{{"stage": "load"}}', flush=True)
time.sleep(600)
"""
    )
    stop = Stop()
    with pytest.raises(Cancelled):
        run(tmp_path, stop=stop, progress=lambda *_: stop.set())
    child = int((tmp_path / "pid").read_text())
    while not _gone(child):  # it was killed, but nobody here waits for a grandchild
        os.sched_yield()


KILLED = """
import sys
from pathlib import Path
from shoal.models.convert import export as module
module.PROGRAM = (sys.executable, sys.argv[1])
module.can_export = lambda: True
module.export(Path(sys.argv[2]), Path(sys.argv[2]), progress=lambda *_: print("running", flush=True))
"""


def test_it_does_not_outlive_its_parent(tmp_path: Path, set_program: SetProgram) -> None:
    """A killed server cannot stop it: it ends by itself, with its child processes."""
    set_program(
        """import subprocess
from shoal.models.convert.export_process import exit_with_stdin
exit_with_stdin()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print('{"stage": "load", "file": "%d"}' % child.pid, flush=True)
time.sleep(600)
"""
    )
    command = [sys.executable, "-c", KILLED, str(tmp_path / "program.py"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"running\n"
        pid = int((tmp_path / "pid").read_text())
        assert not _gone(pid)
        parent.kill()
    while not _gone(pid):
        os.sched_yield()


def _gone(pid: int) -> bool:
    """Whether a process ended; an unreaped process is a zombie."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_its_memory_is_bounded(tmp_path: Path, set_program: SetProgram) -> None:
    """Resident memory counts, not mapped memory: mapping 300 MiB of a file is fine, allocating as much is not."""
    mapped = f"""import mmap
with open({str(tmp_path / "large")!r}, 'wb') as file:
    file.truncate(300 << 20)
with open({str(tmp_path / "large")!r}, 'rb') as file:
    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
sum(view[::4096])
"""
    set_program(mapped + f"print('{DONE}')")
    assert run(tmp_path, max_memory_mb=200).kind == "encoder"
    set_program("held = b'x' * (300 << 20)\ntime.sleep(600)")
    with pytest.raises(ModelFileError, match="more than 200 MiB"):
        run(tmp_path, max_memory_mb=200)
    assert is_dead(tmp_path)


def test_its_time_is_bounded(tmp_path: Path, set_program: SetProgram) -> None:
    set_program("time.sleep(600)")
    with pytest.raises(ModelFileError, match="more than 0 s"):
        run(tmp_path, timeout_s=0.2)
    assert is_dead(tmp_path)


def test_it_has_no_secrets_and_no_network(
    tmp_path: Path, set_program: SetProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the hub's token nor any other variable of the server's environment."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("SHOAL_API_KEY", "secret")
    set_program(f"""print('{DONE}'.replace("fine", ",".join(sorted(os.environ)) + os.environ["HF_HUB_OFFLINE"]))""")
    report = run(tmp_path).verification
    assert report.endswith("1")
    assert "HF_HUB_OFFLINE" in report
    assert not {"HF_TOKEN", "SHOAL_API_KEY"} & set(report.split(","))


def test_without_the_extra_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for absent in module.PACKAGES:
        monkeypatch.setattr(module, "find_spec", lambda name, absent=absent: None if name == absent else object())
        assert not can_export()
        with pytest.raises(MissingExtra, match=r"\[convert\]"):
            run(tmp_path)
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    assert can_export()


def test_memory_of_a_process() -> None:
    """Known for this process, 0 for a missing one."""
    assert read_memory(os.getpid()) > 1 << 20
    assert read_memory(2**22 + 1) == 0


def test_a_container_s_limit_narrows_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would end the server with the export."""
    whole = module._three_quarters()
    monkeypatch.setattr(module, "memory_limit", lambda: 256 << 20)
    assert module._three_quarters() == 192 < whole
