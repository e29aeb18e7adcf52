"""An OpenAI-compatible server that costs next to nothing: constant embeddings, chats and streams, by `serve --port N`.

It speaks HTTP/1.1 straight on uvloop, since behind a fast gateway a web framework would be what is measured.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import sys
from functools import lru_cache
from typing import Any

import httptools

MODEL = "stub"
DIMENSION = 384
TOKENS = 64
PAUSE_S = 0.002
"""Between the chunks of a stream whose request says `"user": "slow"`."""

CHAT_PATH = "/v1/chat/completions"
EMBEDDINGS_PATH = "/v1/embeddings"
VECTOR = [round((number % 7 - 3) / 61, 6) for number in range(DIMENSION)]
PROBES = ("/health", "/health/ready", "/v1/models")
"""GET paths that return 200 with the list of models: gateways ask one of them whether this server is ready."""


def encode_head(content_type: str, length: int | None, status: str = "200 OK") -> bytes:
    """A response's head; without a length the body is chunked."""
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\n{framing}\r\n\r\n".encode()


def encode_json(value: Any, status: str = "200 OK") -> bytes:
    """A whole response."""
    body = json.dumps(value, separators=(",", ":")).encode()
    return encode_head("application/json", len(body), status) + body


def encode_event(delta: dict[str, str], reason: str | None = None) -> bytes:
    """One chunk of a stream, framed as an HTTP chunk."""
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    head = {"id": "chatcmpl-stub", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    return encode_piece(b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n")


def encode_piece(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@lru_cache(maxsize=1024)
def embeddings(count: int, encoding: str) -> bytes:
    """The response to `count` inputs."""
    packed = base64.b64encode(struct.pack(f"<{DIMENSION}f", *VECTOR)).decode()
    vector = packed if encoding == "base64" else VECTOR
    data = [{"object": "embedding", "index": number, "embedding": vector} for number in range(count)]
    usage = {"prompt_tokens": 16 * count, "total_tokens": 16 * count}
    return encode_json({"object": "list", "data": data, "model": MODEL, "usage": usage})


MODELS = encode_json({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}]})
NOT_FOUND = encode_json({"error": {"message": "unknown path", "type": "invalid_request_error"}}, "404 Not Found")
CHAT = encode_json(
    {
        "id": "chatcmpl-stub",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": " word" * TOKENS},
            }
        ],
        "usage": {"prompt_tokens": 8, "completion_tokens": TOKENS, "total_tokens": 8 + TOKENS},
    }
)
STREAM_HEAD = encode_head("text/event-stream", None)
EVENTS = [
    encode_event({"role": "assistant", "content": ""}),
    *[encode_event({"content": " word"})] * TOKENS,
    encode_event({}, "stop"),
    encode_piece(b"data: [DONE]\n\n"),
]
STREAM_END = b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One client; requests on it are answered one after the other."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body = b""
        self._transport: asyncio.Transport | None = None
        self._waiting: list[tuple[str, bytes]] = []
        self._streaming: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._streaming is not None:
            self._streaming.cancel()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.close()  # such as a probe for HTTP/2

    def on_url(self, url: bytes) -> None:
        self._path, self._body = self._path + url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path, self._path = self._path.partition(b"?")[0].decode(errors="replace"), b""
        self._waiting.append((path, self._body))
        if self._streaming is None:
            self._answer()

    def _answer(self) -> None:
        """Answer waiting requests until one of them is a stream."""
        assert self._transport is not None
        while self._waiting and self._streaming is None:
            path, body = self._waiting.pop(0)
            request = json.loads(body) if body else {}
            if path == CHAT_PATH and request.get("stream"):
                pause_s = PAUSE_S if request.get("user") == "slow" else 0.0
                self._streaming = asyncio.get_running_loop().create_task(self._stream(pause_s))
            else:
                self._transport.write(choose_reply(path, request))

    async def _stream(self, pause_s: float) -> None:
        """Write each event by itself, as a model would."""
        assert self._transport is not None
        self._transport.write(STREAM_HEAD)
        for event in EVENTS:
            self._transport.write(event)
            await asyncio.sleep(pause_s)
        self._transport.write(STREAM_END)
        self._streaming = None
        self._answer()


def choose_reply(path: str, request: dict[str, Any]) -> bytes:
    """The response to a request that is not a stream."""
    if path == EMBEDDINGS_PATH:
        inputs = request.get("input", "")
        return embeddings(len(inputs) if isinstance(inputs, list) else 1, request.get("encoding_format") or "float")
    if path == CHAT_PATH:
        return CHAT
    return MODELS if path in PROBES else NOT_FOUND


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(int(sys.argv[-1])))
