"""Batches from their file to their results: restarts, retries, cancellation, expiry, full disks, owners."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Collection, Coroutine
from pathlib import Path
from typing import Any

import pytest

from shoal.batches import Identity, lines, run
from shoal.batches import desk as module
from shoal.batches.lines import Answer
from shoal.batches.objects import Batch, StoredFile
from shoal.batches.store import Store
from shoal.errors import Conflict, InvalidValue, ObjectNotFound, Overloaded, Unavailable
from tests.unit.batches.kit import (
    ENDPOINT,
    ME,
    PATIENCE_S,
    Model,
    begin,
    ids,
    open_desk,
    poll,
    read,
    request_file,
    request_line,
    upload,
    wait_for_end,
)

OTHER = Identity("o", "other")
BUSY = Answer(429, "req", b"{}", 0.0)
LATER = Answer(503, "req", b"{}", 60.0)
WRONG = Answer(400, "req", b'{"error": {}}')
MANY = [f"{at:03}" for at in range(100)]


async def test_a_whole_batch(tmp_path: Path) -> None:
    """Each request is answered once, successes in one file and errors in another, by at most `concurrency` calls at a
    time, for the client who made the batch."""
    model = Model({"007": [WRONG]})
    desk = open_desk(tmp_path / "batches", model)
    batch = await begin(desk, request_file(*MANY))
    assert (batch.status, batch.expires_at - batch.created_at) == ("validating", 86_400)
    batch = await wait_for_end(desk, batch.id)
    assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 100, 99, 1)
    output, errors = await read(desk, batch.output_file_id), await read(desk, batch.error_file_id)
    assert ids(output) == [each for each in MANY if each != "007"]
    assert output[0]["response"] == {"status_code": 200, "request_id": "req", "body": {"text": "000"}}
    assert [(each["custom_id"], each["response"]["status_code"]) for each in errors] == [("007", 400)]
    assert (model.calls.total(), model.most_running, model.clients) == (100, 4, {"me"})
    assert [each.purpose for each in await desk.list_files(ME)] == ["batch", "batch_output", "batch_output"]
    await desk.aclose()


async def test_a_bad_file_runs_nothing(tmp_path: Path) -> None:
    model = Model()
    desk = open_desk(tmp_path, model)
    batch = await wait_for_end(desk, (await begin(desk, request_file("a", "a") + b"{\n")).id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert [(each.line, each.code) for each in batch.errors] == [(2, "duplicate_custom_id"), (3, "invalid_json_line")]
    assert batch.failed_at is not None
    assert not model.calls
    await desk.aclose()


async def test_overload_is_not_a_failure(tmp_path: Path) -> None:
    """Requests that meet a full queue run again, as those of a replica that is away do a few times."""
    gone = Answer(502, "req", b"{}", 0.0)
    model = Model({"a": [BUSY] * 5 + [Answer(200, "req", b"{}")], "b": [gone]})
    desk = open_desk(tmp_path, model)
    batch = await wait_for_end(desk, (await begin(desk, request_file("a", "b"))).id)
    assert (batch.completed, batch.failed) == (1, 1)
    assert model.calls == {"a": 6, "b": 3}
    await desk.aclose()


async def test_a_restart_goes_on(tmp_path: Path) -> None:
    """Requests that were running when the server closed run again; no finished one does."""
    first = Model(held=lambda text: text >= "050")
    desk = open_desk(tmp_path, first)
    batch = await begin(desk, request_file(*MANY))
    await first.wait_for_calls(54)
    await desk.aclose()
    assert first.running == 0
    second = Model()
    desk = open_desk(tmp_path, second)
    batch = await wait_for_end(desk, batch.id)
    assert (batch.status, batch.total, batch.completed) == ("completed", 100, 100)
    assert ids(await read(desk, batch.output_file_id)) == MANY
    assert set(second.calls) == set(MANY[50:])
    await desk.aclose()


@pytest.mark.parametrize("at", range(0, 14))
async def test_a_crash_at_each_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """A disk that fails from the n-th write on, like a kill, leaves a batch that ends after a restart, with each
    request once."""
    left = at

    def failing(name: str) -> Any:
        real = getattr(Store, name)

        def call(self: Store, *arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise RuntimeError("killed")
            return real(self, *arguments)

        return call

    desk = open_desk(tmp_path, Model(), concurrency=1)
    source = await upload(desk, request_file(*MANY[:8]))
    monkeypatch.setattr(module.logger, "exception", lambda *_: None)
    with monkeypatch.context() as patch:
        for name in ("save_batch", "append_results", "publish", "remove_results"):
            patch.setattr(Store, name, failing(name))
        batch = await desk.create_batch(ME, file_id=source.id, endpoint=ENDPOINT, metadata=None, output_seconds=None)
        await poll(lambda: batch.has_ended or left < 0)
        await desk.aclose()
    desk = open_desk(tmp_path, Model())
    batch = await wait_for_end(desk, batch.id)
    assert (batch.status, batch.completed, batch.failed) == ("completed", 8, 0)
    assert ids(await read(desk, batch.output_file_id)) == MANY[:8]
    await desk.aclose()


async def test_a_batch_is_cancelled(tmp_path: Path) -> None:
    """Finished requests keep their results; the others end in the error file, and no call goes on."""
    model = Model(held=lambda text: text >= "010")
    desk = open_desk(tmp_path, model)
    batch = await begin(desk, request_file(*MANY))
    await model.wait_for_calls(14)
    assert (await desk.cancel_batch(ME, batch.id)).status == "cancelling"
    batch = await wait_for_end(desk, batch.id)
    assert (batch.status, batch.completed, batch.failed, model.running) == ("cancelled", 10, 90, 0)
    assert batch.cancelled_at is not None
    assert ids(await read(desk, batch.output_file_id)) == MANY[:10]
    errors = await read(desk, batch.error_file_id)
    assert ids(errors) == MANY[10:]
    assert {(each["response"], each["error"]["code"]) for each in errors} == {(None, "batch_cancelled")}
    with pytest.raises(Conflict, match="'cancelled'"):
        await desk.cancel_batch(ME, batch.id)
    await desk.aclose()


async def test_a_cancellation_survives_a_restart(tmp_path: Path) -> None:
    """A server that closed before it had cancelled a batch does so after its next start."""
    model = Model(held=lambda text: True)
    desk = open_desk(tmp_path, model)
    batch = await begin(desk, request_file(*MANY))
    await model.wait_for_calls(4)
    closing = asyncio.create_task(desk.aclose())
    await asyncio.sleep(0)
    batch.status = "cancelling"
    await closing
    store = Store(tmp_path, 1 << 20)
    assert await asyncio.to_thread(store.open)
    await asyncio.to_thread(store.save_batch, batch)
    store.close()
    second = Model(held=lambda text: True)
    desk = open_desk(tmp_path, second)
    batch = await wait_for_end(desk, batch.id)
    assert (batch.status, batch.failed) == ("cancelled", 100)
    await desk.aclose()


async def test_a_batch_expires(tmp_path: Path) -> None:
    """At the end of its window, what is not finished is reported as expired. Its files are removed in their time."""
    now = 1e9
    model = Model(held=lambda text: text == "b")
    desk = open_desk(tmp_path, model, clock=lambda: now)
    batch = await begin(desk, request_file("a", "b"))
    await model.wait_for_calls(2)
    await desk.aclose()
    now += 86_400
    desk = open_desk(tmp_path, model, clock=lambda: now)
    batch = await wait_for_end(desk, batch.id)
    assert (batch.status, batch.completed, batch.failed) == ("expired", 1, 1)
    (error,) = await read(desk, batch.error_file_id)
    assert (error["custom_id"], error["error"]["code"]) == ("b", "batch_expired")
    now += 30 * 86_400
    with pytest.raises(ObjectNotFound):
        await desk.get_file(ME, batch.input_file_id)
    await desk.sweep()
    assert (await desk.list_files(ME), await desk.list_batches(ME)) == ([], [])
    assert os.listdir(tmp_path) == ["lock"]
    await desk.aclose()


async def test_a_removed_key_fails_its_batches(tmp_path: Path) -> None:
    """What had finished can be read; the rest is reported and does not run. A batch that is cancelled stays so."""
    model = Model(held=lambda text: text != "a")
    desk = open_desk(tmp_path, model)
    batch, cancelled = [await begin(desk, request_file("a", "b", "c")) for _ in range(2)]
    other = await begin(desk, request_file("d"), OTHER)
    await poll(lambda: batch.completed == cancelled.completed == 1)
    await desk.aclose()
    store = Store(tmp_path, 1 << 20)
    assert await asyncio.to_thread(store.open)
    cancelled.status = "cancelling"
    await asyncio.to_thread(store.save_batch, cancelled)
    store.close()
    second = Model()
    desk = open_desk(tmp_path, second, revoked={"me"})
    batch, cancelled = [await wait_for_end(desk, each.id) for each in (batch, cancelled)]
    assert (batch.status, batch.total, batch.completed, batch.failed) == ("failed", 3, 1, 2)
    assert [(each.code, each.line) for each in batch.errors] == [("invalid_api_key", None)]
    assert ids(await read(desk, batch.output_file_id)) == ["a"]
    errors = await read(desk, batch.error_file_id)
    assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
        ("b", "invalid_api_key"),
        ("c", "invalid_api_key"),
    ]
    assert (cancelled.status, cancelled.completed, cancelled.failed) == ("cancelled", 1, 2)
    assert (await wait_for_end(desk, other.id, OTHER)).status == "completed"
    assert second.calls == {"d": 1}
    await desk.aclose()


async def test_a_full_disk_fails_the_batch(tmp_path: Path) -> None:
    """What was written before can be read."""
    content = request_file(*MANY)
    desk = open_desk(tmp_path, Model(), max_disk_bytes=len(content) + 1000)
    batch = await wait_for_end(desk, (await begin(desk, content)).id)
    assert batch.status == "failed"
    assert [each.code for each in batch.errors] == ["storage_error"]
    assert "batch_disk_mb" in batch.errors[0].message
    output = await read(desk, batch.output_file_id)
    assert 0 < len(output) == batch.completed < 100
    await desk.aclose()


def fail_write(*_: object) -> None:
    raise OSError(errno.ENOSPC, "full")


async def test_a_failed_write_is_noticed_while_no_line_can_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch fails at once, although its other lines wait to be tried again."""
    monkeypatch.setattr(run, "LINES_WAITING", 2)
    monkeypatch.setattr(Store, "append_results", fail_write)
    model = Model({text: [LATER] for text in "bcdefgh"}, held=lambda text: text == "a")
    desk = open_desk(tmp_path, model)
    batch = await begin(desk, request_file(*"abcdefgh"))
    await poll(lambda: model.running == 1 and model.calls.total() >= 3)
    model.release.set()
    batch = await wait_for_end(desk, batch.id)
    assert (batch.status, [each.code for each in batch.errors]) == ("failed", ["storage_error"])
    assert model.calls.total() < 8
    await desk.aclose()


