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
    """A Python whose first command ends with the status in `first`, 3 if there is none, and all others with 0."""
    file = tmp_path / "bin" / "python"
    file.parent.mkdir()
    file.write_text(
        f"""#!/bin/sh
        echo "$OV_CPU_MAX_ISA $*" >>{tmp_path}/calls
        [ "$(wc -l <{tmp_path}/calls)" -gt 1 ] || exit "$(cat {tmp_path}/first 2>/dev/null || echo 3)"
        """
    )
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
    """Tests side by side, those that run alone, and those with servers; the exit status is a failure."""
    status, calls = make(python, "test")
    assert status != 0
    assert [" -n " in call for call in calls] == [True, False, True]
    assert "tests/integration" in calls[2]


@pytest.mark.parametrize(("first", "again"), [(0, False), (1, True), (2, False), (3, False)])
def test_what_fails_runs_again_by_itself(python: Path, tmp_path: Path, first: int, again: bool) -> None:
    """Only if tests failed (1): after an interruption, or with a dead worker, others did not run."""
    (tmp_path / "first").write_text(str(first))
    status, calls = make(python, "test")
    assert (status == 0) == (first == 0 or again)
    assert sum("--last-failed" in call for call in calls) == again
    if again:
        assert calls[1].startswith(calls[0])
        assert "-n 0" in calls[1]


def test_arguments_are_passed_on(python: Path) -> None:
    """Arguments select the tests."""
    status, calls = make(python, "test", "ARGS=-k planner", "ISA=avx2")
    assert status != 0
    assert calls == ["AVX2 -m pytest -rs -k planner"]


def test_an_unknown_processor_is_refused(python: Path) -> None:
    """A misspelled name would restrict nothing, and the run would look valid."""
    assert make(python, "test", "ISA=avx") == (2, [])
