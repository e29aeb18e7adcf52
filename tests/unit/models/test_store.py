"""The store: complete entries, one worker per model, no access outside of its folder."""

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


def test_committed_entries_are_found(store: Store) -> None:
    """A committed entry is found by its address, with its graph and without temporary files."""
    stored = put(store, TINY)
    assert store.find(TINY) == stored
    assert store.entries() == [stored]
    assert stored.graph.read_bytes() == b"graph"
    assert stored.tokenizer == stored.path / "tokenizer.json"
    assert not [name for name in everything(store.home) if "partial" in name]


def test_an_empty_home_holds_nothing(tmp_path: Path) -> None:
    """Reading a new store returns nothing and creates nothing."""
    store = Store(tmp_path / "home")
    assert store.entries() == []
    assert store.find(TINY) is None
    assert not store.home.exists()


def test_revisions_are_separate(store: Store) -> None:
    """An entry of one revision does not match another, but matches the exact commit that it resolved to."""
    put(store, parse_address("org/tiny@v1"), revision="aaa")
    assert store.find(TINY) is None
    assert store.find(parse_address("org/tiny@v2")) is None
    assert store.find(parse_address("org/tiny@v1"))
    assert store.find(parse_address("org/tiny@aaa"))


def test_models_do_not_share_folders(store: Store) -> None:
    """Names that differ in a slash, scheme or path are different models."""
    texts = ["org/tiny", "org--tiny", "org-/-tiny", "org_tiny", "pypi:tiny", "tiny", "file:/a/tiny", "file:/b/tiny"]
    paths = {put(store, parse_address(text)).path for text in texts}
    assert len(paths) == len({path.parent for path in paths}) == len(texts)


def test_a_new_answer_replaces_the_old(store: Store) -> None:
    """Pulling again leaves one entry per address, also if the revision's content changed."""
    put(store, TINY, revision="r1")
    put(store, TINY, revision="r1", content=b"other")
    newest = put(store, TINY, revision="r2", created=2)
    other = put(store, parse_address("org/tiny@v1"), revision="r1", created=3)
    assert store.entries() == [other, newest]


def test_a_folders_entry_answers_for_its_content_alone(store: Store) -> None:
    """For file: addresses the fingerprint decides, so a changed folder is converted again."""
    before = msgspec.structs.replace(parse_address("file:/a/tiny"), revision="f1")
    after = msgspec.structs.replace(before, revision="f2")
    put(store, before, revision="f1")
    assert store.find(before)
    assert store.find(after) is None