async def test_a_bug_while_results_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch does not hang: it is run again, where it stopped."""
    monkeypatch.setattr(module, "SWEEP_S", 0.001)
    encode, failures = lines.encode_answer, iter([ZeroDivisionError("by hand")])

    def fail_once(*arguments: Any) -> bytes:
        for error in failures:
            raise error
        return encode(*arguments)

    monkeypatch.setattr(lines, "encode_answer", fail_once)
    desk = open_desk(tmp_path, Model())
    batch = await wait_for_end(desk, (await begin(desk, request_file("a", "b"))).id)
    assert (batch.status, batch.completed, ids(await read(desk, batch.output_file_id))) == ("completed", 2, ["a", "b"])
    await desk.aclose()


@pytest.mark.parametrize("closes", [False, True])
async def test_a_write_that_fails_while_a_batch_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    """A cancelled batch fails rather than end without the line; a server that closes leaves the line to the next."""
    writing, go_on = threading.Event(), threading.Event()

    real = Store.append_results

    def fail_once(*arguments: Any) -> None:
        if writing.is_set():
            return real(*arguments)
        writing.set()
        go_on.wait()
        return fail_write()

    model = Model(held=lambda text: text == "b")
    desk = open_desk(tmp_path, model)
    monkeypatch.setattr(Store, "append_results", fail_once)
    batch = await begin(desk, request_file("a", "b"))
    await poll(lambda: writing.is_set() and model.running == 1)
    stopping = asyncio.create_task(desk.aclose() if closes else desk.cancel_batch(ME, batch.id))
    await poll(lambda: not model.running)
    go_on.set()
    await stopping
    if closes:
        desk = open_desk(tmp_path, Model())
    batch = await wait_for_end(desk, batch.id)
    if closes:
        assert ids(await read(desk, batch.output_file_id)) == ["a", "b"]
    else:
        assert (batch.status, [each.code for each in batch.errors]) == ("failed", ["storage_error"])
    await desk.aclose()


async def test_a_missing_input_fails_the_batch(tmp_path: Path) -> None:
    model = Model(held=lambda text: True)
    desk = open_desk(tmp_path, model)
    batch = await begin(desk, request_file("a"))
    await model.wait_for_calls(1)
    await desk.aclose()
    (tmp_path / batch.input_file_id / "content").unlink()
    desk = open_desk(tmp_path, model)
    assert (await wait_for_end(desk, batch.id)).status == "failed"
    await desk.aclose()


async def test_draining_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the server drains, running requests finish and no other one starts, nor is one tried again."""
    monkeypatch.setattr(lines, "choose_pause", lambda answer, _: 0.0 if answer is BUSY else None)
    is_draining, checks = False, 0

    def draining() -> bool:
        nonlocal checks
        checks += 1
        return is_draining

    model = Model({"a": [BUSY]}, held=lambda text: True)
    desk = open_desk(tmp_path, model, draining=draining, concurrency=2)
    batch = await begin(desk, request_file(*"abcd"))
    await model.wait_for_calls(2)
    is_draining, enough = True, checks + 3  # each line but "b" looks once more
    model.release.set()
    await poll(lambda: checks >= enough)
    assert model.calls == {"a": 1, "b": 1}
    await desk.aclose()
    second = Model()
    desk = open_desk(tmp_path, second)
    assert (await wait_for_end(desk, batch.id)).completed == 4
    assert second.calls == {"a": 1, "c": 1, "d": 1}
    await desk.aclose()


