"""The least that stands between a client and a server: one request in, the same request on, with Shoal's libraries."""

from __future__ import annotations

import argparse
from typing import Any

import aiohttp
import uvicorn


class BareProxy:
    """Passes a body on to the same path there, and the answer back; knows nothing else."""

    def __init__(self, behind: str) -> None:
        self._behind = behind
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers={"content-type": "application/json"})
        message = await receive()
        async with self._session.post(self._behind + scope["path"], data=message["body"]) as reply:
            body = await reply.read()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("behind", help="the server, as http://host:port")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    options: dict[str, Any] = {"lifespan": "off", "ws": "none", "access_log": False, "log_level": "warning"}
    uvicorn.run(BareProxy(arguments.behind), port=arguments.port, loop="uvloop", http="httptools", **options)


if __name__ == "__main__":
    main()
