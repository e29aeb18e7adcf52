"""Runs one batch: checks its file, runs its lines, and publishes the results."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias
from uuid import uuid4

from shoal.batches import lines
from shoal.batches.lines import Answer, Line
from shoal.batches.objects import Batch, LineError, Outcome
from shoal.batches.store import ERRORS, OUTPUT, DiskFull, Store, to_unavailable

Call: TypeAlias = Callable[[str, str, bytes], Awaitable[Answer]]
"""Runs a request as (client, path, body). Raises only when it is cancelled."""
Stop: TypeAlias = Literal["cancelled", "closing"]

LINES_AHEAD = 64
BYTES_AHEAD = 1 << 20
"""Lines that are read at a time, and bytes after which no more are read."""
LINES_WAITING = 64
BYTES_WAITING = 4 << 20
"""Lines of one batch that wait for a slot or for their next try, and their bytes, from which on no other is begun."""
BYTES_BEGUN = 256 << 20
"""Bytes of the lines of all batches that run or wait, beyond which a batch begins no other unless it has none. What
each has read ahead comes on top."""
APPENDED = 1 << 20

_NOT_RUN = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was executed."),
}
_REVOKED = ("invalid_api_key", "The API key that made this batch was removed before this request was executed.")

logger = logging.getLogger("shoal")


class Slots:
    """Slots for requests in flight. A free slot goes to the waiting client that holds the fewest, and to that batch of
    the client's that holds the fewest; equals take turns."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._by_client: Counter[str] = Counter()
        self._by_batch: Counter[str] = Counter()
        self._waiting: dict[str, dict[str, deque[asyncio.Future[None]]]] = {}

    async def acquire(self, batch: Batch) -> None:
        """Take a slot for a request of the batch. It must be released."""
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(batch.client, {}).setdefault(batch.id, deque()).append(slot)
        self._assign()
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():
                self.release(batch)
            raise

    def release(self, batch: Batch) -> None:
        self._free += 1
        for held, key in ((self._by_client, batch.client), (self._by_batch, batch.id)):
            held[key] -= 1
            if not held[key]:
                del held[key]
        self._assign()

    def _assign(self) -> None:
        while self._free and self._waiting:
            client = min(self._waiting, key=self._by_client.__getitem__)
            batches = self._waiting.pop(client)
            batch_id = min(batches, key=self._by_batch.__getitem__)
            queue = batches.pop(batch_id)
            slot = queue.popleft()
            if queue:  # behind its equals
                batches[batch_id] = queue
            if batches:
                self._waiting[client] = batches
            if not slot.done():  # else its request was cancelled
                self._free -= 1
                self._by_client[client] += 1
                self._by_batch[batch_id] += 1
                slot.set_result(None)


