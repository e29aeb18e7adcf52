"""A model repository on disk: written, listed and removed entries, and folders that Shoal never changes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.backends.triton.repository import Mark, Repository, RepositoryEntry
from shoal.errors import AddressError, ConfigError, Forbidden, InvalidValue, ModelFileError
from shoal.models.address import check_name
from tests.unit.backends.triton.entry_kit import entry, tree

TEXT_IN = {"platform": "python", "text_in": True}
BAD = ["", "..", ".", "a/../../b", "/etc", "a\0b", "x" * 300, "größe", "a~b", ".shoal.lock", "a\\b", "..\\b", "a/", "/"]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "models")


def foreign(repository: Repository, name: str) -> Path:
    """Write a model that Shoal did not make."""
    folder = repository.folder / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("theirs")
    (folder / "config.pbtxt").write_text('backend: "python"')
    return folder


def test_an_entry_is_written_as_triton_wants_it(repository: Repository, tmp_path: Path) -> None:
    """The graph, its program, the configuration and the mark; readable for another user's Triton; nothing beside."""
    spec = entry(tmp_path / "store", options={"platform": "python", "warm_up": False})
    assert repository.write(spec) == ("org~mini",)
    found = tree(repository.folder)
    assert set(found) == {".shoal.lock"} | {
        f"org~mini{name}" for name in ("", "/1", "/1/model.onnx", "/1/model.py", "/config.pbtxt", "/shoal.json")
    }
    assert found["org~mini/1/model.onnx"] == b"graph"
    mark = msgspec.json.decode(found["org~mini/shoal.json"], type=Mark)
    assert (mark.name, mark.part, mark.source, mark.space) == ("org/mini", "model", "hf:org/mini@main", "5face")
    assert set(mark.files) == {"1/model.onnx", "1/model.py", "config.pbtxt"}
    assert (repository.folder / "org~mini").stat().st_mode & 0o055 == 0o055 & ~umask()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "store"]


def umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def test_the_listing_shows_who_made_a_model(repository: Repository, tmp_path: Path) -> None:
    """Shoal's with their parts as one, others under the served name that leads to them or else their own."""
    repository.write(entry(tmp_path / "store", options=TEXT_IN))
    for name in ("bert", "acme~bert", "my model"):
        foreign(repository, name)
    (repository.folder / ".hidden").mkdir()
    (repository.folder / "linked").symlink_to(tmp_path / "store")
    listed = repository.entries()
    assert [(one.name, one.folders, one.managed) for one in listed] == [
        ("acme/bert", ("acme~bert",), False),
        ("bert", ("bert",), False),
        ("my model", ("my model",), False),
        ("org/mini", ("org~mini", "org~mini~~tokenizer", "org~mini~~encoder"), True),
    ]
    mini = listed[-1]
    assert (mini.source, mini.space) == ("hf:org/mini@main", "5face")
    assert mini.created > 0
    files = [path for folder in mini.folders for path in (repository.folder / folder).rglob("*") if path.is_file()]
    assert mini.size == sum(path.stat().st_size for path in files)
    assert repository.find("org/mini") == mini
    assert repository.find("org/none") is None


def test_nothing_is_there_before_the_first_entry(repository: Repository) -> None:
    """Listing and removing create nothing either."""
    assert repository.entries() == []
    assert repository.remove("org/mini") is False
    assert not repository.folder.exists()


def test_a_newer_entry_takes_the_place_of_an_older_one(repository: Repository, tmp_path: Path) -> None:
    """With another graph; the old one is gone, and so are parts that the new one lacks."""
    repository.write(entry(tmp_path / "store", options=TEXT_IN))
    repository.write(entry(tmp_path / "store", graph=b"newer", options=TEXT_IN))
    assert (repository.folder / "org~mini~~encoder" / "1" / "model.onnx").read_bytes() == b"newer"
    repository.write(entry(tmp_path / "store", graph=b"newest"))
    assert [path.name for path in sorted(repository.folder.iterdir())] == [".shoal.lock", "org~mini"]
    assert (repository.folder / "org~mini" / "1" / "model.onnx").read_bytes() == b"newest"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "store"]


