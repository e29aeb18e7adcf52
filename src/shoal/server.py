"""HTTP: sockets, uvicorn, and the way down. What is served is an ASGI callable; nothing here knows what it does.

The way down, on the first SIGTERM or SIGINT: readiness says no, connections are accepted for `drain_delay_s` more
while load balancers notice, then no longer; requests in flight get `drain_timeout_s` to finish. A second signal ends
the process at once: everything on disk is written so that this is safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import uvicorn

from shoal.errors import SetupError
from shoal.http_protocol import Connection

Scope: TypeAlias = Any
Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[Any], Awaitable[None]]
Asgi: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

# Bursts of new connections wait here; the kernel cuts it to net.core.somaxconn.
BACKLOG = 2048
# Longer than the idle time of the usual load balancers (60 s), so that it is they who close an idle connection; the
# other way round a request can meet a connection that is being closed.
KEEP_ALIVE_S = 75

_log = logging.getLogger(__name__)


LAST_WORDS_S = 1.0
"""For streams to say that they were broken off, before connections are cut."""


class Drainable(Protocol):
    """What the server tells about the way down: `draining` makes readiness say no, and refuses nothing; `break_off`
    ends the streams that go on when their time is over, in words that their clients can read."""

    draining: bool

    def ready(self) -> bool: ...

    def break_off(self) -> None: ...


def bind(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of `host`. Raises SetupError that says how to get a free one.

    Called before models load, so that a clash shows at once; clients that come early wait in the backlog.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise SetupError(
            f"host {host!r} has no address here ({error.strerror}): set --host to one of this machine"
        ) from None
    sockets: list[socket.socket] = []
    for family, _, _, _, address in dict.fromkeys(found):
        # Port 0: the first address is given a port, and the others take the same one.
        chosen = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(_listen(family, (address[0], chosen, *address[2:])))
        except OSError as error:
            for one in sockets:
                one.close()
            raise SetupError(_bind_failed(error, host, port)) from None
    return sockets


def _listen(family: int, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        # At once: Linux lets two sockets with SO_REUSEADDR bind one port as long as neither listens.
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _bind_failed(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: choose another with --port, or stop the program that has it"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has: choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host {host} is not an address of this machine: set --host to one that is, or to 0.0.0.0 for all"
    return f"cannot listen on {host} port {port}: {error.strerror}"


@contextlib.contextmanager
def stop_signals(stop: asyncio.Event) -> Iterator[None]:
    """While inside, the first SIGTERM or SIGINT sets `stop`; the next one exits at once with 128 + its number."""
    loop = asyncio.get_running_loop()

    def arrived(number: signal.Signals) -> None:
        if stop.is_set():
            os.write(2, b"stopped at once; requests in flight were dropped\n")
            os._exit(128 + number)
        _log.info("%s: finishing what is in flight; once more stops at once", number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, arrived, number)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class HttpServer:
    """uvicorn over sockets that are bound already."""

    def __init__(self, asgi: Asgi, sockets: Sequence[socket.socket], *, drain_delay_s: float, drain_timeout_s: float):
        self._asgi = asgi
        self._sockets = list(sockets)
        self._drain_delay_s = drain_delay_s
        self._closing = False
        # uvicorn narrates its own start and stop; Shoal says the same in its own words.
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                self,
                interface="asgi3",
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                # The peer is who connects: headers that anybody can send change no decision.
                proxy_headers=False,
                workers=1,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(drain_timeout_s + LAST_WORDS_S),
            )
        )
        self._drain_timeout_s = drain_timeout_s

    async def run(self, gateway: Drainable, stop: asyncio.Event) -> None:
        """Serve until `stop` is set and what was in flight is answered, or its time is over."""
        serving = asyncio.create_task(self._uvicorn.serve(sockets=self._sockets))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            # Nobody routes to a server that was never ready, so nobody needs time to notice.
            delay = self._drain_delay_s if gateway.ready() else 0.0
            gateway.draining = self._closing = True
            await asyncio.sleep(delay)
        finally:
            stopping.cancel()
            self._uvicorn.should_exit = True
            last = asyncio.get_running_loop().call_later(self._drain_timeout_s, gateway.break_off)
            try:
                await serving
            finally:
                last.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application; on the way down every answer asks the client to connect anew, and so elsewhere."""
        try:
            await self._asgi(scope, receive, _closing(send) if self._closing else send)
        except asyncio.CancelledError:
            if not self._closing:
                raise
            # It outlasted the drain. To uvicorn a cancelled application is a crash: a 500, and a traceback in the log.
            # An answer that has begun cannot be mended: uvicorn refuses the second start and cuts the connection.
            with contextlib.suppress(RuntimeError):
                await send({"type": "http.response.start", "status": 503, "headers": _GONE_HEADERS})
                await send({"type": "http.response.body", "body": _GONE})


_GONE = b"The server is shutting down: send the request again.\n"
_GONE_HEADERS = [
    (b"content-type", b"text/plain"),
    (b"content-length", str(len(_GONE)).encode()),
    (b"connection", b"close"),
    (b"retry-after", b"1"),
]


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handling: it knows neither a drain delay nor a second SIGTERM."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _closing(send: Send) -> Send:
    async def wrapped(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return wrapped
