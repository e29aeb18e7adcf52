"""Interrupted changes of a repository, at every step: Triton sees the old entry, the new one, or none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.backends.triton import folder_exchange as module
from shoal.backends.triton.repository import Repository
from shoal.errors import ConfigError
from tests.unit.backends.triton.crash import OPTIONS, change
from tests.unit.backends.triton.entry_kit import entry, tree

FOLDERS = {"org~mini", "org~mini~~encoder", "org~mini~~tokenizer"}
OTHERS = {"org~other", "org~other~~encoder", "org~other~~tokenizer"}


def contents(folder: Path) -> dict[str, bytes | str]:
    """Return a model folder's files without its mark, which contains a time."""
    return {name: content for name, content in tree(folder).items() if name != "shoal.json"}


def states(root: Path) -> list[dict[str, dict[str, bytes | str]]]:
    """Return the complete contents of org/mini's folders before and after a write."""
    found = []
    for graph in (b"old", b"new"):
        repository = Repository(root / graph.decode() / "models")
        repository.write(entry(root / "store", graph=graph, options=OPTIONS))
        found.append({name: contents(repository.folder / name) for name in FOLDERS})
    return found


@pytest.mark.parametrize("scenario", ["fresh", "replace", "remove"])
def test_a_killed_writer_leaves_only_whole_models(tmp_path: Path, scenario: str) -> None:
    """Each folder is completely old or new, and the ensemble never lacks its parts; the next change cleans up."""
    run = [sys.executable, "-m", "tests.unit.backends.triton.crash", str(tmp_path / "cases"), scenario]
    subprocess.run(run, check=True, timeout=50)
    old, new = states(tmp_path / "wanted")
    cases = sorted((tmp_path / "cases").iterdir(), key=lambda case: int(case.name))
    assert len(cases) > {"fresh": 25, "replace": 30, "remove": 12}[scenario]
    for case in cases:
        models = case / "models"
        seen = {path.name for path in models.iterdir()} - OTHERS - {".shoal.lock"}
        assert seen <= FOLDERS, case
        for name in seen:
            assert contents(models / name) in (old[name], new[name]), (case, name)
        assert "org~mini" not in seen or seen == FOLDERS, case
        if scenario == "replace":
            assert seen == FOLDERS, case
    last, *_ = reversed(cases)
    assert {path.name for path in (last / "models").iterdir()} - OTHERS - {".shoal.lock"} == (
        set() if scenario == "remove" else FOLDERS
    )
    for case in cases:
        Repository(case / "models").write(entry(case / "new", "org/third"))
        assert {path.name for path in case.iterdir()} == {"models", "old", "new"}
        left = {path.name for path in (case / "models").iterdir()} - OTHERS - {".shoal.lock", "org~third"}
        assert left in (set(), FOLDERS), case


@pytest.mark.parametrize("scenario", ["fresh", "replace"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failing_rename_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: str, failing: int
) -> None:
    """Folders already in place move back: the old entry stays, or none."""
    repository = Repository(tmp_path / "models")
    if scenario == "replace":
        repository.write(entry(tmp_path / "old", graph=b"old", options=OPTIONS))
    before = tree(repository.folder)
    calls = []

    def failed(*names: Any) -> None:
        calls.append(names)
        if len(calls) == failing + 1:
            raise OSError(5, "Input/output error")

    real_rename, real_exchange = Path.rename, module.exchange

    def rename(path: Path, target: Path) -> Path:
        if Path(target).parent == repository.folder:
            failed(path, target)
        return real_rename(path, target)

    def exchange(one: Path, other: Path) -> None:
        failed(one, other)
        real_exchange(one, other)

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr("shoal.backends.triton.repository.exchange", exchange)
    with pytest.raises(ConfigError, match="Input/output error"):
        change(tmp_path, "replace")
    assert {**before, ".shoal.lock": b""} == tree(repository.folder)
    assert not list(tmp_path.glob(".*"))