async def test_a_pause_gives_its_slot_to_others(tmp_path: Path) -> None:
    """Requests that wait to be tried again hold no slot, and do not delay the end of the server. The next one goes on
    with them."""
    model = Model({"a": [LATER], "b": [LATER]})
    desk = open_desk(tmp_path, model, concurrency=1, grace_s=PATIENCE_S)
    batch = await begin(desk, request_file("a", "b", "c"))
    other = await wait_for_end(desk, (await begin(desk, request_file("d"), OTHER)).id, OTHER)
    assert other.status == "completed"
    await poll(lambda: batch.completed == 1)
    async with asyncio.timeout(PATIENCE_S / 2):
        await desk.aclose()
    assert model.calls == dict.fromkeys("abcd", 1)
    second = Model()
    desk = open_desk(tmp_path, second)
    batch = await wait_for_end(desk, batch.id)
    assert (batch.status, batch.completed, batch.failed) == ("completed", 3, 0)
    assert ids(await read(desk, batch.output_file_id)) == ["a", "b", "c"]
    assert second.calls == {"a": 1, "b": 1}
    await desk.aclose()


async def test_a_request_that_fails_while_the_server_closes(tmp_path: Path) -> None:
    """It is left to the next server at once."""
    model = Model({"a": [LATER]}, held=lambda text: True)
    desk = open_desk(tmp_path, model, grace_s=PATIENCE_S)
    batch = await begin(desk, request_file("a"))
    await model.wait_for_calls(1)
    closing = asyncio.create_task(desk.aclose())
    await poll(desk._closing.is_set)
    model.release.set()
    async with asyncio.timeout(PATIENCE_S / 2):
        await closing
    assert (batch.status, model.calls.total()) == ("in_progress", 1)
    desk = open_desk(tmp_path, Model())
    assert (await wait_for_end(desk, batch.id)).completed == 1
    await desk.aclose()


