"""`.ci/release` refuses what is not ready to be released."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal import __version__

ROOT = Path(__file__).resolve().parents[2]
FILES = (".ci/release", "src/shoal/_version.py", "CHANGELOG.md", "deploy/helm/shoal/Chart.yaml")

if shutil.which("git") is None:
    pytest.skip("needs git", allow_module_level=True)


def git(folder: Path, *arguments: str) -> None:
    names = (
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@example.org",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "tag.gpgsign=false",
    )
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with what the script checks, ready to be released."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{__version__}] - 2026-12-01\n")
    git(tmp_path, "init", "--quiet")
    return tmp_path


def release(clone: Path) -> str:
    """Commit, run the script, which must fail, and return its message."""
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message", "x")
    return refused(clone)


def refused(clone: Path) -> str:
    done = subprocess.run([clone / ".ci" / "release"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    return done.stderr


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(clone: Path) -> None:
        text = (clone / name).read_text()
        assert old in text
        (clone / name).write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("CHANGELOG.md", " - 2026-12-01", ""), f"CHANGELOG.md has no line '## [{__version__}] - YYYY-MM-DD'"),
        (edit("src/shoal/_version.py", __version__, "0.1"), "has the version '0.1'"),
        (edit("deploy/helm/shoal/Chart.yaml", f'"{__version__}"', '"0.0.1"'), "appVersion"),
    ],
    ids=["changelog", "version", "chart"],
)
def test_what_is_not_ready_is_refused(clone: Path, change: Callable[[Path], None], message: str) -> None:
    """Nothing is built before everything agrees on the version."""
    change(clone)
    assert message in release(clone)


def test_a_tree_with_changes_is_refused(clone: Path) -> None:
    """A release is of a commit."""
    assert "make web" in release(clone)  # all is well but the pages
    (clone / "new.py").touch()
    assert "the working tree is not clean" in refused(clone)


def test_a_version_is_released_once(clone: Path) -> None:
    """A tag stays on its commit."""
    release(clone)
    git(clone, "tag", f"v{__version__}")
    (clone / "new.py").touch()
    assert f"the tag v{__version__} is on another commit" in release(clone)
