"""A web server that sends scripted bytes, and host names that resolve as a test specifies."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from shoal.http.fetching.allowed import FetchPolicy
from shoal.http.fetching.fetcher import Fetcher
from tests.fakes.closing import close

Answer = Callable[[asyncio.StreamWriter], Coroutine[None, None, None]]


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def http(
    body: bytes = b"picture", *, status: str = "200 OK", headers: Sequence[str] = (), length: int | None = None
) -> Answer:
    """Return a whole response; `length` overrides its content-length."""
    size = len(body) if length is None else length
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", f"content-length: {size}", *headers))
    return raw(f"{head}\r\n".encode() + body)


def raw(data: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return answer


async def stay_silent(_: asyncio.StreamWriter) -> None:
    """Wait until the client disconnects."""
    await asyncio.Event().wait()


@dataclass
class Web:
    """Recorded traffic: `requests` are heads as received; `gone` counts connections that their client closed."""

    port: int = 0
    answer: Answer = field(default_factory=http)
    requests: list[str] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    busy: int = 0
    peak: int = 0
    disconnects: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(met)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.busy += 1
        self.peak = max(self.peak, self.busy)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            await self._notify()
            answering = asyncio.create_task(self.answer(writer))
            leaving = asyncio.create_task(reader.read())
            try:
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    answering.result()
                else:
                    self.disconnects += 1
            finally:
                answering.cancel()
                leaving.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)
        self.busy -= 1
        writer.close()
        await self._notify()

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


@asynccontextmanager
async def web(host: str = "127.0.0.1", port: int = 0, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Web]:
    web_server = Web()
    if tls is not None:
        tls.sni_callback = lambda _, name, __: web_server.names.append(name)
    server = await asyncio.start_server(web_server.serve, host, port, ssl=tls)
    web_server.port = server.sockets[0].getsockname()[1]
    try:
        yield web_server
    finally:
        await close(server)
        await web_server.until(lambda: web_server.busy == 0)


class Names:
    """A resolver that returns the given answers in order, the last one repeatedly."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.lookups: list[tuple[str, int]] = []
        self.closed = False

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        self.lookups.append((host, port))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if not answer:
            raise OSError(f"no address of {host} in 10.9.8.7")
        return answer

    async def aclose(self) -> None:
        self.closed = True


def fetcher(server: Web, *, names: Names | None = None, **options: Any) -> Fetcher:
    """Return a fetcher that may reach the server as 127.0.0.1 and as images.test."""
    allowed = FetchPolicy.parse(f"127.0.0.1:{server.port},images.test:{server.port}")
    return Fetcher(allowed, resolver=names or Names(["127.0.0.1"]), **options)


def url(server: Web, host: str = "127.0.0.1", path: str = "/x.png") -> str:
    return f"http://{host}:{server.port}{path}"
