"""How long a new connection waits beside large uploads."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import statistics
import time
from typing import Any

from harness import Server, parser, phase, write

METHOD = """
One server with a scripted model. `uploads` connections of another process each send a body of 30 MB, one byte short of
JSON, and connect anew for the next one. Beside them a fresh connection asks for /health/live every 50 ms: from the
call of connect to the last byte of the answer. `alone`: without uploads.
"""
BODY = 30_000_000
EVERY_S = 0.05


def upload(port: int, uploads: int) -> None:
    head = b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    sent = head + b"content-length: %d\r\n\r\n" % BODY + b" " * BODY

    async def one() -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                for start in range(0, len(sent), 1 << 20):
                    writer.write(sent[start : start + (1 << 20)])
                    await writer.drain()
                await reader.readuntil(b"\r\n\r\n")
                writer.close()
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.1)

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(uploads)))

    os.nice(5)
    asyncio.run(all_of_them())


def probe(port: int) -> float:
    start = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        while connection.recv(65536):
            pass
    return (time.perf_counter() - start) * 1000


def measure(port: int, seconds: float) -> dict[str, float]:
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        found.append(probe(port))
        time.sleep(EVERY_S)
    found.sort()
    at = {name: found[min(len(found) - 1, int(len(found) * part))] for name, part in (("p50", 0.5), ("p99", 0.99))}
    return {**at, "max": found[-1], "mean": statistics.mean(found), "probes": len(found)}


def run(seconds: float) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with Server("fake:", max_body_bytes=BODY) as server:
        server.settle()
        results["alone_ms"] = measure(server.port, seconds)
        for uploads in (20, 100, 400):
            process = multiprocessing.Process(target=upload, args=(server.port, uploads), daemon=True)
            process.start()
            time.sleep(1.0)
            with phase(f"{uploads} uploads"):
                results[f"uploads_{uploads}_ms"] = measure(server.port, seconds)
            process.kill()
            process.join()
            time.sleep(1.0)
            print(results[f"uploads_{uploads}_ms"])
    return results


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--before", default="", help="src folder of an older version to measure as well")
    arguments = made.parse_args()
    results = {"now": run(arguments.seconds)}
    if arguments.before:
        os.environ["PYTHONPATH"] = arguments.before
        results["before"] = run(arguments.seconds)
    write("accept", METHOD, results)


if __name__ == "__main__":
    main()