def test_removing_takes_all_parts(repository: Repository, tmp_path: Path) -> None:
    """Including Python's compiled files; a second removal finds nothing."""
    repository.write(entry(tmp_path / "store", options=TEXT_IN))
    repository.write(entry(tmp_path / "store", "org/other"))
    compiled = repository.folder / "org~mini~~encoder" / "1" / "__pycache__"
    compiled.mkdir()
    (compiled / "model.cpython-312.pyc").write_bytes(b"")
    assert repository.remove("org/mini") is True
    assert [one.name for one in repository.entries()] == ["org/other"]
    assert [path.name for path in sorted(repository.folder.iterdir())] == [".shoal.lock", "org~other"]
    assert repository.remove("org/mini") is False


@pytest.mark.parametrize("taken", ["org~mini", "org~mini~~tokenizer"])
def test_what_others_made_is_left_alone(repository: Repository, tmp_path: Path, taken: str) -> None:
    """It is neither replaced nor removed, and no parts are added beside it."""
    foreign(repository, taken)
    before = tree(repository.folder)
    with pytest.raises(Forbidden, match="not made by Shoal"):
        repository.write(entry(tmp_path / "store", options=TEXT_IN))
    assert tree(repository.folder) == before | {".shoal.lock": b""}
    if taken == "org~mini":
        with pytest.raises(Forbidden, match="not made by Shoal"):
            repository.remove("org/mini")
    else:
        assert repository.remove("org/mini") is False
    assert tree(repository.folder) == before | {".shoal.lock": b""}


@pytest.mark.parametrize("added", ["2/model.onnx", "1/notes.txt", "labels.txt"])
def test_files_that_others_added_are_kept(repository: Repository, tmp_path: Path, added: str) -> None:
    """Such as a second version in Shoal's folder: the error names it, and nothing changes."""
    repository.write(entry(tmp_path / "store", options=TEXT_IN))
    path = repository.folder / "org~mini~~encoder" / added
    path.parent.mkdir(exist_ok=True)
    path.write_text("theirs")
    before = tree(repository.folder)
    with pytest.raises(Forbidden, match=added):
        repository.remove("org/mini")
    for options in (TEXT_IN, {}):
        with pytest.raises(Forbidden, match=added):
            repository.write(entry(tmp_path / "store", graph=b"newer", options=options))
    assert tree(repository.folder) == before


def test_links_are_not_followed(repository: Repository, tmp_path: Path) -> None:
    """A link under a model's name may point anywhere, even to a marked folder."""
    elsewhere = Repository(tmp_path / "elsewhere")
    elsewhere.write(entry(tmp_path / "store"))
    before = tree(elsewhere.folder)
    repository.folder.mkdir()
    (repository.folder / "org~mini").symlink_to(elsewhere.folder / "org~mini")
    for attempt in (lambda: repository.write(entry(tmp_path / "store")), lambda: repository.remove("org/mini")):
        with pytest.raises(Forbidden, match="not made by Shoal"):
            attempt()
    assert tree(elsewhere.folder) == before
    assert (repository.folder / "org~mini").is_symlink()


def test_links_inside_of_an_entry_are_kept(repository: Repository, tmp_path: Path) -> None:
    """A link in Shoal's folder is a file that Shoal did not write."""
    repository.write(entry(tmp_path / "store"))
    (repository.folder / "org~mini" / "2").symlink_to(tmp_path / "store")
    with pytest.raises(Forbidden, match=r"\(2\)"):
        repository.remove("org/mini")
    assert (tmp_path / "store" / "model.onnx").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"format": 99, "name": "org/mini", "part": "model"}'],
    ids=["empty", "broken", "list", "newer"],
)
def test_a_mark_that_is_none_marks_nothing(repository: Repository, content: bytes) -> None:
    """A folder with an unreadable mark, or one of a newer Shoal, is foreign."""
    folder = foreign(repository, "org~mini")
    (folder / "shoal.json").write_bytes(content)
    with pytest.raises(Forbidden):
        repository.remove("org/mini")
    assert folder.exists()