@pytest.mark.parametrize(("limit", "count"), [("LINES_WAITING", 3), ("BYTES_WAITING", 30)])
async def test_lines_that_wait_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, count: int
) -> None:
    """A batch reads no further while many of its lines wait to be tried again."""
    monkeypatch.setattr(run, limit, count)
    model = Model({text: [LATER] for text in MANY})
    desk = open_desk(tmp_path, model, concurrency=2)
    batch = await begin(desk, request_file(*MANY))
    await model.wait_for_calls(3)
    await wait_for_end(desk, (await begin(desk, request_file(*"abcdefgh"))).id)
    assert 3 <= model.calls.total() - 8 <= 5
    await desk.cancel_batch(ME, batch.id)
    batch = await wait_for_end(desk, batch.id)
    assert (batch.status, batch.failed) == ("cancelled", 100)
    await desk.aclose()


async def test_lines_of_all_batches_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that gave their slots back count too. A batch without lines always begins one, and others go on once bytes
    are freed."""
    monkeypatch.setattr(run, "BYTES_BEGUN", 5 * len(b'{"input": "000"}'))
    model = Model({text: [LATER] for text in MANY})
    desk = open_desk(tmp_path, model, concurrency=8)
    batches = []
    for calls in (5, 6, 7):
        batches.append(await begin(desk, request_file(*MANY)))
        await model.wait_for_calls(calls)
    done = await wait_for_end(desk, (await begin(desk, request_file(*"abcdefgh"))).id)
    assert (done.completed, model.calls.total()) == (8, 7 + 8)
    await desk.cancel_batch(ME, batches[0].id)
    await wait_for_end(desk, batches[0].id)
    await model.wait_for_calls(7 + 8 + 3)
    await wait_for_end(desk, (await begin(desk, request_file(*"abcdefgh"))).id)
    assert model.calls.total() == 7 + 8 + 3 + 8
    await desk.aclose()


async def test_batches_of_lines_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs one line at a time."""
    monkeypatch.setattr(run, "BYTES_BEGUN", 1)
    model = Model()
    desk = open_desk(tmp_path, model, concurrency=8)
    batches = [await begin(desk, request_file(*MANY[:20])) for _ in range(3)]
    assert [(await wait_for_end(desk, each.id)).completed for each in batches] == [20] * 3
    assert model.most_running <= 3
    await desk.aclose()