def test_damaged_entries_are_not_found(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """An entry with a truncated file is skipped, and the log names the file."""
    stored = put(store, TINY)
    stored.graph.write_bytes(b"g")
    with caplog.at_level(logging.WARNING):
        assert store.find(TINY) is None
    assert "model.onnx has 1 bytes" in caplog.text


def test_foreign_manifests_are_passed_over(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """An entry of another format is logged and does not hide other entries."""
    good = put(store, TINY)
    bad = put(store, parse_address("org/other"))
    (bad.path / MANIFEST).write_text('{"format": 99}')
    assert store.entries() == [good]
    assert "this version of Shoal reads 1" in caplog.text


def test_failed_work_leaves_nothing(store: Store) -> None:
    """An error during a build removes the partial entry and keeps the existing one."""
    old = put(store, TINY)
    with pytest.raises(ValueError, match="boom"), store.working(TINY) as partial:
        (partial / "model.onnx").write_bytes(b"half")
        raise ValueError("boom")
    assert store.find(TINY) == old
    with pytest.raises(ValueError, match="boom"), store.working(parse_address("org/new")):
        raise ValueError("boom")
    assert {path.name for path in (store.home / "models").iterdir()} == {"hf+org+tiny"}


def test_leftovers_of_the_dead_are_removed(store: Store) -> None:
    """Partial files of a killed process are removed at the next work on the model."""
    left = store.home / "models" / "hf+org+tiny" / ".partial-dead"
    left.mkdir(parents=True)
    (left / "model.onnx").write_bytes(b"half")
    put(store, TINY)
    assert not left.exists()


def test_leftovers_of_other_models_are_removed(store: Store) -> None:
    """By the next pull of any model, unless another process works on them; complete entries stay."""
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
    """The path of an entry while a new one replaces it."""
    return stored.path.with_name(f".aside-{stored.path.name}")


def test_the_replaced_entry_is_deleted_last(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the deletion of the old entry fails, the new one is already in place."""
    put(store, TINY, revision="r1")
    contents: list[bytes] = []

    def delete(path: Path, **options: bool) -> None:
        stored = Store(store.home).find(TINY)
        contents.append(stored.graph.read_bytes() if stored else b"")

    with monkeypatch.context() as patch:
        patch.setattr("shoal.models.store.shutil.rmtree", delete)
        put(store, TINY, revision="r1", content=b"same revision", created=2)
        put(store, TINY, revision="r2", content=b"other revision", created=3)
    assert set(contents) == {b"same revision", b"other revision"}


def test_readers_beside_a_refresh_always_find_the_model(store: Store) -> None:
    """An entry that is replaced repeatedly is never absent."""
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
    """A crash between the two renames loses nothing, whoever opens the store next."""
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
    """A crash after the second rename leaves an extra entry, which is removed with the model."""
    stored = put(store, TINY)
    shutil.copytree(stored.path, aside(stored))
    assert store.find(TINY) == stored
    store.remove(stored)
    assert store.entries() == []
    assert not stored.path.parent.exists()


def test_a_rename_that_fails_leaves_the_old_entry(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk refuses the new entry, the old one stays."""
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
    """While another process holds the lock, its second rename is imminent."""
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
    """Without a lock, a moved entry is not restored; reading still works."""
    stored = put(store, TINY)
    other = put(store, parse_address("org/other"))
    stored.path.rename(aside(stored))
    shutil.rmtree(store.home / "locks")
    (store.home / "locks").write_text("")
    assert store.find(TINY) is None
    assert store.entries() == [other]
    assert aside(stored).exists()


def test_a_home_that_is_no_folder_is_a_one_line_error(tmp_path: Path) -> None:
    """The error names the path and the next step, for reading and writing."""
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
    """Locks can be taken, but there is no folder to work in."""
    (tmp_path / "models").write_text("")
    with pytest.raises(SourceError, match=r"cannot be written"), Store(tmp_path).working(TINY):
        pytest.fail("work in a file")


def test_one_worker_at_a_time(store: Store) -> None:
    """A second worker waits for the first and reuses its result; other models are not blocked."""
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
    """A worker that waits for a lock stops on request."""
    stop = Stop()
    stop.set()
    with store.working(TINY), pytest.raises(Cancelled), store.working(TINY, stop):
        pytest.fail("two workers on one model")


def test_remove_deletes_the_entry_alone(store: Store) -> None:
    """Other models stay."""
    stored, other = put(store, TINY), put(store, parse_address("org/other"))
    store.remove(stored)
    assert store.entries() == [other]
    assert not stored.path.parent.exists()


def test_removing_a_removed_entry_is_no_error(store: Store) -> None:
    """Two concurrent removals both succeed."""
    stored = put(store, TINY)
    store.remove(stored)
    store.remove(stored)
    assert store.entries() == []


def test_a_failed_removal_is_a_one_line_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the missing permission and the next step."""
    stored = put(store, TINY)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shoal.models.store.shutil.rmtree", refuse)
    with pytest.raises(SourceError, match=r"cannot be removed \(Permission denied\)"):
        store.remove(stored)


def test_remove_refuses_a_model_being_pulled(store: Store) -> None:
    """A model that another process works on stays."""
    stored = put(store, TINY)
    with store.working(TINY), pytest.raises(SourceError, match="being pulled"):
        store.remove(stored)
    assert store.find(TINY) == stored


@pytest.mark.parametrize("path", ["../outside/x", "models/../../outside/x", "models/hf+org+tiny/..", "models/x", "/"])
def test_remove_never_leaves_the_store(store: Store, path: str, tmp_path: Path) -> None:
    """A path that is not an entry of this store is refused, in any spelling."""
    stored = put(store, TINY)
    (tmp_path / "outside" / "x").mkdir(parents=True)
    before = everything(tmp_path)
    with pytest.raises(SourceError, match="not a model in the store"):
        store.remove(StoredModel(store.home / path, stored.manifest))
    assert everything(tmp_path) == before


def test_links_are_not_followed(store: Store, tmp_path: Path) -> None:
    """A link in the store is neither listed nor followed on removal."""
    stored = put(store, TINY)
    outside = tmp_path / "outside"
    stored.path.parent.rename(outside)
    stored.path.parent.symlink_to(outside)
    assert store.entries() == []
    with pytest.raises(SourceError, match="through a link"):
        store.remove(stored)
    assert (outside / stored.path.name / "model.onnx").exists()


def test_links_inside_an_entry_are_removed_as_links(store: Store, tmp_path: Path) -> None:
    """The link's target stays."""
    stored = put(store, TINY)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    (stored.path / "link").symlink_to(precious)
    store.remove(stored)
    assert (precious / "file").read_text() == "keep"


def test_a_store_that_cannot_be_written_can_be_read(store: Store) -> None:
    """Finding a model writes nothing: a store on a read-only disk works."""
    stored = put(store, TINY)
    before = {path: os.stat(path).st_mtime_ns for path in store.home.rglob("*")}
    assert store.find(TINY) == stored
    assert {path: os.stat(path).st_mtime_ns for path in store.home.rglob("*")} == before


def test_notes_are_kept_beside_the_model(store: Store) -> None:
    """An engine's note is available at the next start and does not count as a change of the model."""
    stored = put(store, TINY)
    store.note(stored, "checked", {"key": "cpu", "min_cosine": 0.99995})
    store.note(stored, "other", 1)
    assert Store(store.home).notes(stored) == {"checked": {"key": "cpu", "min_cosine": 0.99995}, "other": 1}
    assert store.find(TINY) == stored
    assert measure(stored.path).keys() == stored.manifest.files.keys()
    assert {path.name for path in stored.path.iterdir()} == {"manifest.json", "model.onnx", "notes.json"}


def test_notes_are_optional(store: Store) -> None:
    """Broken notes are ignored, and a read-only store works without notes."""
    stored = put(store, TINY)
    (stored.path / NOTES).write_text("{")
    assert store.notes(stored) == {}
    store.remove(stored)
    store.note(stored, "checked", 1)
    assert store.notes(stored) == {}


def test_a_branch_may_be_called_as_a_form(store: Store) -> None:
    """A quantization's or a reranker's entry does not take the place of that branch's."""
    texts = ("hf:org/tiny#reranker=qwen3", "hf:org/tiny@qwen3", "hf:org/tiny:Q8_0", "hf:org/tiny@Q8_0")
    stored = [put(store, parse_address(text)) for text in texts]
    assert [store.find(parse_address(text)) for text in texts] == stored


def test_files_are_added_by_one_at_a_time(store: Store) -> None:
    """In a temporary folder that is always removed, with leftovers of dead processes."""
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
    """Neither after a failed write nor after a crash during one."""
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