def test_a_copied_entry_is_not_shoals(repository: Repository, tmp_path: Path) -> None:
    """The mark names its folder, so a copy under another name is foreign."""
    repository.write(entry(tmp_path / "store"))
    shutil.copytree(repository.folder / "org~mini", repository.folder / "mine")
    assert [(one.name, one.managed) for one in repository.entries()] == [("mine", False), ("org/mini", True)]
    with pytest.raises(Forbidden):
        repository.remove("mine")


@pytest.mark.parametrize("name", BAD)
def test_bad_names_touch_nothing(repository: Repository, tmp_path: Path, name: str) -> None:
    """They are rejected before any disk access."""
    repository.write(entry(tmp_path / "store"))
    before = tree(tmp_path)
    with pytest.raises(InvalidValue, match="cannot name a model"):
        repository.remove(name)
    with pytest.raises(InvalidValue, match="cannot name a model"):
        entry(tmp_path / "store", name)
    assert repository.find(name) is None
    assert tree(tmp_path) == before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(st.sampled_from("ab./~+\\\0é -_"), max_size=8) | st.text(max_size=8))
def test_no_name_leads_out(tmp_path: Path, name: str) -> None:
    """Whatever name is removed, the tree around the repository stays unchanged."""
    repository = Repository(tmp_path / "deep" / "models")
    (tmp_path / "deep" / "models" / "b").mkdir(parents=True, exist_ok=True)
    (tmp_path / "deep" / "b").mkdir(exist_ok=True)
    before = tree(tmp_path)
    try:
        check_name(name)
        valid = True
    except AddressError:
        valid = False
    if valid and (repository.folder / name.replace("/", "~")).exists():
        with pytest.raises(Forbidden):
            repository.remove(name)
    elif valid:
        assert repository.remove(name) is False
    else:
        with pytest.raises(InvalidValue):
            repository.remove(name)
    after = tree(tmp_path)
    after.pop("deep/models/.shoal.lock", None)
    before.pop("deep/models/.shoal.lock", None)
    assert after == before


def test_the_way_is_checked_beside_the_name(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the name check were too lax, nothing outside would change."""
    repository.write(entry(tmp_path / "store"))
    before = tree(tmp_path)
    monkeypatch.setattr("shoal.backends.triton.repository.triton_name", lambda name, part="model": f"../{name}")
    with pytest.raises(InvalidValue, match="points outside"):
        repository.remove("store")
    assert tree(tmp_path) == before


def test_a_missing_source_leaves_nothing(repository: Repository, tmp_path: Path) -> None:
    """It is detected before the repository is created."""
    spec = entry(tmp_path / "store")
    spec.graph.unlink()
    with pytest.raises(ModelFileError, match="pull the model again"):
        repository.write(spec)
    assert not repository.folder.exists()


def test_disk_errors_name_the_setting(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder stays unchanged."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "model.onnx")

    repository.write(entry(tmp_path / "store"))
    before = tree(tmp_path)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(ConfigError, match=r"No space left on device \(model.onnx\); check triton_repository") as caught:
        repository.write(entry(tmp_path / "store"))
    assert caught.value.param == "triton_repository"
    assert tree(tmp_path) == before


def test_a_repository_that_is_a_file_is_named(tmp_path: Path) -> None:
    """The error names the setting."""
    (tmp_path / "models").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        Repository(tmp_path / "models").write(entry(tmp_path / "store"))


def test_a_model_replaced_while_it_is_listed(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that disappears meanwhile counts 0 bytes."""
    repository.write(entry(tmp_path / "store"))
    lstat = os.lstat

    def missing(path: Any) -> os.stat_result:
        if str(path).endswith("model.onnx"):
            raise FileNotFoundError(2, "gone", str(path))
        return lstat(path)

    whole = repository.entries()[0].size
    monkeypatch.setattr(os, "lstat", missing)
    assert repository.entries()[0].size == whole - len(b"graph")


def test_a_repository_behind_a_link_is_the_real_one(tmp_path: Path) -> None:
    """The folder itself may be a link: the operator configured it."""
    (tmp_path / "real").mkdir()
    (tmp_path / "models").symlink_to(tmp_path / "real")
    repository = Repository(tmp_path / "models")
    repository.write(entry(tmp_path / "store"))
    assert (tmp_path / "real" / "org~mini" / "shoal.json").is_file()
    assert isinstance(repository.find("org/mini"), RepositoryEntry)
