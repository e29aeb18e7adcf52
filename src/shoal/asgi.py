"""`shoal.asgi:app` for any ASGI server: `SHOAL_MODELS="hf:org/name" uvicorn shoal.asgi:app`.

Settings come from the environment and `shoal.toml`, read when the server starts, never on import. Models load in the
background; readiness tells when they are there. `shoal serve` adds what only a server of its own can do: readiness that
goes down before connections are refused, and a clash of ports that shows before models load.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from shoal import config
from shoal.app import open_app
from shoal.errors import ShoalError
from shoal.server import Asgi, Receive, Scope, Send

_log = logging.getLogger("shoal")


class LifespanApp:
    """Becomes the application when its lifespan starts, with the configuration that `load` returns then."""

    def __init__(self, load: Callable[[], config.LoadedConfig]) -> None:
        self._load = load
        self._asgi: Asgi | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        elif self._asgi is None:
            raise RuntimeError("the application is not started: run the ASGI server with lifespan events enabled")
        else:
            await self._asgi(scope, receive, send)

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with AsyncExitStack() as stack:
            try:
                loaded = await asyncio.to_thread(self._load)
                app = await stack.enter_async_context(open_app(loaded, loaded.served))
            except ShoalError as error:
                await send({"type": "lifespan.startup.failed", "message": error.message})
                return
            for warning in loaded.warnings:
                _log.warning(warning)
            if loaded.settings.grpc_port is not None or loaded.settings.grpc_socket is not None:
                _log.warning("grpc_port and grpc_socket have no effect here: gRPC is served by `shoal serve`")
            if loaded.settings.workers != 1:
                _log.warning("workers has no effect here: start more processes of this ASGI server, or `shoal serve`")
            self._asgi = app.asgi if is_protected(loaded) else local_only(app.asgi)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            app.gateway.draining = True
        await send({"type": "lifespan.shutdown.complete"})


def _load() -> config.LoadedConfig:
    return config.load({}, os.environ, config.find_file(os.environ, Path.cwd()))


def is_protected(loaded: config.LoadedConfig) -> bool:
    """Whether connections from other machines may be answered."""
    return bool(loaded.settings.api_key) or loaded.settings.insecure


def local_only(asgi: Asgi) -> Asgi:
    """Without keys, answer only connections that arrived on a loopback address: where the server listens is not ours
    to see, so the rule that `shoal serve` checks at the start is checked here for each connection."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        server = scope.get("server")
        # A Unix socket has no port, and its file has permissions of its own.
        if scope["type"] != "http" or not server or server[1] is None or config.is_loopback(server[0]):
            await asgi(scope, receive, send)
            return
        body = b'{"error":{"message":"This server has no API key and answers only on loopback: set SHOAL_API_KEY_FILE, '
        body += b'or SHOAL_INSECURE=true to serve everybody.","type":"invalid_request_error","param":null,"code":null}}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return guard


app = LifespanApp(_load)