async def test_owners(tmp_path: Path) -> None:
    """Another owner's objects do not exist for a client; an admin sees all."""
    admin = Identity("a", "", sees_all=True)
    desk = open_desk(tmp_path, Model())
    batch = await begin(desk, request_file("a"))
    await wait_for_end(desk, batch.id)
    for attempt in (
        desk.get_file(OTHER, batch.input_file_id),
        desk.open_content(OTHER, batch.output_id),
        desk.delete_file(OTHER, batch.input_file_id),
        desk.get_batch(OTHER, batch.id),
        desk.cancel_batch(OTHER, batch.id),
    ):
        with pytest.raises(ObjectNotFound):
            await attempt
    with pytest.raises(InvalidValue, match="No such File"):
        await desk.create_batch(
            OTHER, file_id=batch.input_file_id, endpoint=ENDPOINT, metadata=None, output_seconds=None
        )
    assert (await desk.list_files(OTHER), await desk.list_batches(OTHER)) == ([], [])
    assert len(await desk.list_files(admin)) == 2
    assert await desk.get_batch(admin, batch.id) is batch
    await desk.delete_file(admin, batch.output_id)
    with pytest.raises(ObjectNotFound):
        await desk.get_file(ME, batch.output_id)
    await desk.aclose()


async def test_objects_that_are_stored_during_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may do so at any moment."""
    desk = open_desk(tmp_path, Model())
    batch = await wait_for_end(desk, (await begin(desk, request_file("a"))).id)
    source = await desk.get_file(ME, batch.input_file_id)
    store, sees = desk._store, desk._sees

    def store_meanwhile(who: Identity, found: StoredFile | Batch) -> bool:
        store.files[f"{len(store.files)}"] = source
        store.batches[f"{len(store.batches)}"] = batch
        return sees(who, found)

    monkeypatch.setattr(desk, "_sees", store_meanwhile)
    files, batches = await desk.list_files(ME), await desk.list_batches(ME)
    assert (len(files), len(batches)) == (2, 3)
    await desk.aclose()


async def test_files_in_use(tmp_path: Path) -> None:
    """A file cannot be deleted while a batch reads it; results are no input."""
    model = Model(held=lambda text: True)
    desk = open_desk(tmp_path, model)
    batch = await begin(desk, request_file("a"))
    await model.wait_for_calls(1)
    with pytest.raises(Conflict, match="cancel the batch"):
        await desk.delete_file(ME, batch.input_file_id)
    model.release.set()
    await wait_for_end(desk, batch.id)
    await desk.delete_file(ME, batch.input_file_id)
    with pytest.raises(InvalidValue, match="purpose"):
        await desk.create_batch(ME, file_id=batch.output_id, endpoint=ENDPOINT, metadata=None, output_seconds=None)
    await desk.aclose()


async def test_a_file_that_is_being_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is gone at once: no batch begins with it, also if the client that deletes it leaves."""
    desk = open_desk(tmp_path, Model())
    source = await upload(desk, request_file("a"))
    reached, go_on = threading.Event(), threading.Event()
    remove = Store.remove

    def call(store: Store, name: str) -> None:
        reached.set()
        go_on.wait(PATIENCE_S)
        remove(store, name)

    async def create() -> Batch:
        return await desk.create_batch(ME, file_id=source.id, endpoint=ENDPOINT, metadata=None, output_seconds=None)

    monkeypatch.setattr(Store, "remove", call)
    deleting = asyncio.create_task(desk.delete_file(ME, source.id))
    created = asyncio.create_task(create())  # takes its first step in the same turn
    with pytest.raises(InvalidValue, match="No such File"):
        await created
    await asyncio.to_thread(reached.wait)
    deleting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await deleting
    with pytest.raises(InvalidValue, match="No such File"):
        await create()
    with pytest.raises(ObjectNotFound):
        await desk.delete_file(ME, source.id)
    assert await desk.list_files(ME) == []
    go_on.set()
    await poll(lambda: not desk._store.files)
    await desk.aclose()


