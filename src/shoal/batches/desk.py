"""All files and batches of a server: who sees them, what may be added, and what runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar
from uuid import uuid4

from shoal.batches.objects import Batch, StoredFile
from shoal.batches.run import BatchRun, Call, LineMemory, Setup, Slots
from shoal.batches.store import NewFile, Store, to_unavailable
from shoal.errors import Conflict, InvalidValue, ObjectNotFound, Overloaded, Unavailable

WINDOW_S = 86_400
"""The only completion window, 24 hours."""
FILE_S = 30 * 86_400
"""Seconds until files and ended batches are deleted, unless a client asks for less."""
MAX_OBJECTS = 10_000
"""Maximum files, and maximum batches."""
MAX_UNFINISHED = 128
"""Maximum batches that have not ended; one owner may have half of them."""
MAX_UPLOADS = 64
"""Maximum files that are uploaded at a time: each takes up to a MB of memory."""
SWEEP_S = 600.0
RETRY_S = 1.0
"""Between two attempts to take the folder, which another process may still have."""
GRACE_S = 5.0
PIECE_BYTES = 1 << 18

T = TypeVar("T")

logger = logging.getLogger("shoal")


class Identity(NamedTuple):
    """Who asks. `client`: the identity for fair shares; `owner`: who owns what is made; `sees_all`: may read and change
    the objects of all owners."""

    client: str
    owner: str
    sees_all: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """`concurrency`: requests in flight, of all batches; sizes in bytes."""

    concurrency: int = 64
    max_disk_bytes: int = 10 << 30
    max_line_bytes: int = 1 << 24


class BatchDesk:
    """The files and batches in a folder, which one process has at a time. Nothing is made before it is needed.

    Every method raises Unavailable while another process has the folder, or if the disk fails.
    """

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        *,
        draining: Callable[[], bool] = bool,
        clock: Callable[[], float] = time.time,
        grace_s: float = GRACE_S,
    ) -> None:
        self._store = Store(folder, limits.max_disk_bytes, lambda: int(clock() * 1e9))
        self._limits = limits
        self._draining = draining
        self._clock = clock
        self._grace_s = grace_s
        self._setup: Setup | None = None
        self._opening = asyncio.Lock()
        self._is_open = False
        self._closing = asyncio.Event()
        self._uploads = 0
        self._beginning: dict[str, Batch] = {}  # batches that are being stored
        self._removing: set[str] = set()  # files and batches that are being deleted
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._background: asyncio.Task[None] | None = None

    def start(self, call: Call, is_revoked: Callable[[str], bool] = lambda client: False) -> None:
        """Run batches by `call`, those of an earlier process first. Of these, fail the batches of clients that
        `is_revoked` names: their keys were removed."""
        self._setup = Setup(
            store=self._store,
            call=call,
            is_revoked=is_revoked,
            slots=Slots(self._limits.concurrency),
            memory=LineMemory(),
            scanning=asyncio.Semaphore(1),
            draining=self._draining,
            max_line_bytes=self._limits.max_line_bytes,
            grace_s=self._grace_s,
            clock=self._clock,
        )
        self._background = asyncio.create_task(self._maintain(), name="batches")

    async def aclose(self) -> None:
        """Let running requests finish for a moment. What is unfinished runs after the next start."""
        self._closing.set()
        if self._background is not None:
            self._background.cancel()
            await asyncio.wait({self._background})
        for run, _ in self._runs.values():
            run.stop("closing")
        await asyncio.gather(*(task for _, task in self._runs.values()), return_exceptions=True)
        async with self._opening:
            self._store.close()

    @asynccontextmanager
    async def receive(self) -> AsyncIterator[NewFile]:
        """A new file, which is removed after the block unless `keep` stored it."""
        await self._open()
        if len(self._store.files) >= MAX_OBJECTS:
            raise Conflict(f"The server stores {MAX_OBJECTS} files; delete some with DELETE /v1/files/{{id}}.")
        if self._uploads >= MAX_UPLOADS:
            raise Overloaded(f"{MAX_UPLOADS} files are being uploaded; send the file again.", retry_after=10.0)
        self._uploads += 1
        try:
            new = self._store.new_file()
            try:
                yield new
            finally:
                await asyncio.to_thread(new.discard)
        finally:
            self._uploads -= 1

    async def write(self, new: NewFile, data: bytes) -> None:
        """Append to a new file. Raises DiskFull, a BodyTooLarge."""
        await self._on_disk(partial(new.write, data))

    async def keep(self, new: NewFile, who: Identity, filename: str, seconds: int | None) -> StoredFile:
        """Store a new file for batches, for `seconds`; None: as long as possible."""
        keep = partial(new.keep, owner=who.owner, filename=filename, purpose="batch", seconds=seconds or FILE_S)
        return await self._on_disk(keep)

    async def list_files(self, who: Identity) -> list[StoredFile]:
        """Return the files, the oldest first."""
        await self._open()
        files = list(self._store.files.values())
        expired = self._list_expired(files)
        gone = expired | self._removing
        found = [each for each in files if self._sees(who, each) and each.id not in gone]
        return sorted(found, key=lambda each: each.created_ns)

    async def get_file(self, who: Identity, file_id: str) -> StoredFile:
        """Raises ObjectNotFound."""
        await self._open()
        found = self._store.files.get(file_id)
        gone = found is None or found.id in self._removing or self._list_expired([found])
        if found is None or gone or not self._sees(who, found):
            raise _no_file(file_id)
        return found

    async def open_content(self, who: Identity, file_id: str) -> Content:
        """Open a file. Raises ObjectNotFound."""
        found = await self.get_file(who, file_id)
        try:
            return Content(await self._on_disk(lambda: self._store.content(found.id).open("rb")))
        except Unavailable as error:
            if isinstance(error.__cause__, FileNotFoundError):  # deleted at this moment
                raise _no_file(file_id) from None
            raise

    async def delete_file(self, who: Identity, file_id: str) -> None:
        """Raises ObjectNotFound, and Conflict while a batch needs the file."""
        found = await self.get_file(who, file_id)
        if found.id in self._list_used():
            raise Conflict("A batch that has not ended needs this file; cancel the batch first.")
        await self._remove(found.id)

    async def create_batch(
        self,
        who: Identity,
        *,
        file_id: str,
        endpoint: str,
        metadata: dict[str, str] | None,
        output_seconds: int | None,
    ) -> Batch:
        """Begin a batch. Raises InvalidValue if there is no such file, and Overloaded if too many batches run."""
        try:
            source = await self.get_file(who, file_id)
        except ObjectNotFound as error:
            raise InvalidValue(error.message, param="input_file_id") from None
        if source.purpose != "batch":
            raise InvalidValue(f"{source.id} was not uploaded with the purpose 'batch'.", param="input_file_id")
        self._check_room(who)
        created = self._store.next_ns()
        batch = Batch(
            id=f"batch_{uuid4().hex}",
            owner=who.owner,
            client=who.client,
            endpoint=endpoint,
            input_file_id=source.id,
            output_id=f"file-{uuid4().hex}",
            errors_id=f"file-{uuid4().hex}",
            created_ns=created,
            expires_at=created // 10**9 + WINDOW_S,
            output_seconds=output_seconds or FILE_S,
            metadata=metadata,
        )
        self._beginning[batch.id] = batch  # without `await` since the checks: it reserves its room and its file
        # A client that leaves now leaves a batch that runs.
        await asyncio.shield(self._begin(batch))
        return batch

    async def _begin(self, batch: Batch) -> None:
        try:
            await self._on_disk(partial(self._store.add_batch, batch))
        finally:
            del self._beginning[batch.id]
        self._launch(batch)

    def _remove(self, name: str) -> asyncio.Future[None]:
        """Delete a file or an ended batch, also if the caller is cancelled. A file is hidden at once: a batch made from
        it would lose it."""
        self._removing.add(name)
        return asyncio.shield(self._finish_removal(name))

    async def _finish_removal(self, name: str) -> None:
        try:
            await self._on_disk(partial(self._store.remove, name))
        finally:
            self._removing.remove(name)

    async def list_batches(self, who: Identity) -> list[Batch]:
        """Return the batches, the newest first."""
        await self._open()
        found = [each for each in list(self._store.batches.values()) if self._sees(who, each)]
        return sorted(found, key=lambda each: -each.created_ns)

    async def get_batch(self, who: Identity, batch_id: str) -> Batch:
        """Raises ObjectNotFound."""
        await self._open()
        found = self._store.batches.get(batch_id)
        if found is None or not self._sees(who, found):
            raise ObjectNotFound(f"No batch found with id '{batch_id[:100]}'.", param="id")
        return found

    async def cancel_batch(self, who: Identity, batch_id: str) -> Batch:
        """Begin to cancel a batch. Raises ObjectNotFound, and Conflict if it has ended or is about to."""
        batch = await self.get_batch(who, batch_id)
        if batch.status == "cancelling":
            return batch
        if batch.status not in {"validating", "in_progress"} or batch.outcome is not None:
            raise Conflict(f"Cannot cancel a batch with status '{batch.status}'.")
        batch.status, batch.cancelling_at = "cancelling", int(self._clock())
        if batch.id in self._runs:
            self._runs[batch.id][0].stop("cancelled")
        await self._on_disk(partial(self._store.save_batch, batch))
        return batch

    async def sweep(self) -> None:
        """Delete the files and ended batches whose time is over."""
        now = self._clock()
        files = self._list_expired(list(self._store.files.values()))
        batches = [
            each.id for each in list(self._store.batches.values()) if each.has_ended and each.created_at + FILE_S <= now
        ]
        for name in (*files, *batches):
            if name not in self._removing:
                await self._remove(name)

    def _sees(self, who: Identity, found: StoredFile | Batch) -> bool:
        return who.sees_all or found.owner == who.owner

    def _list_expired(self, files: Collection[StoredFile]) -> set[str]:
        """Return the ids of those files whose time is over, except the ones in use."""
        now = self._clock()
        over = {each.id for each in files if each.expires_at <= now}
        return over - self._list_used() if over else over

    def _list_used(self) -> set[str]:
        """Return the ids of the files that batches need."""
        return {each.input_file_id for each in self._list_all() if not each.has_ended}

    def _list_all(self) -> Collection[Batch]:
        """Return all batches, also those that are being stored."""
        return {**self._store.batches, **self._beginning}.values()

    def _check_room(self, who: Identity) -> None:
        batches = self._list_all()
        unfinished = [each.owner for each in batches if not each.has_ended]
        if len(unfinished) >= MAX_UNFINISHED or unfinished.count(who.owner) >= MAX_UNFINISHED // 2:
            raise Overloaded("Too many batches have not ended; wait for one of them.", retry_after=60.0)
        if len(batches) >= MAX_OBJECTS:
            raise Overloaded(f"The server stores {MAX_OBJECTS} batches of the last 30 days.", retry_after=3600.0)

    async def _open(self) -> None:
        """Take the folder, and go on with its batches."""
        if not self._is_open:
            # A client that leaves now would leave a lock that nobody knows of.
            await asyncio.shield(self._take_folder())

    async def _take_folder(self) -> None:
        async with self._opening:
            if self._is_open:
                return
            if self._setup is None or self._closing.is_set():
                raise Unavailable("The server is shutting down: send the request again.", retry_after=RETRY_S)
            if not await self._on_disk(self._store.open):
                raise Unavailable(
                    "Another server has the batches of this `home` (SHOAL_HOME); stop it, or set another home.",
                    retry_after=RETRY_S,
                )
            self._is_open = True
            for batch in sorted(self._store.batches.values(), key=lambda each: each.created_ns):
                if not batch.has_ended:
                    self._launch(batch)

    def _launch(self, batch: Batch) -> None:
        if self._setup is not None and not self._closing.is_set():
            run = BatchRun(batch, self._setup)
            self._runs[batch.id] = run, asyncio.create_task(self._run(run, self._setup), name=batch.id)

    async def _run(self, run: BatchRun, setup: Setup) -> None:
        """Run a batch; if its state cannot be stored, again later."""
        batch = run.batch
        try:
            while True:
                if batch.status == "cancelling":
                    run.stop("cancelled")
                try:
                    return await run.run()
                except Exception:  # a bug must not leave a batch without an end
                    logger.exception("batch %s could not go on; it is tried again in %g s", batch.id, SWEEP_S)
                if await _wait(self._closing, SWEEP_S):
                    return
                run = BatchRun(batch, setup)
                self._runs[batch.id] = run, self._runs[batch.id][1]
        finally:
            del self._runs[batch.id]

    async def _maintain(self) -> None:
        while True:
            pause = SWEEP_S
            try:
                if self._is_open or await asyncio.to_thread(self._store.exists):
                    await self._open()
                    await self.sweep()
            except Unavailable as error:
                logger.debug("batches: %s", error.message)
                pause = RETRY_S
            await asyncio.sleep(pause)

    async def _on_disk(self, call: Callable[[], T]) -> T:
        """Run a call in a thread. Raises Unavailable for an OSError."""
        try:
            return await asyncio.to_thread(call)
        except OSError as error:
            raise to_unavailable(error, self._store.folder) from error


def _no_file(file_id: str) -> ObjectNotFound:
    return ObjectNotFound(f"No such File object: {file_id[:100]}", param="id")


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Return whether the event is set within so many seconds."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


class Content:
    """The content of a file, read in pieces. It must be closed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __aiter__(self) -> Content:
        return self

    async def __anext__(self) -> bytes:
        piece = await asyncio.to_thread(self._file.read, PIECE_BYTES)
        if not piece:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        self._file.close()
