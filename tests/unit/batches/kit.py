"""A desk over a scripted call, for the tests of batches."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from shoal.batches import BatchDesk, Identity, Limits
from shoal.batches.lines import Answer
from shoal.batches.objects import Batch, StoredFile

ENDPOINT = "/v1/embeddings"
ME = Identity("me", "own")
PATIENCE_S = 30.0


def request_line(custom_id: str, text: str = "", **changes: Any) -> bytes:
    """Return a line that asks for `text`, by default its own id."""
    line = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"input": text or custom_id}}
    return json.dumps({**line, **changes}).encode() + b"\n"


def request_file(*ids: str) -> bytes:
    return b"".join(map(request_line, ids))


def new_batch(**changes: Any) -> Batch:
    values: dict[str, Any] = {
        "id": "batch_1",
        "owner": "me",
        "client": "me",
        "endpoint": ENDPOINT,
        "input_file_id": "file-in",
        "output_id": "file-out",
        "errors_id": "file-err",
        "created_ns": 1,
        "expires_at": 100,
        "output_seconds": 100,
    }
    return Batch(**{**values, **changes})


class Model:
    """Answers requests with their input, as `answers` says: a list of answers by input, the last one repeatedly.

    Inputs in `held` wait until `release` is set.
    """

    def __init__(
        self, answers: dict[str, list[Answer]] | None = None, held: Callable[[str], bool] | None = None
    ) -> None:
        self.answers = answers or {}
        self.held = held or (lambda text: False)
        self.release = asyncio.Event()
        self.calls: Counter[str] = Counter()
        self.clients: set[str] = set()
        self.running = self.most_running = 0
        self.called = asyncio.Condition()

    async def __call__(self, client: str, path: str, body: bytes) -> Answer:
        text = msgspec.json.decode(body)["input"]
        assert path == ENDPOINT
        self.clients.add(client)
        self.calls[text] += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async with self.called:
                self.called.notify_all()
            await asyncio.sleep(0)
            if self.held(text):
                await self.release.wait()
        finally:
            self.running -= 1
        found = self.answers.get(text, [Answer(200, "req", json.dumps({"text": text}).encode())])
        return found[min(self.calls[text], len(found)) - 1]

    async def wait_for_calls(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self.called:
            await self.called.wait_for(lambda: self.calls.total() >= count)


def open_desk(folder: Path, model: Model, **changes: Any) -> BatchDesk:
    """Return a desk that runs batches by `model`."""
    limits = Limits(concurrency=changes.pop("concurrency", 4), max_disk_bytes=changes.pop("max_disk_bytes", 1 << 20))
    revoked = changes.pop("revoked", ())
    desk = BatchDesk(folder, limits, **{"grace_s": 0.0, **changes})
    desk.start(model, lambda client: client in revoked)
    return desk


async def upload(desk: BatchDesk, content: bytes, who: Identity = ME) -> StoredFile:
    async with desk.receive() as new:
        await desk.write(new, content)
        return await desk.keep(new, who, "in.jsonl", None)


async def begin(desk: BatchDesk, content: bytes, who: Identity = ME) -> Batch:
    source = await upload(desk, content, who)
    return await desk.create_batch(who, file_id=source.id, endpoint=ENDPOINT, metadata=None, output_seconds=None)


async def wait_for_end(desk: BatchDesk, batch_id: str, who: Identity = ME) -> Batch:
    batch = await desk.get_batch(who, batch_id)
    await poll(lambda: batch.has_ended)
    return batch


async def poll(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - batches have no event
            await asyncio.sleep(0.005)


async def read(desk: BatchDesk, file_id: str | None, who: Identity = ME) -> list[Any]:
    """Return the lines of a file, by their custom ids; an empty list without a file."""
    if file_id is None:
        return []
    content = await desk.open_content(who, file_id)
    data = b"".join([piece async for piece in content])
    await content.aclose()
    return sorted(map(json.loads, data.splitlines()), key=lambda line: line["custom_id"])


def ids(lines: list[Any]) -> list[str]:
    return [line["custom_id"] for line in lines]