async def test_a_file_that_is_deleted_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not found, like one that was deleted before."""
    desk = open_desk(tmp_path, Model())
    source = await upload(desk, request_file("a"))
    content = Store.content

    def delete(store: Store, file_id: str) -> Path:
        store.remove(file_id)
        return content(store, file_id)

    monkeypatch.setattr(Store, "content", delete)
    with pytest.raises(ObjectNotFound, match="No such File"):
        await desk.open_content(ME, source.id)
    await desk.aclose()


async def test_files_in_use_are_found_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expired files that a batch needs stay; lists and sweeps look at the batches once, whatever the number of
    files."""
    now = 1e9
    desk = open_desk(tmp_path, Model(held=lambda text: True), clock=lambda: now)
    batches = [await begin(desk, request_file("a")) for _ in range(3)]
    await upload(desk, request_file("a"))
    looks, list_all = 0, desk._list_all

    def count() -> Collection[Batch]:
        nonlocal looks
        looks += 1
        return list_all()

    monkeypatch.setattr(desk, "_list_all", count)
    now += 30 * 86_400
    for _ in range(2):
        assert [each.id for each in await desk.list_files(ME)] == [each.input_file_id for each in batches]
        await desk.sweep()
    assert looks == 4
    await desk.aclose()


async def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner may have half of the unfinished batches; the number of files is limited too."""
    monkeypatch.setattr(module, "MAX_UNFINISHED", 4)
    model = Model(held=lambda text: True)
    desk = open_desk(tmp_path, model)
    await begin(desk, request_file("a"))
    await begin(desk, request_file("b"))
    with pytest.raises(Overloaded):
        await begin(desk, request_file("c"))
    await begin(desk, request_file("c"), OTHER)
    monkeypatch.setattr(module, "MAX_OBJECTS", 4)
    with pytest.raises(Conflict, match="4 files"):
        await upload(desk, request_line("a"))
    await desk.aclose()


async def test_batches_made_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is being stored, each counts for the limit and keeps its file; one that fails gives both back."""
    monkeypatch.setattr(module, "MAX_UNFINISHED", 4)
    desk = open_desk(tmp_path, Model(held=lambda text: True))
    source = await upload(desk, request_file("a"))

    async def create() -> Batch:
        return await desk.create_batch(ME, file_id=source.id, endpoint=ENDPOINT, metadata=None, output_seconds=None)

    def fail(store: Store, batch: Batch) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "add_batch", fail)
        made = await asyncio.gather(*(create() for _ in range(5)), return_exceptions=True)
        assert [type(each) for each in made] == [Unavailable] * 2 + [Overloaded] * 3
    delete = desk.delete_file(ME, source.id)
    results = await asyncio.gather(*(create() for _ in range(5)), delete, return_exceptions=True)
    assert [type(each) for each in results] == [Batch] * 2 + [Overloaded] * 3 + [Conflict]
    await desk.aclose()


