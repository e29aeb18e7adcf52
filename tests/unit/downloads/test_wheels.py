"""Files from a wheel: under the requested names, with progress in bytes, and stoppable between two chunks."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.downloads.wheels import extract, open_wheel
from shoal.errors import Cancelled, SourceError

FILES = {"a/one": b"x" * (2 << 20), "a/b/two": b"y" * 10, "three": b""}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel that holds FILES."""
    file = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    return file


def unpack_all(wheel: Path, into: Path, check: Callable[[], None] = lambda: None) -> list[tuple[int, int]]:
    """Unpack all of it below "new/"; return the reports."""
    into.mkdir()
    reports: list[tuple[int, int]] = []
    with open_wheel(wheel, "tiny") as archive:
        entries = {f"new/{entry.filename}": entry for entry in archive.infolist()}
        extract(archive, entries, into, check=check, report=lambda done, total: reports.append((done, total)))
    return reports


def test_files_get_the_requested_names(wheel: Path, tmp_path: Path) -> None:
    """Progress comes in chunks and ends at the size of the files."""
    into = tmp_path / "into"
    reports = unpack_all(wheel, into)
    contents = {str(path.relative_to(into)): path.read_bytes() for path in into.rglob("*") if path.is_file()}
    assert contents == {f"new/{name}": content for name, content in FILES.items()}
    total = sum(map(len, FILES.values()))
    assert [done for done, _ in reports] == [1 << 20, 2 << 20, total]
    assert {of for _, of in reports} == {total}


def test_a_stop_takes_effect_between_two_chunks(wheel: Path, tmp_path: Path) -> None:
    """The written part stays, and nothing is added to it."""
    checks: list[int] = []

    def check() -> None:
        checks.append(1)
        if len(checks) == 2:
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        unpack_all(wheel, tmp_path / "into", check)
    assert (tmp_path / "into" / "new" / "a" / "one").stat().st_size == 1 << 20


def test_a_wheel_that_does_not_fit_is_not_unpacked(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is reported before a byte is written."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100})())
    with pytest.raises(OSError, match="No space left"):
        unpack_all(wheel, tmp_path / "into")
    assert not list((tmp_path / "into").iterdir())


def test_nothing_is_overwritten(wheel: Path, tmp_path: Path) -> None:
    """An existing file stays unchanged."""
    (tmp_path / "three").write_bytes(b"mine")
    with open_wheel(wheel, "tiny") as archive, pytest.raises(FileExistsError):
        extract(
            archive,
            {"three": archive.getinfo("three")},
            tmp_path,
            check=lambda: None,
            report=lambda done, total: None,
        )
    assert (tmp_path / "three").read_bytes() == b"mine"


@pytest.mark.parametrize("damage", ["cut", "not a zip", "flipped"])
def test_a_broken_wheel_is_reported(wheel: Path, tmp_path: Path, damage: str) -> None:
    """On opening the archive or on reading one of its files."""
    content = bytearray(wheel.read_bytes())
    if damage == "cut":
        content = content[:-100]
    elif damage == "flipped":
        content[40:60] = bytes(20)
    wheel.write_bytes(b"no zip" if damage == "not a zip" else bytes(content))
    with pytest.raises(SourceError, match=r"^tiny: its wheel is broken .*; try again$"):
        unpack_all(wheel, tmp_path / "into")
