"""`make test` with a fake Python that records its command lines."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

if shutil.which("make") is None:
    pytest.skip("needs make", allow_module_level=True)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    file = tmp_path / "bin" / "python"
    file.parent.mkdir()
    file.write_text(f'#!/bin/sh\necho "$OV_CPU_MAX_ISA $*" >>{tmp_path}/calls\nexit 3\n')
    file.chmod(0o755)
    return file


def make(python: Path, *words: str) -> tuple[int, list[str]]:
    """Return (exit status, command lines of the Python)."""
    command = ["make", "--old-file=setup", *words, f"BIN={python.parent}"]
    # an outer `make test ARGS=...` would pass on its variables
    env = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "MFLAGS"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    calls = python.parent.parent / "calls"
    return run.returncode, calls.read_text().splitlines() if calls.exists() else []


def test_every_part_runs_even_if_one_fails(python: Path) -> None:
    """The parallel and the serial part both run; the exit status is a failure."""
    status, calls = make(python, "test")
    assert status != 0
    assert [" -n " in call for call in calls] == [True, False]
    assert "tests/integration" in calls[1]


def test_arguments_are_passed_on(python: Path) -> None:
    """Arguments select the tests."""
    status, calls = make(python, "test", "ARGS=-k planner", "ISA=avx2")
    assert status != 0
    assert calls == ["AVX2 -m pytest -rs -k planner"]


def test_an_unknown_processor_is_refused(python: Path) -> None:
    """A misspelled name would restrict nothing, and the run would look valid."""
    assert make(python, "test", "ISA=avx") == (2, [])
