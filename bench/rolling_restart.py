"""Requests that fail while two instances are restarted in turn under load."""

from __future__ import annotations

import asyncio
import collections
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import httpx
from harness import free_port, parser, phase, write

METHOD = """
Two servers with a scripted model (2 ms a call) behind clients with keep-alive pools (aiohttp, httpx): each request goes
to an instance whose /health/ready said 200 within 0.2 s, and to the other one where the connection is refused; nothing
else is sent again. Half of the clients pause for up to 3 s between requests, so that connections are idle when the
signal comes; the others for up to 20 ms. Every restart: SIGTERM, wait for the exit, start, wait until ready, then the
other one. `idle`: 200 idle keep-alive connections, each of which sends its next request within 4 s of SIGTERM.
`fresh`: connections opened one after the other by 20 threads around SIGTERM: answered, refused before a request was
sent, or reset.
"""
BODY = {"model": "fake", "input": "a text"}
REQUEST = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
Post = Callable[[str], Awaitable[int]]


class Instance:
    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.is_ready = asyncio.Event()

    async def start(self) -> None:
        command = [sys.executable, "-m", "shoal", "serve", "fake:delay_ms=2", "--port", str(self.port)]
        quiet = subprocess.DEVNULL
        self.process = await asyncio.create_subprocess_exec(*command, "--no-access-log", stdout=quiet, stderr=quiet)
        await self.is_ready.wait()

    async def stop(self) -> float:
        start = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        await self.process.wait()
        return time.perf_counter() - start


async def watch(instances: list[Instance]) -> None:
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=2)) as session:
        while True:
            for each in instances:
                try:
                    async with session.get(f"{each.url}/health/ready") as reply:
                        ready = reply.status == 200
                except (aiohttp.ClientError, TimeoutError):
                    ready = False
                (each.is_ready.set if ready else each.is_ready.clear)()
            await asyncio.sleep(0.2)


async def client(name: str, post: Post, refused: Any, instances: list[Instance], pause_s: float, outcomes: Any) -> None:
    while True:
        usable = [each for each in instances if each.is_ready.is_set()] or instances
        random.shuffle(usable)
        for attempt in [*usable, *(each for each in instances if each not in usable)]:
            try:
                status = await post(f"{attempt.url}/v1/embeddings")
                outcomes[f"{name}: {'ok' if status == 200 else status}"] += 1
                break
            except refused:
                outcomes[f"{name}: refused, sent to the other"] += 1
            except Exception as error:
                outcomes[f"{name}: failed: {type(error).__name__}: {error}"[:120]] += 1
                break
        await asyncio.sleep(random.random() * pause_s)


async def rolling(restarts: int, clients: int) -> dict[str, Any]:
    instances = [Instance(), Instance()]
    outcomes: collections.Counter[str] = collections.Counter()
    watching = asyncio.create_task(watch(instances))
    for each in instances:
        await each.start()
    connector = aiohttp.TCPConnector(limit=0)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=1000, keepalive_expiry=60)
    stops = []
    async with aiohttp.ClientSession(connector=connector) as session, httpx.AsyncClient(limits=limits) as pool:

        async def by_aiohttp(url: str) -> int:
            async with session.post(url, json=BODY) as reply:
                await reply.read()
                return reply.status

        async def by_httpx(url: str) -> int:
            return (await pool.post(url, json=BODY, timeout=30)).status_code

        tasks = [
            asyncio.create_task(client(name, post, refused, instances, pause, outcomes))
            for name, post, refused in (
                ("aiohttp", by_aiohttp, aiohttp.ClientConnectorError),
                ("httpx", by_httpx, httpx.ConnectError),
            )
            for pause in (0.02, 3.0)
            for _ in range(clients)
        ]
        await asyncio.sleep(1)
        for number in range(restarts):
            one = instances[number % 2]
            stops.append(await one.stop())
            one.is_ready.clear()
            await one.start()
            await asyncio.sleep(0.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    watching.cancel()
    for each in instances:
        each.process.kill()
    failed = sum(count for name, count in outcomes.items() if "ok" not in name and "refused" not in name)
    return {
        "restarts": restarts,
        "requests": sum(outcomes.values()),
        "failed": failed,
        "by": dict(outcomes),
        "longest_stop_s": max(stops),
    }


async def idle(count: int) -> dict[str, int]:
    instance, outcomes = Instance(), collections.Counter[str]()
    watching = asyncio.create_task(watch([instance]))
    await instance.start()
    pairs = [await asyncio.open_connection("127.0.0.1", instance.port) for _ in range(count)]

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"]}")
        return head

    async def later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(random.random() * 4)
        try:
            head = (await ask(reader, writer)).lower()
            outcomes["answered" if b"connection: close" in head else "answered without connection: close"] += 1
        except (OSError, asyncio.IncompleteReadError):
            outcomes["reset"] += 1

    for reader, writer in pairs:
        await ask(reader, writer)
    stopping = asyncio.create_task(instance.stop())
    await asyncio.gather(*(later(*pair) for pair in pairs))
    await stopping
    watching.cancel()
    return dict(outcomes)


async def fresh(threads: int, rounds: int) -> dict[str, int]:
    outcomes: collections.Counter[str] = collections.Counter()

    def connect(port: int, until: float) -> None:
        while time.perf_counter() < until:
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout=5)
            except OSError:
                outcomes["refused"] += 1
                time.sleep(0.01)
                continue
            with connection:
                try:
                    connection.sendall(REQUEST)
                    outcomes["answered" if connection.recv(65536) else "reset"] += 1
                except OSError:
                    outcomes["reset"] += 1

    for _ in range(rounds):
        instance = Instance()
        watching = asyncio.create_task(watch([instance]))
        await instance.start()
        until = time.perf_counter() + 1.5
        asking = [asyncio.create_task(asyncio.to_thread(connect, instance.port, until)) for _ in range(threads)]
        await asyncio.sleep(0.3 + random.random() * 0.3)
        await instance.stop()
        await asyncio.gather(*asking)
        watching.cancel()
    return dict(outcomes)


def run(restarts: int, clients: int, rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with phase("idle connections"):
        results["idle"] = asyncio.run(idle(200))
        print(results["idle"])
    with phase("fresh connections"):
        results["fresh"] = asyncio.run(fresh(20, rounds))
        print(results["fresh"])
    with phase("rolling restarts"):
        results["rolling"] = asyncio.run(rolling(restarts, clients))
        print(results["rolling"])
    return results


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--before", default="", help="src folder of an older version to measure as well")
    made.add_argument("--restarts", type=int, default=10)
    made.add_argument("--clients", type=int, default=20, help="of each of four kinds")
    arguments = made.parse_args()
    results = {"now": run(arguments.restarts, arguments.clients, arguments.rounds)}
    if arguments.before:
        os.environ["PYTHONPATH"] = arguments.before
        results["before"] = run(min(arguments.restarts, 4), arguments.clients, arguments.rounds)
    write("rolling_restart", METHOD, results)


if __name__ == "__main__":
    main()
