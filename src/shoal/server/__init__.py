"""The HTTP server: sockets, uvicorn and graceful shutdown, for any ASGI application.

Shutdown, on the first SIGTERM or SIGINT: readiness returns 503, and every response closes its connection. Connections
are accepted for `drain_delay_s` more while load balancers notice; then the backlog is emptied and the listener closed.
Requests in flight get `drain_timeout_s` to finish, idle keep-alive connections `drain_idle_s` for one more request. A
second signal ends the process at once; all writes to disk tolerate that.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import uvicorn

from shoal.errors import SetupError, Unavailable
from shoal.http.exchange import EXTENSION
from shoal.server.http_protocol import Connection, ErrorBodyRenderer, State
from shoal.server.listener import Listener

Scope: TypeAlias = Any
Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[Any], Awaitable[None]]
Asgi: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

# Holds bursts of new connections; the kernel limits it to net.core.somaxconn.
BACKLOG = 2048
# Longer than the idle timeout of common load balancers (60 s), so that they close idle connections. Otherwise a request
# could arrive on a connection that the server is closing.
KEEP_ALIVE_S = 75

_log = logging.getLogger(__name__)


ABORT_GRACE_S = 1.0
"""Time for aborted streams to send their error before connections are closed."""
POLL_INTERVAL_S = 0.05
"""Interval of checks whether all requests in flight are answered."""
MIN_IDLE_S = 5.0
MAX_IDLE_CLOSES = 32
"""Maximum connections, idle for at least MIN_IDLE_S, closed at a time when file descriptors run out."""


class Drainable(Protocol):
    """What the server calls during shutdown.

    `draining` makes readiness fail but refuses no request. `abort_generations` ends the streams that outlast the drain,
    with an error that their clients can read.
    """

    draining: bool

    def ready(self) -> bool: ...

    def abort_generations(self) -> None: ...


class OtherServer(Protocol):
    """Another server of the process. `stop`: refuse new requests, and return once those in flight are answered, or
    after `timeout_s`. `max_connections`: file descriptors that it may use."""

    max_connections: int

    async def stop(self, timeout_s: float) -> None: ...


def bind(host: str, port: int, flag: str = "--port") -> list[socket.socket]:
    """Listen on every address of `host`. Raises SetupError with advice if an address cannot be used; `flag` sets the
    port. Addresses that this machine does not have are skipped if there are others.

    Call it before models load, so that a conflict shows at once; early clients wait in the backlog.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise SetupError(
            f"cannot resolve host {host!r} ({error.strerror}): set --host to an address of this machine"
        ) from None
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, _, _, _, address in dict.fromkeys(found):
        # Port 0: the system picks a port for the first address, and the others use the same one.
        chosen = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(_listen(family, (address[0], chosen, *address[2:])))
        except OSError as error:
            # /etc/hosts often lists ::1 for localhost where IPv6 is disabled.
            if error.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                missing = error
                continue
            for one in sockets:
                one.close()
            raise SetupError(_describe_bind_error(error, host, port, flag)) from None
    if missing and not sockets:
        raise SetupError(_describe_bind_error(missing, host, port, flag))
    return sockets


def bind_shared(host: str, port: int, count: int) -> list[list[socket.socket]]:
    """Listen on every address of `host` with `count` sets of sockets, among which the system divides new connections.
    Raises as `bind` does."""
    alone = bind(host, port)  # fails if another server uses the port; shared sockets of the same user would not
    places = [(one.family, one.getsockname()) for one in alone]
    for one in alone:
        one.close()
    try:
        return [[_listen(family, place, shared=True) for family, place in places] for _ in range(count)]
    except OSError as error:
        raise SetupError(_describe_bind_error(error, host, port)) from None


def _listen(family: int, address: tuple[Any, ...], *, shared: bool = False) -> socket.socket:
    # Listens at once: Linux lets two sockets with SO_REUSEADDR bind the same port as long as neither listens.
    listener = socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=shared)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    listener.setblocking(False)
    return listener


def _describe_bind_error(error: OSError, host: str, port: int, flag: str = "--port") -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: choose another with {flag}, or stop the program that uses it"
    if error.errno == errno.EACCES:
        return f"port {port} requires more privileges than this user has: choose a port above 1023 with {flag}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host {host} is not an address of this machine: set --host to one that is, or to 0.0.0.0 for all"
    return f"cannot listen on {host} port {port}: {error.strerror}"


