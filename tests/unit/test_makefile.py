"""`make test` as a developer runs it, with a Python that only notes what it was asked for."""

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
    """(exit status, command lines of the Python)."""
    command = ["make", "--old-file=setup", *words, f"BIN={python.parent}"]
    # a `make test ARGS=...` that runs this would hand its variables on
    env = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "MFLAGS"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    calls = python.parent.parent / "calls"
    return run.returncode, calls.read_text().splitlines() if calls.exists() else []


def test_every_part_is_run_also_when_one_fails(python: Path) -> None:
    """What runs side by side and what runs alone; in the end it is a failure."""
    status, calls = make(python, "test")
    assert status != 0
    assert [" -n " in call for call in calls] == [True, False]
    assert "tests/integration" in calls[1]


def test_arguments_are_passed_on(python: Path) -> None:
    """Then they say what is run."""
    status, calls = make(python, "test", "ARGS=-k planner", "ISA=avx2")
    assert status != 0
    assert calls == ["AVX2 -m pytest -rs -k planner"]


def test_an_unknown_processor_is_refused(python: Path) -> None:
    """A typing error holds nothing down, and would pass for a proof."""
    assert make(python, "test", "ISA=avx") == (2, [])
