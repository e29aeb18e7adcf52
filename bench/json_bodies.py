"""How long the worst JSON bodies hold the event loop.

python bench/json_bodies.py                 the bodies as large as `max_body_bytes` allows
python bench/json_bodies.py --mb 32 --name before
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from harness import RESULTS, parser, phase, write

from shoal.app import App, open_app
from shoal.bench.machine import PACKAGES
from shoal.config import load

METHOD = """
A scripted model (`fake:`) behind Shoal's ASGI application, in one process without sockets. Each body is as large as the
setting `max_body_bytes` allows (`megabytes`), unless its name says less, and names a model that is not served, so that
it is read, decoded and checked, and nothing is embedded. `hold_ms`: the longest time in which the event loop ran
nothing but this request: processor time of the loop's thread between two turns of another task, the least of `rounds`
runs. `total_ms`: processor time of the whole request. `status`: 404 for bodies that were accepted up to the model's
name, other codes for refused ones. `before`: lists were decoded in steps, and the limit was 32 MB. The machine was busy
with other work (load 10 to 15 on two cores).
"""
END = b',"model":"absent"}'
EMBEDDINGS, EMBED, RERANK = "/v1/embeddings", "/embed", "/v1/rerank"


def fill(size: int, before: bytes, element: bytes, after: bytes = b"]", between: bytes = b",") -> bytes:
    """As many elements as fit into `size` bytes."""
    space = size - len(before) - len(after) - len(END)
    count = max(1, (space + len(between)) // (len(element) + len(between)))
    return before + between.join([element] * count) + after + END


def bodies(size: int) -> Iterator[tuple[str, str, bytes]]:
    """Name, path and body of each case."""
    text, listed = b'{"input":"', b'{"input":['
    for name, piece in (
        ("ASCII", b"A word, a word. "),
        ("UTF-8", "\u6c34".encode()),
        (r"\u escapes", b"\\u6c34"),
        (r"\n escapes", b"\\n"),
        (r"\" escapes", b'\\"'),
        (r"\\ escapes", b"\\\\"),
    ):
        yield f"one text, {name}", EMBEDDINGS, fill(size, text, piece, b'"', b"")
    long = b'"%b"' % (b"A word, a word. " * (size // 2048 // 16 - 1))
    yield "2,048 texts", EMBEDDINGS, fill(2048 * (len(long) + 1) + 40, listed, long)
    yield "texts of 8 characters", EMBEDDINGS, fill(size, listed, b'"abcdefgh"')
    yield "texts of 8 characters, /embed", EMBED, fill(size, b'{"inputs":[', b'"abcdefgh"')
    yield "150,000 texts of 1 character", EMBEDDINGS, fill(600_000, listed, b'"a"')
    yield "empty texts", EMBEDDINGS, fill(size, listed, b'""')
    yield "token ids of 1 digit", EMBEDDINGS, fill(size, listed, b"7")
    yield "token ids of 5 digits", EMBEDDINGS, fill(size, listed, b"30000")
    ids = b",".join([b"30000"] * 512)
    yield "1,040,000 token ids, 6.2 MB", EMBEDDINGS, fill(6_240_000, listed, b"30000")
    yield "2,048 lists of 512 ids, 6.3 MB", EMBEDDINGS, fill(2048 * (len(ids) + 3) + 40, listed, b"[%b]" % ids)
    yield "the same, /embed", EMBED, fill(2048 * (len(ids) + 3) + 40, b'{"inputs":[', b"[%b]" % ids)
    yield (
        "the same, and an unknown field",
        EMBEDDINGS,
        fill(2048 * (len(ids) + 3) + 40, listed, b"[%b]" % ids, b'],"unknown":1'),
    )
    yield "empty lists", EMBEDDINGS, fill(size, listed, b"[]")
    yield "lists of one id", EMBEDDINGS, fill(size, listed, b"[7]")
    yield "150,000 lists of one id", EMBEDDINGS, fill(600_000, listed, b"[7]")
    yield "600,000 lists, 50 bytes each", EMBEDDINGS, fill(min(size, 30_000_000), listed, b"[%b]" % ids[:47])
    yield "60,000 pairs, /predict", "/predict", fill(600_000, b'{"inputs":[', b'["a","b"]')
    yield (
        "60,000 objects in one message",
        EMBEDDINGS,
        fill(800_000, b'{"messages":[{"content":[', b'{"text":"a"}', b"]}]"),
    )
    yield "60,000 messages", EMBEDDINGS, fill(850_000, b'{"messages":[', b'{"content":[]}')
    yield "60,000 objects, /v1/rerank", RERANK, fill(800_000, b'{"query":"a","documents":[', b'{"text":"a"}')
    yield "pairs, /predict", "/predict", fill(size, b'{"inputs":[', b'["a","b"]')
    yield "objects, /v1/rerank", RERANK, fill(size, b'{"query":"a","documents":[', b'{"text":"a"}')
    yield "objects in one message", EMBEDDINGS, fill(size, b'{"messages":[{"content":[', b'{"text":"a"}', b"]}]")
    yield "instances, /vertex", "/vertex", fill(size, b'{"instances":[', b"{}")
    yield "an object of queries", "/v1/embedding", fill(size, b"[", b'{"query":"a"}', b"]")[: -len(END)]
    yield "an unknown list of ids", EMBEDDINGS, fill(size, b'{"input":"a","unknown":[', b"7")
    yield "an unknown list of lists", EMBEDDINGS, fill(size, b'{"input":"a","unknown":[', b"[]")
    yield "unknown fields", EMBEDDINGS, fill(size, b'{"input":"a",', b'"u":1', b"")
    yield "nested lists", EMBEDDINGS, fill(size, b'{"input":"a","unknown":[', b"[", b"", b"")
    yield "one number", EMBEDDINGS, fill(size, b'{"input":"a","unknown":', b"7", b"", b"")
    yield "white space", EMBEDDINGS, fill(size, b'{"input":["a"', b" ", b"]", b"")
    half = size - 6_000_000
    escapes = b"\\n" * (half // 2)
    yield "escapes and 1,000,000 ids", EMBED, fill(size - 2, b'{"inputs":["%b",[' % escapes, b"30000", b"]]")
    yield "prompts of ids, /v1/completions", "/v1/completions", fill(size, b'{"prompt":[[', b"30000", b"]]")
    yield "messages, /v1/chat/completions", "/v1/chat/completions", fill(size, b'{"messages":[', b'{"role":"user"}')


class LoopDelay:
    """The longest time between two turns of a task that always wants one."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest = max(self.longest, now - last)
            last = now


