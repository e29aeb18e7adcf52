"""pip as a process, from a local folder."""

from __future__ import annotations

import importlib.util
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.downloads.pip import Advice, Pip
from shoal.errors import Cancelled, SourceError

OWN = Advice(no_wheel="no such wheel", other_hash="another file", no_pip="get a pip", hint="; ask somebody")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder with the wheel of a package "tiny"."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    return folder


Reports = list[tuple[int, int | None]]


def pip(
    tmp_path: Path, index: Path, check: Callable[[], None] = lambda: None, advice: Advice | None = None
) -> tuple[Pip, Reports]:
    work = tmp_path / "work"
    work.mkdir()
    reports: Reports = []
    one = Pip(
        label="tiny things",
        work=work,
        check=check,
        report=lambda done, total: reports.append((done, total)),
        environment=(("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(index)), ("PIP_CONFIG_FILE", "/dev/null")),
        advice=advice or Advice(),
    )
    return one, reports


def test_it_downloads_and_reports(tmp_path: Path, index: Path) -> None:
    """The file arrives, and pip's output is reported."""
    one, reports = pip(tmp_path, index)
    one.run("download", f"--dest={tmp_path / 'into'}", "tiny")
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["tiny-1.0-py3-none-any.whl"]
    assert reports


def test_progress_never_goes_back(tmp_path: Path, index: Path) -> None:
    """pip removes what it has installed; reported progress is bounded by the announced size."""
    one, reports = pip(tmp_path, index)
    log = one.work / "pip.log"
    log.write_text("Collecting tiny\n")
    (one.work / "part").write_bytes(b"x" * 1500)
    total = one._count_bytes(log, 0)
    log.write_text("Downloading tiny.whl (1.0 kB)\nDownloading other.whl (2 kB)\n")
    (one.work / "part").unlink()
    one._count_bytes(log, total)
    (one.work / "part").write_bytes(b"x" * 5000)
    one._count_bytes(log, total)
    assert reports == [(1516, None), (1516, 3000), (3000, 3000)]


def test_failures_are_explained(tmp_path: Path, index: Path) -> None:
    """The index lacks the package."""
    with pytest.raises(SourceError, match=r"tiny things: the package index has no wheel"):
        pip(tmp_path, index)[0].run("download", f"--dest={tmp_path}", "other")


def test_a_stop_ends_pip(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The running pip is killed and waited for."""
    started: list[subprocess.Popen[bytes]] = []

    class RecordedPopen(subprocess.Popen[bytes]):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[call-overload]
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", RecordedPopen)

    def raise_cancelled() -> None:
        raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        pip(tmp_path, index, raise_cancelled)[0].run("download", f"--dest={tmp_path}", "tiny")
    assert started[0].returncode is not None


def test_without_pip_the_error_has_the_next_step(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pip the error says how to get it, before anything starts."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    one, reports = pip(tmp_path, index)
    with pytest.raises(SourceError, match=r"tiny things: .*ensurepip"):
        one.run("download", "tiny")
    assert not reports
    assert not list(one.work.iterdir())


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        ("WARNING: Retrying after connection broken by 'NewConnectionError(...)'\nERROR: No matching", "be reached"),
        ("ERROR: HTTP error 403 while getting the wheel", "refused the request"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "SHA-256"),
        ("no such option: --python", "--upgrade pip"),
        ("ERROR: No matching distribution found for x", "has no wheel"),
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("something\nERROR: nobody expected this\n", "ERROR: nobody expected this"),
        ("", "no output"),
    ],
)
def test_messages_for_pips_errors(output: str, message: str) -> None:
    """Each pip failure becomes one sentence with the next step."""
    error = Advice().error(output, "Triton")
    assert message in error.message
    assert error.message.startswith("Triton: ")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "another file"),
        ("ERROR: No matching distribution found for x", "no such wheel"),
        ("/usr/bin/python: No module named pip", "get a pip"),
        ("ERROR: nobody expected this\n", "pip failed: ERROR: nobody expected this; ask somebody"),
        ("", "pip failed: no output; ask somebody"),
    ],
)
def test_the_caller_provides_the_next_step(output: str, message: str) -> None:
    """If it depends on the download, the caller's own text is used."""
    assert OWN.error(output, "Triton").message == f"Triton: {message}"


def test_a_failed_run_has_the_caller_s_advice(tmp_path: Path, index: Path) -> None:
    """The error has the advice that the caller passed."""
    with pytest.raises(SourceError, match=r"^tiny things: no such wheel$"):
        pip(tmp_path, index, advice=OWN)[0].run("download", f"--dest={tmp_path}", "other")
