"""The store: whole entries, one worker a model, nothing outside of its folder."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path

import msgspec
import pytest

from shoal.backends import parse_address
from shoal.errors import Cancelled, SourceError
from shoal.models.address import Address
from shoal.models.manifest import MANIFEST, NOTES, Manifest, measure
from shoal.models.progress import Stop
from shoal.models.store import Store, StoredModel
from shoal.specs import TextSpec

SPEC = TextSpec(tokenizer="tokenizer.json", inputs=("input_ids",), dimension=8, max_tokens=16)
TINY = parse_address("org/tiny")


def put(
    store: Store, address: Address, *, revision: str = "r1", content: bytes = b"graph", created: int = 1
) -> StoredModel:
    with store.working(address) as partial:
        (partial / "model.onnx").write_bytes(content)
        source = msgspec.structs.replace(address, revision=revision)
        manifest = Manifest(
            id=address.id,
            address=str(address),
            source=str(source),
            revision=revision,
            converter=1,
            graph="model.onnx",
            graph_source="built",
            weights={},
            conversion="built",
            parameters=1,
            text=SPEC,
            created=created,
            files=measure(partial),
        )
        return store.commit(partial, address, manifest)


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_what_is_put_is_found(store: Store) -> None:
    """A committed entry is found by its address, with its graph in place and nothing half done beside it."""
    stored = put(store, TINY)
    assert store.find(TINY) == stored
    assert store.entries() == [stored]
    assert stored.graph.read_bytes() == b"graph"
    assert stored.tokenizer == stored.path / "tokenizer.json"
    assert not [name for name in everything(store.home) if "partial" in name]


def test_an_empty_home_holds_nothing(tmp_path: Path) -> None:
    """Reading a store that was never written answers nothing and creates nothing."""
    store = Store(tmp_path / "home")
    assert store.entries() == []
    assert store.find(TINY) is None
    assert not store.home.exists()


def test_revisions_are_separate(store: Store) -> None:
    """What was asked for by one revision does not answer for another, but does for the exact one that it led to."""
    put(store, parse_address("org/tiny@v1"), revision="aaa")
    assert store.find(TINY) is None
    assert store.find(parse_address("org/tiny@v2")) is None
    assert store.find(parse_address("org/tiny@v1"))
    assert store.find(parse_address("org/tiny@aaa"))


def test_models_do_not_share_folders(store: Store) -> None:
    """Names that differ in their slash, scheme or path are different models."""
    texts = ["org/tiny", "org--tiny", "org-/-tiny", "org_tiny", "pypi:tiny", "tiny", "file:/a/tiny", "file:/b/tiny"]
    paths = {put(store, parse_address(text)).path for text in texts}
    assert len(paths) == len({path.parent for path in paths}) == len(texts)


def test_a_new_answer_replaces_the_old(store: Store) -> None:
    """Pulling again leaves one entry an address, also when the content of the same revision changed."""
    put(store, TINY, revision="r1")
    put(store, TINY, revision="r1", content=b"other")
    newest = put(store, TINY, revision="r2", created=2)
    other = put(store, parse_address("org/tiny@v1"), revision="r1", created=3)
    assert store.entries() == [other, newest]


def test_a_folders_entry_answers_for_its_content_alone(store: Store) -> None:
    """For file: the fingerprint decides, so that a changed folder is converted anew."""
    before = msgspec.structs.replace(parse_address("file:/a/tiny"), revision="f1")
    after = msgspec.structs.replace(before, revision="f2")
    put(store, before, revision="f1")
    assert store.find(before)
    assert store.find(after) is None


def test_damaged_entries_are_not_found(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """An entry whose file was cut is passed over, and the log says which file."""
    stored = put(store, TINY)
    stored.graph.write_bytes(b"g")
    with caplog.at_level(logging.WARNING):
        assert store.find(TINY) is None
    assert "model.onnx has 1 bytes" in caplog.text


def test_foreign_manifests_are_passed_over(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """An entry of another format hides neither itself from the log nor its neighbours from the list."""
    good = put(store, TINY)
    bad = put(store, parse_address("org/other"))
    (bad.path / MANIFEST).write_text('{"format": 99}')
    assert store.entries() == [good]
    assert "this version of Shoal reads 1" in caplog.text


def test_failed_work_leaves_nothing(store: Store) -> None:
    """An error while an entry is built removes what was built, and keeps the entry that was there."""
    old = put(store, TINY)
    with pytest.raises(ValueError, match="boom"), store.working(TINY) as partial:
        (partial / "model.onnx").write_bytes(b"half")
        raise ValueError("boom")
    assert store.find(TINY) == old
    with pytest.raises(ValueError, match="boom"), store.working(parse_address("org/new")):
        raise ValueError("boom")
    assert {path.name for path in (store.home / "models").iterdir()} == {"hf+org+tiny"}


def test_leftovers_of_the_dead_are_removed(store: Store) -> None:
    """What a killed process left half done goes as soon as the model is worked on again."""
    left = store.home / "models" / "hf+org+tiny" / ".partial-dead"
    left.mkdir(parents=True)
    (left / "model.onnx").write_bytes(b"half")
    put(store, TINY)
    assert not left.exists()


def test_leftovers_of_other_models_are_removed(store: Store) -> None:
    """By the next pull of anything, but for what somebody works on; what is whole beside them stays."""
    whole = put(store, parse_address("org/whole"))
    dead = [store.home / "models" / name / ".partial-dead" for name in ("hf+org+gone", "hf+org+whole")]
    for left in dead:
        left.mkdir(parents=True)
        (left / "model.onnx").write_bytes(b"half")
    with store.working(parse_address("org/busy")) as busy:
        put(store, TINY)
        assert busy.is_dir()
    assert not any(left.exists() for left in dead)
    assert not dead[0].parent.exists()
    assert store.find(parse_address("org/whole")) == whole


def aside(stored: StoredModel) -> Path:
    """Where an entry is for the instant in which a new one takes its place."""
    return stored.path.with_name(f".aside-{stored.path.name}")


def test_what_is_replaced_is_deleted_last(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever dies while an old entry is deleted, the new one is in its place."""
    put(store, TINY, revision="r1")
    found: list[bytes] = []

    def delete(path: Path, **options: bool) -> None:
        stored = Store(store.home).find(TINY)
        found.append(stored.graph.read_bytes() if stored else b"")

    with monkeypatch.context() as patch:
        patch.setattr("shoal.models.store.shutil.rmtree", delete)
        put(store, TINY, revision="r1", content=b"same revision", created=2)
        put(store, TINY, revision="r2", content=b"other revision", created=3)
    assert set(found) == {b"same revision", b"other revision"}