class LineMemory:
    """Counts the bytes of the lines of all batches that have begun and not ended."""

    def __init__(self) -> None:
        self._used = 0
        self._by_batch: Counter[str] = Counter()
        self._waiting: dict[str, tuple[asyncio.Event, int]] = {}

    def has_room(self, size: int) -> bool:
        return self._used + size <= BYTES_BEGUN

    def add(self, batch: Batch, size: int) -> None:
        self._used += size
        self._by_batch[batch.id] += size

    def remove(self, batch: Batch, size: int) -> None:
        self._used -= size
        self._by_batch[batch.id] -= size
        if not self._by_batch[batch.id]:
            del self._by_batch[batch.id]
        room = BYTES_BEGUN - self._used
        for batch_id in sorted(self._waiting, key=self._by_batch.__getitem__) if room > 0 else ():
            event, wanted = self._waiting[batch_id]
            if wanted <= room:
                room -= wanted
                del self._waiting[batch_id]
                event.set()

    @contextmanager
    def waiting(self, batch: Batch, event: asyncio.Event, size: int) -> Iterator[None]:
        """Within the block, set the event once that many bytes are free; of several batches, for the one that holds the
        fewest first."""
        self._waiting[batch.id] = event, size
        try:
            yield
        finally:
            self._waiting.pop(batch.id, None)


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs share. `is_revoked`: whether the key of this client was removed. `slots` bounds the requests in
    flight, `memory` the lines that have begun, `scanning` the files that are checked at a time. `draining`: no request
    may start any more. `grace_s`: how long running requests may take once the server closes.
    """

    store: Store
    call: Call
    is_revoked: Callable[[str], bool]
    slots: Slots
    memory: LineMemory
    scanning: asyncio.Semaphore
    draining: Callable[[], bool]
    max_line_bytes: int
    grace_s: float
    clock: Callable[[], float] = time.time


class BatchRun:
    """One run of a batch, which goes on where an earlier one stopped. `stop` ends it before."""

    def __init__(self, batch: Batch, setup: Setup) -> None:
        self.batch = batch
        self._setup = setup
        self._store = setup.store
        self._input = setup.store.content(batch.input_file_id)
        self._finished = bytearray()
        self._running: dict[int, asyncio.Task[None]] = {}  # lines that have begun, by number
        self._waiting: dict[int, int] = {}  # sizes of those without a slot
        self._moved = asyncio.Event()  # set when one of those gets a slot, or a line ends
        self._stop: Stop | None = None
        self._stopped = asyncio.Event()
        self._results = _Appender(partial(setup.store.append_results, batch))

    def stop(self, reason: Stop) -> None:
        """Stop running requests. `closing`: another run goes on later."""
        if self._stop != "closing":
            self._stop = reason
        self._stopped.set()

    async def run(self) -> None:
        """Run until the batch has ended or was closed. Raises OSError if its state cannot be stored."""
        batch = self.batch
        if batch.outcome is None:
            try:
                outcome = await self._run_requests()
            except (DiskFull, OSError) as error:
                logger.error("batch %s failed: %s", batch.id, error)
                known = to_unavailable(error, self._store.folder) if isinstance(error, OSError) else error
                batch.errors = [LineError(code="storage_error", message=known.message)]
                await asyncio.to_thread(self._store.recover_results, batch)  # cuts off half of a line
                outcome = "failed"
            if outcome is None:
                return
            if batch.status != "cancelling" and outcome != "failed":
                batch.status, batch.finalizing_at = "finalizing", self._now()
            batch.outcome = outcome
            await self._save()
        await asyncio.to_thread(self._publish)

    def _publish(self) -> None:
        batch, store = self.batch, self._store
        assert batch.outcome is not None
        batch.output_file_id = store.publish(batch, OUTPUT, batch.output_id)
        batch.error_file_id = store.publish(batch, ERRORS, batch.errors_id)
        setattr(batch, f"{batch.outcome}_at", self._now())
        batch.status = batch.outcome
        store.save_batch(batch)
        store.remove_results(batch)

    async def _run_requests(self) -> Outcome | None:
        """Run what is not finished yet. Returns how the batch ends; None: not now."""
        batch, setup = self.batch, self._setup
        async with setup.scanning:
            scan = await asyncio.to_thread(self._scan)
        if self._is_closing():
            return None
        if scan.errors:
            batch.errors = scan.errors
            return "failed"
        self._finished = scan.finished
        batch.total = scan.total
        if self._stop is None and setup.is_revoked(batch.client):
            code, message = _REVOKED
            batch.errors = [LineError(code=code, message=message)]
            await asyncio.to_thread(self._append_unfinished, code, message)
            return "failed"
        if batch.status == "validating":
            batch.status, batch.in_progress_at = "in_progress", self._now()
            await self._save()
        outcome: Outcome | None = "completed"
        if not await self._run_lines():
            outcome = None if self._is_closing() else "expired"
        if self._stop == "cancelled":  # also if all requests were finished meanwhile
            outcome = "cancelled"
        if outcome in _NOT_RUN:
            await asyncio.to_thread(self._append_unfinished, *_NOT_RUN[outcome])
        return outcome

    def _is_closing(self) -> bool:
        return self._stop == "closing"

    def _scan(self) -> lines.Scan:
        done = self._store.recover_results(self.batch)
        return lines.scan_file(self._input, self.batch.endpoint, self._setup.max_line_bytes, done)

    async def _run_lines(self) -> bool:
        """Run requests until all are finished, the batch expires or it is stopped. Returns whether all are."""
        feeding = asyncio.create_task(self._feed())
        stopping = asyncio.create_task(self._stopped.wait())
        try:
            left = max(0.0, self.batch.expires_at - self._setup.clock())
            await asyncio.wait({feeding, stopping}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            done = feeding.done()
            if not done and self._is_closing():
                await _cancel({feeding, *(self._running[each] for each in self._waiting)})
                if self._running:
                    await asyncio.wait(self._running.values(), timeout=self._setup.grace_s)
        finally:
            await _cancel({feeding, stopping, *self._running.values()})
            await self._results.close()
        if done:
            feeding.result()
        if not self._is_closing():  # else the next run finds that the line has no result
            self._results.check()
        return done and all(self._finished)

    async def _feed(self) -> None:
        """Begin the requests in order, a few ahead of the slots, and wait for all of them."""
        unread: Iterator[Line] = lines.unfinished_lines(
            self._input, self.batch.endpoint, self._setup.max_line_bytes, self._finished
        )
        while taken := await asyncio.to_thread(lines.take_lines, unread, LINES_AHEAD, BYTES_AHEAD):
            for line in taken:
                size = len(line.body)
                await self._wait_for_room(size)
                self._setup.memory.add(self.batch, size)
                self._waiting[line.number] = size
                self._running[line.number] = task = asyncio.create_task(self._run_line(line))
                task.add_done_callback(partial(self._forget, line.number, size))
        while self._running:
            await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
            self._results.check()
        self._results.check()

    async def _wait_for_room(self, size: int) -> None:
        """Return once a line of that size may begin. Raises the error of an earlier write."""
        memory = self._setup.memory
        while True:
            self._results.check()
            few_wait = len(self._waiting) < LINES_WAITING and sum(self._waiting.values()) < BYTES_WAITING
            if few_wait and (not self._running or memory.has_room(size)):
                return
            self._moved.clear()
            with memory.waiting(self.batch, self._moved, size) if few_wait else nullcontext():
                await self._moved.wait()

    def _forget(self, number: int, size: int, _: asyncio.Task[None]) -> None:
        del self._running[number]
        self._waiting.pop(number, None)
        self._setup.memory.remove(self.batch, size)
        self._moved.set()

    async def _run_line(self, line: Line) -> None:
        """Run a request until its answer is final; it stays unfinished if the run stops before."""
        tries, pause = 0, 0.0
        while not self._stopped.is_set() and await self._take_slot(line, pause):
            tries += 1
            try:
                again = await self._try_line(line, tries)
            finally:
                self._setup.slots.release(self.batch)
            if again is None:
                return
            pause = again

    async def _take_slot(self, line: Line, pause: float) -> bool:
        """Take a slot after so many seconds. Returns False, without one, if the run stops or the server drains."""
        slots = self._setup.slots
        self._waiting[line.number] = len(line.body)
        await asyncio.sleep(pause)
        await slots.acquire(self.batch)
        if self._stopped.is_set() or self._setup.draining():
            slots.release(self.batch)
            await self._stopped.wait()
            return False
        del self._waiting[line.number]
        self._moved.set()
        return True

    async def _try_line(self, line: Line, tries: int) -> float | None:
        """Send a request for the n-th time. Returns the seconds until the next try; None: it is finished."""
        batch = self.batch
        answer = await self._setup.call(batch.client, batch.endpoint, line.body)
        pause = lines.choose_pause(answer, tries)
        if pause is not None:
            return pause
        ok = answer.status == 200
        encode = partial(lines.encode_answer, _new_result_id(), line.custom_id, answer)
        # Nothing below is undone: a cancellation from here on does not lose the result.
        self._finished[line.number] = 1
        batch.completed += ok
        batch.failed += not ok
        await self._results.add(ok, encode)
        return None

    def _append_unfinished(self, code: str, message: str) -> None:
        waiting: list[tuple[bool, bytes]] = []
        size = 0
        for line in lines.unfinished_lines(
            self._input, self.batch.endpoint, self._setup.max_line_bytes, self._finished
        ):
            data = lines.encode_failure(_new_result_id(), line.custom_id, code, message)
            waiting.append((False, data))
            size += len(data)
            if size > APPENDED:
                self._store.append_results(self.batch, waiting)
                waiting, size = [], 0
            self.batch.failed += 1
        self._store.append_results(self.batch, waiting)

    async def _save(self) -> None:
        await asyncio.to_thread(self._store.save_batch, self.batch)

    def _now(self) -> int:
        return int(self._setup.clock())


class _Appender:
    """Encodes and appends results in a thread, all that have come meanwhile at a time, and keeps the first error."""

    def __init__(self, append: Callable[[list[tuple[bool, bytes]]], None]) -> None:
        self._append = append
        self._waiting: list[tuple[bool, Callable[[], bytes]]] = []
        self._round: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None

    async def add(self, ok: bool, encode: Callable[[], bytes]) -> None:
        """Return once the line was written, or could not be. It is written also if this is cancelled."""
        loop = asyncio.get_running_loop()
        self._waiting.append((ok, encode))
        self._round = self._round or loop.create_future()
        if self._task is None:
            self._task = loop.create_task(self._write())
        await asyncio.shield(self._round)

    def check(self) -> None:
        """Raise the error of an earlier write."""
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        while self._task is not None:
            await asyncio.shield(self._task)

    async def _write(self) -> None:
        while (written := self._round) is not None:
            taken, self._waiting, self._round = self._waiting, [], None
            try:
                if self._error is None:
                    await asyncio.to_thread(self._encode_and_append, taken)
            except Exception as error:  # also a bug: who waits for the write would wait without end
                self._error = error
            written.set_result(None)
        self._task = None

    def _encode_and_append(self, taken: list[tuple[bool, Callable[[], bytes]]]) -> None:
        self._append([(ok, encode()) for ok, encode in taken])


def _new_result_id() -> str:
    return f"batch_req_{uuid4().hex}"


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