async def measure(app: App, path: str, body: bytes) -> tuple[int, float, float]:
    """Status, longest hold and processor seconds of one request."""
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [
            (b"host", b"127.0.0.1"),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    sent: list[Any] = []
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if waiting:
            return waiting.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    gc.collect()
    delay = LoopDelay()
    task = asyncio.create_task(delay.watch())
    for _ in range(3):
        await asyncio.sleep(0)
    delay.longest, start = 0.0, time.thread_time()
    await app.asgi(scope, receive, send)
    await asyncio.sleep(0)
    total = time.thread_time() - start
    task.cancel()
    return sent[0]["status"], delay.longest, total


async def run(megabytes: float, rounds: int) -> dict[str, Any]:
    settings = {"SHOAL_MAX_BODY_BYTES": str(round(megabytes * 2**20))} if megabytes else {}
    loaded = load({}, settings)
    size = loaded.settings.max_body_bytes
    opened: AbstractAsyncContextManager[App] = open_app(loaded, ["fake:"])
    found: dict[str, Any] = {}
    async with opened as app:
        await app.wait_until_loaded()
        for name, path, body in bodies(size):
            with phase(f"{name} ({len(body) / 2**20:.1f} MB)"):
                runs = [await measure(app, path, body) for _ in range(rounds)]
                found[name] = {
                    "status": runs[0][0],
                    "hold_ms": round(min(hold for _, hold, _ in runs) * 1000, 1),
                    "total_ms": round(min(total for *_, total in runs) * 1000, 1),
                }
                print("  " + json.dumps(found[name]))
    return {"megabytes": round(size / 2**20, 1), "longest_ms": max(one["hold_ms"] for one in found.values()), **found}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--mb", type=float, default=0.0, help="megabytes of a body; the default limit without")
    made.add_argument("--name", default="now", help="key of the results; the others in the file stay")
    arguments = made.parse_args()
    path = RESULTS / "json_bodies.json"
    others = json.loads(path.read_text())["results"] if path.exists() else {}
    results = asyncio.run(run(arguments.mb, arguments.rounds))
    write("json_bodies", METHOD, {**others, arguments.name: results}, (*PACKAGES, "msgspec"))


if __name__ == "__main__":
    main()