def test_readers_beside_a_refresh_always_find_the_model(store: Store) -> None:
    """An entry that is replaced again and again is never absent."""
    put(store, TINY)
    done = threading.Event()
    answers: list[StoredModel | None] = []

    def read() -> None:
        reader = Store(store.home)
        while not done.is_set():
            answers.append(reader.find(TINY))

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(50):
        put(store, TINY, content=b"x" * number)
    done.set()
    thread.join(10)
    assert answers
    assert None not in answers


@pytest.mark.parametrize("look", ["find", "entries", "working"])
def test_an_entry_whose_replacement_never_came_is_put_back(store: Store, look: str) -> None:
    """A process that died between the two renames loses nothing, whoever comes next."""
    stored = put(store, TINY)
    stored.path.rename(aside(stored))
    if look == "find":
        assert store.find(TINY) == stored
    elif look == "entries":
        assert store.entries() == [stored]
    else:
        with store.working(TINY):
            assert stored.path.exists()
    assert not aside(stored).exists()


def test_an_entry_that_was_replaced_does_not_come_back(store: Store) -> None:
    """A process that died after the second rename leaves one entry too many, which goes with the model."""
    stored = put(store, TINY)
    shutil.copytree(stored.path, aside(stored))
    assert store.find(TINY) == stored
    store.remove(stored)
    assert store.entries() == []
    assert not stored.path.parent.exists()