@contextlib.contextmanager
def stop_signals(stop: asyncio.Event, *, quiet: bool = False) -> Iterator[None]:
    """Within the block, the first SIGTERM or SIGINT sets `stop`; the next exits at once with 128 + its number.
    `quiet`: say nothing, and do not exit at once, since another process decides: both may have got the same signal."""
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set() and not quiet:
            os.write(2, b"stopped at once; requests in flight were dropped\n")
            os._exit(128 + number)
        if not quiet:
            _log.info("%s: finishing requests in flight; send it again to stop at once", number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class HttpServer:
    """Serves an ASGI application with uvicorn's protocol over bound sockets.

    `others`: other servers of the process, which stop listening when this one does.
    """

    def __init__(
        self,
        asgi: Asgi,
        sockets: Sequence[socket.socket],
        render_error: ErrorBodyRenderer,
        *,
        drain_delay_s: float,
        drain_timeout_s: float,
        drain_idle_s: float,
        others: Sequence[OtherServer] = (),
    ) -> None:
        self._asgi = asgi
        self._shutdown_reply = render_error(Unavailable("The server is shutting down: send the request again."))
        self._drain_delay_s = drain_delay_s
        self._drain_timeout_s = drain_timeout_s
        self._drain_idle_s = min(drain_idle_s, drain_timeout_s)
        self._others = others
        # At lower levels uvicorn's protocol formats a log record for each connection.
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        config = uvicorn.Config(
            self,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            # The peer is the connecting address: any client can send forwarding headers, so they are not trusted.
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        config.load()
        self._state = State()
        make_protocol = partial(Connection, config, self._state, {}, render_error=render_error)
        kept = sum(each.max_connections for each in others)
        self._listener = Listener(sockets, make_protocol, self._close_idle, kept)

    async def run(self, gateway: Drainable, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then until requests in flight are answered or the drain times out."""
        self._listener.start()
        dating = asyncio.create_task(self._refresh_date())
        try:
            await stop.wait()
            # Load balancers do not route to a server that is not ready, so they need no time to notice.
            delay = self._drain_delay_s if gateway.ready() else 0.0
            gateway.draining = True
            self._state.drain()
            await asyncio.sleep(delay)
        finally:
            try:
                await self._drain(gateway)
            finally:
                dating.cancel()

    async def _drain(self, gateway: Drainable) -> None:
        stops = [asyncio.create_task(each.stop(self._drain_timeout_s + ABORT_GRACE_S)) for each in self._others]
        last = asyncio.get_running_loop().call_later(self._drain_timeout_s, gateway.abort_generations)
        try:
            await self._drain_connections()
        finally:
            await asyncio.gather(*stops)
            last.cancel()

    async def _drain_connections(self) -> None:
        await self._listener.close()
        for connection in list(self._state.connections):
            connection.drain(self._drain_idle_s)
        try:
            async with asyncio.timeout(self._drain_timeout_s + ABORT_GRACE_S):
                while self._state.connections or self._state.tasks:  # noqa: ASYNC110 - uvicorn's protocol has no event
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            tasks = set(self._state.tasks)
            _log.warning("dropping %d requests still in flight after drain_timeout_s", len(tasks))
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=ABORT_GRACE_S)
            for connection in list(self._state.connections):
                connection.transport.close()

    async def _refresh_date(self) -> None:
        while True:
            self._state.refresh_date()
            await asyncio.sleep(1.0)

    def _close_idle(self) -> None:
        """Close the connections that have been idle longest."""
        idle = [(connection.idle_s(), connection) for connection in self._state.connections]
        longest = sorted((each for each in idle if each[0] >= MIN_IDLE_S), key=lambda each: each[0], reverse=True)
        for _, connection in longest[:MAX_IDLE_CLOSES]:
            connection.transport.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._asgi(scope, receive, send)
        except asyncio.CancelledError:
            if not self._state.draining:
                raise
            # The request outlasted the drain. uvicorn would treat the cancellation as a crash: a 500, with a traceback
            # in the log. If the response has started, uvicorn rejects the second start and closes the connection.
            with contextlib.suppress(RuntimeError):
                length = (b"content-length", b"%d" % len(self._shutdown_reply))
                await send({"type": "http.response.start", "status": 503, "headers": [*_SHUTDOWN_HEADERS, length]})
                await send({"type": "http.response.body", "body": self._shutdown_reply})
        finally:
            scope["extensions"][EXTENSION].release()


_SHUTDOWN_HEADERS = [(b"content-type", b"application/json"), (b"connection", b"close"), (b"retry-after", b"1")]