async def test_another_process_has_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until that one ends, requests are refused; then its batches go on here without being asked."""
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    held = Model(held=lambda text: True)
    first = open_desk(tmp_path, held)
    batch = await begin(first, request_file("a"))
    await held.wait_for_calls(1)
    model = Model()
    second = open_desk(tmp_path, model)
    with pytest.raises(Unavailable, match="Another server"):
        await second.list_batches(ME)
    await first.aclose()
    await model.wait_for_calls(1)
    assert (await wait_for_end(second, batch.id)).completed == 1
    await second.aclose()
    with pytest.raises(Unavailable, match="shutting down"):
        await open_closed(tmp_path).list_files(ME)


def open_closed(folder: Path) -> module.BatchDesk:
    return module.BatchDesk(folder, module.Limits())


async def test_nothing_is_made_before_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without batches leaves no folder, and one that cannot make it says so."""
    monkeypatch.setattr(module, "SWEEP_S", 0.001)
    looks = 0

    def exists(store: Store) -> bool:
        nonlocal looks
        looks += 1
        return store.folder.is_dir()

    monkeypatch.setattr(Store, "exists", exists)
    desk = open_desk(tmp_path / "batches", Model())
    await poll(lambda: looks > 2)
    assert not (tmp_path / "batches").exists()
    (tmp_path / "batches").write_text("in the way")
    with pytest.raises(Unavailable, match="cannot store"):
        await desk.list_files(ME)
    await desk.aclose()


async def test_clients_that_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves while the folder is opened leaves it usable; while its file begins, nothing; while it is
    stored, a whole file; while its batch is stored, a batch that runs."""
    folder = tmp_path / "batches"
    reached, go_on = threading.Event(), threading.Event()

    def slowly(name: str, patch: pytest.MonkeyPatch) -> None:
        real = getattr(Store, name)

        def call(self: Store, *arguments: Any) -> Any:
            reached.set()
            go_on.wait()
            return real(self, *arguments)

        patch.setattr(Store, name, call)

    async def leave(task: asyncio.Task[Any]) -> None:
        await asyncio.to_thread(reached.wait)
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    async def leave_while(name: str, task: Coroutine[Any, Any, Any]) -> None:
        with monkeypatch.context() as patch:
            slowly(name, patch)
            await leave(asyncio.create_task(task))
        reached.clear()
        go_on.clear()

    def has_new() -> bool:
        return any(name.startswith("new-") for name in os.listdir(folder))

    desk = open_desk(folder, Model())
    await leave_while("open", desk.list_files(ME))
    assert await desk.list_files(ME) == []
    await leave_while("new_folder", upload(desk, request_file("a")))
    assert not has_new()
    await leave_while("finish_file", upload(desk, request_file("a")))
    await poll(lambda: not has_new())
    (stored,) = await desk.list_files(ME)
    content = await desk.open_content(ME, stored.id)
    assert [piece async for piece in content] == [request_file("a")]
    await content.aclose()
    create = desk.create_batch(ME, file_id=stored.id, endpoint=ENDPOINT, metadata=None, output_seconds=None)
    await leave_while("add_batch", create)
    await poll(lambda: bool(desk._store.batches))
    (batch,) = await desk.list_batches(ME)
    assert (await wait_for_end(desk, batch.id)).status == "completed"
    await desk.aclose()