def test_a_rename_that_fails_leaves_the_old_entry(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that refuses the new one keeps the one that it has."""
    stored = put(store, TINY)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.startswith(".partial") and target == stored.path:
            raise OSError("no")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="no"):
        put(store, TINY, content=b"new")
    assert store.find(TINY) == stored
    assert stored.graph.read_bytes() == b"graph"


def test_a_rename_that_is_under_way_is_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process holds the model, its second rename is a moment away."""
    stored = put(store, TINY)
    with store.working(TINY):
        stored.path.rename(aside(stored))
        waits: list[float] = []

        def wait(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                aside(stored).rename(stored.path)

        monkeypatch.setattr("shoal.models.store.time.sleep", wait)
        assert store.find(TINY) == stored
        assert len(waits) == 3


def test_a_store_that_cannot_be_written_stays_as_it_is(store: Store) -> None:
    """What was moved aside is not put back where nothing can be locked; reading goes on."""
    stored = put(store, TINY)
    other = put(store, parse_address("org/other"))
    stored.path.rename(aside(stored))
    shutil.rmtree(store.home / "locks")
    (store.home / "locks").write_text("")
    assert store.find(TINY) is None
    assert store.entries() == [other]
    assert aside(stored).exists()


def test_a_home_that_is_no_folder_is_a_one_line_error(tmp_path: Path) -> None:
    """Reading and writing name the place and the way out."""
    home = tmp_path / "file"
    home.write_text("")
    store = Store(home)
    with pytest.raises(SourceError, match=r"file/models cannot be read \(Not a directory\): set SHOAL_HOME"):
        store.entries()
    with pytest.raises(SourceError, match="cannot be read"):
        store.find(TINY)
    with pytest.raises(SourceError, match="cannot be written"), store.working(TINY):
        pytest.fail("work in a file")


def test_models_that_are_no_folder_are_a_one_line_error(tmp_path: Path) -> None:
    """Locks may be had, and still there is no place to work in."""
    (tmp_path / "models").write_text("")
    with pytest.raises(SourceError, match=r"cannot be written"), Store(tmp_path).working(TINY):
        pytest.fail("work in a file")


def test_one_worker_at_a_time(store: Store) -> None:
    """A second worker waits for the first and then sees its result; another model is not waited for."""
    order: list[str] = []
    inside, release = threading.Event(), threading.Event()

    def first() -> None:
        with store.working(TINY):
            inside.set()
            release.wait(10)
            order.append("first done")

    def second() -> None:
        with store.working(TINY):
            order.append("second in")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    with store.working(parse_address("org/other")):
        order.append("other in")
    release.set()
    for thread in threads:
        thread.join(10)
    assert order == ["other in", "first done", "second in"]


def test_waiting_can_be_stopped(store: Store) -> None:
    """Who waits for another worker's lock gives up when told to."""
    stop = Stop()
    stop.set()
    with store.working(TINY), pytest.raises(Cancelled), store.working(TINY, stop):
        pytest.fail("two workers on one model")


def test_remove_deletes_the_entry_alone(store: Store) -> None:
    """A removed model is gone, its neighbours are not."""
    stored, other = put(store, TINY), put(store, parse_address("org/other"))
    store.remove(stored)
    assert store.entries() == [other]
    assert not stored.path.parent.exists()


def test_removing_what_somebody_else_removed_is_no_error(store: Store) -> None:
    """Two that want the same: both have it."""
    stored = put(store, TINY)
    store.remove(stored)
    store.remove(stored)
    assert store.entries() == []


def test_a_failed_removal_is_a_one_line_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rights that are missing are named, with the way out."""
    stored = put(store, TINY)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shoal.models.store.shutil.rmtree", refuse)
    with pytest.raises(SourceError, match=r"cannot be removed \(Permission denied\)"):
        store.remove(stored)


def test_remove_refuses_what_is_being_pulled(store: Store) -> None:
    """A model that somebody works on stays."""
    stored = put(store, TINY)
    with store.working(TINY), pytest.raises(SourceError, match="being pulled"):
        store.remove(stored)
    assert store.find(TINY) == stored


@pytest.mark.parametrize("path", ["../outside/x", "models/../../outside/x", "models/hf+org+tiny/..", "models/x", "/"])
def test_remove_never_leaves_the_store(store: Store, path: str, tmp_path: Path) -> None:
    """A path that is no entry of this store is refused, however it is written."""
    stored = put(store, TINY)
    (tmp_path / "outside" / "x").mkdir(parents=True)
    before = everything(tmp_path)
    with pytest.raises(SourceError, match="not a model in the store"):
        store.remove(StoredModel(store.home / path, stored.manifest))
    assert everything(tmp_path) == before


def test_links_are_not_followed(store: Store, tmp_path: Path) -> None:
    """A link in the store is neither listed nor followed when something is removed."""
    stored = put(store, TINY)
    outside = tmp_path / "outside"
    stored.path.parent.rename(outside)
    stored.path.parent.symlink_to(outside)
    assert store.entries() == []
    with pytest.raises(SourceError, match="through a link"):
        store.remove(stored)
    assert (outside / stored.path.name / "model.onnx").exists()


def test_links_inside_an_entry_are_removed_as_links(store: Store, tmp_path: Path) -> None:
    """Removing an entry that somebody put a link into leaves the link's target alone."""
    stored = put(store, TINY)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    (stored.path / "link").symlink_to(precious)
    store.remove(stored)
    assert (precious / "file").read_text() == "keep"


def test_a_store_that_cannot_be_written_can_be_read(store: Store) -> None:
    """Finding a model writes nothing: a store on a read-only disk serves."""
    stored = put(store, TINY)
    before = {path: os.stat(path).st_mtime_ns for path in store.home.rglob("*")}
    assert store.find(TINY) == stored
    assert {path: os.stat(path).st_mtime_ns for path in store.home.rglob("*")} == before


def test_notes_are_kept_beside_the_model(store: Store) -> None:
    """What an engine notes is there at the next start, and does not count as a change of the model."""
    stored = put(store, TINY)
    store.note(stored, "checked", {"key": "cpu", "min_cosine": 0.99995})
    store.note(stored, "other", 1)
    assert Store(store.home).notes(stored) == {"checked": {"key": "cpu", "min_cosine": 0.99995}, "other": 1}
    assert store.find(TINY) == stored
    assert measure(stored.path).keys() == stored.manifest.files.keys()
    assert {path.name for path in stored.path.iterdir()} == {"manifest.json", "model.onnx", "notes.json"}


def test_notes_are_optional(store: Store) -> None:
    """Broken notes read as none, and a store that cannot be written goes without."""
    stored = put(store, TINY)
    (stored.path / NOTES).write_text("{")
    assert store.notes(stored) == {}
    store.remove(stored)
    store.note(stored, "checked", 1)
    assert store.notes(stored) == {}


def test_files_are_added_by_one_at_a_time(store: Store) -> None:
    """In a folder that goes at the end, whatever the end is, and takes along what dead ones left."""
    stored = put(store, parse_address("hf:org/name"))
    (stored.path / ".adding-dead").mkdir()
    with store.adding(stored) as place:
        assert not (stored.path / ".adding-dead").exists()
        (place / "more").write_bytes(b"x")
        stop = Stop()
        stop.set()
        with pytest.raises(Cancelled), store.adding(stored, stop):
            pass
        with pytest.raises(SourceError, match="being pulled"):
            store.remove(stored)
    with pytest.raises(KeyError), store.adding(stored):
        raise KeyError
    assert not list(stored.path.glob(".*"))


def test_notes_leave_nothing_behind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that could not be written, nor those of processes that died while they wrote one."""
    stored = put(store, parse_address("hf:org/name"))
    for name in (".notes-dead", ".notes-busy"):
        (stored.path / name).touch()
    os.utime(stored.path / ".notes-dead", (1, 1))
    store.note(stored, "speed", 1)
    assert [path.name for path in stored.path.glob(".*")] == [".notes-busy"]
    monkeypatch.setattr("shoal.models.store.os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    store.note(stored, "speed", 2)
    assert [path.name for path in stored.path.glob(".*")] == [".notes-busy"]
    assert store.notes(stored) == {"speed": 1}
