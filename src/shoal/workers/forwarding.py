"""Whole HTTP requests from a front to the model process, as ASGI's events."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from shoal.http.request import TRACED, Request
from shoal.workers import messages
from shoal.workers.front import RemoteGateway
from shoal.workers.link import Link

logger = logging.getLogger("shoal.workers")

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Forwarder:
    """Forwards requests of a front (see http.hand_over.Forward)."""

    def __init__(self, gateway: RemoteGateway) -> None:
        self._gateway = gateway

    async def __call__(self, request: Request, receive: Receive, send: Send) -> int:
        """Raises what the link raises, and InternalError if the other end has failed."""
        number, status = self._gateway.new_number(), 500
        headers = list(request.headers.items())
        if request.trace:
            headers = [each for each in headers if each[0] not in (b"traceparent", b"tracestate")]
            parent, _, state = request.trace.encode().partition(b" ")
            headers += [(b"traceparent", parent), *([(b"tracestate", state)] if state else ())]
        client = (request.peer, 0)
        handed = messages.Request(
            number, request.method, request.path, request.query, headers, client, bool(request.trace)
        )
        body = request.body if request.body_read else None

        async def read() -> None:
            nonlocal body
            if body is not None:
                event, body = messages.Event(number, body, False), None
            else:
                try:
                    event = _to_event(number, await receive())
                except Exception as error:  # whatever it is, nothing more can be read
                    logger.info("%s: its body cannot be read: %r", request.id, error)
                    event = messages.Event(number, b"", more_body=False, disconnected=True)
            self._gateway.notify(event)

        reading: asyncio.Task[None] | None = None
        opened = self._gateway.open_request(handed, math.inf)  # the model process has its own deadline
        try:
            async for message in opened:
                match message:
                    case messages.Failure():
                        raise message.error.to_error()
                    case messages.Receive():
                        reading = asyncio.create_task(read())
                    case messages.Start():
                        status = message.status
                        request.has_response = request.is_forwarded = True
                        await send({"type": "http.response.start", "status": status, "headers": message.headers})
                        self._gateway.notify(messages.More(number))
                    case messages.Body():
                        await send({"type": "http.response.body", "body": message.body, "more_body": message.more_body})
                        self._gateway.notify(messages.More(number))
        finally:
            if reading is not None:
                reading.cancel()
            await opened.aclose()
        return status


def _to_event(number: int, event: Any) -> messages.Event:
    gone = event["type"] == "http.disconnect"
    return messages.Event(number, event.get("body", b""), event.get("more_body", False), gone)


class ForwardedRequest:
    """A request of a front, as an ASGI application in the model process sees it."""

    def __init__(self, link: Link, request: messages.Request, before_start: Callable[[], Awaitable[None]]) -> None:
        self._link = link
        self._number = request.id
        self._before_start = before_start
        self._events: asyncio.Queue[messages.Event] = asyncio.Queue()
        self._read = asyncio.Event()
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": request.method,
            "path": request.path,
            "query_string": request.query,
            "root_path": "",
            "headers": request.headers,
            "client": request.client,
            "extensions": {TRACED: True} if request.traced else {},
        }

    def put(self, message: messages.Event | messages.More) -> None:
        """Take what the front sends about it."""
        if isinstance(message, messages.Event):
            self._events.put_nowait(message)
        else:
            self._read.set()

    async def receive(self) -> Any:
        self._link.send(messages.Receive(self._number))
        event = await self._events.get()
        if event.disconnected:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": event.body, "more_body": event.more_body}

    async def send(self, event: Any) -> None:
        """Send an event of the response, and return once the client has room for more."""
        self._read.clear()
        if event["type"] == "http.response.start":
            await self._before_start()
            headers = [(bytes(name), bytes(value)) for name, value in event["headers"]]
            self._link.send(messages.Start(self._number, event["status"], headers))
        else:
            self._link.send(messages.Body(self._number, event.get("body", b""), event.get("more_body", False)))
        await self._read.wait()
