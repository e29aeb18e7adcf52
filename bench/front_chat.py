"""What the front costs before an OpenAI-compatible server: processor time of a chat and of a streamed token."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from harness import Server, medians, parser, phase, write, wrk_lines

METHOD = """
`shoal serve openai+http://...` with default settings before a stub (uvicorn with httptools and uvloop) that answers
each chat with a constant of 64 words: whole, or as a stream of 64 chunks, each written by itself, at once or 2 ms
apart, as a model would. Load comes from wrk on the same cores, every question distinct. Processor time of Shoal's whole
process, in microseconds: of a request that is not streamed, and of a token of one that is, its share of the request
included. Each in turn in every round; medians over rounds.
"""
CLIENTS = (1, 16)
PAUSE_S = 0.002
TOKENS = 64
PATH = "/v1/chat/completions"
WHOLE = {
    "id": "chatcmpl-stub",
    "object": "chat.completion",
    "created": 0,
    "model": "stub",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": " word" * TOKENS}}],
    "usage": {"prompt_tokens": 8, "completion_tokens": TOKENS, "total_tokens": 8 + TOKENS},
}


class Stub(Server):
    """This file as a server: `main` reads `serve` and what follows it."""

    program = (__file__,)


def chunk(delta: dict[str, str], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    head = {"id": "chatcmpl-stub", "object": "chat.completion.chunk", "created": 0, "model": "stub"}
    return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"


def serve_stub(port: int) -> None:
    import asyncio

    import uvicorn

    models = json.dumps({"object": "list", "data": [{"id": "stub", "object": "model"}]}).encode()
    whole = json.dumps(WHOLE).encode()
    pieces = [chunk({"role": "assistant", "content": ""}), *[chunk({"content": " word"})] * TOKENS]
    pieces += [chunk({}, "stop"), b"data: [DONE]\n\n"]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body = (body + message.get("body", b"")).replace(b" ", b"")
        stream = b'"stream":true' in body
        pause_s = PAUSE_S if b'"user":"slow"' in body else 0.0
        kind = b"text/event-stream" if stream else b"application/json"
        headers = [(b"content-type", kind)]
        known = scope["path"] in ("/v1/models", "/health/ready", PATH)
        await send({"type": "http.response.start", "status": 200 if known else 404, "headers": headers})
        if scope["path"] == PATH and stream:
            for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(pause_s)
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "http.response.body", "body": whole if scope["path"] == PATH else models})

    uvicorn.run(app, port=port, http="httptools", loop="uvloop", lifespan="off", access_log=False, log_level="warning")


def questions(model: str, count: int, *, stream: bool, slow: bool = False) -> Iterator[bytes]:
    for number in range(count):
        message = {"role": "user", "content": f"question number {number}: how does it go on?"}
        user = "slow" if slow else "quick"
        yield json.dumps({"model": model, "messages": [message], "stream": stream, "user": user}).encode()


def main() -> None:
    arguments = parser(__doc__).parse_args()
    rounds: list[dict[str, float]] = []
    with Stub() as stub, Server(f"openai+{stub.url}/v1") as shoal:
        for number in range(arguments.rounds):
            with phase(f"round {number + 1}"):
                one: dict[str, float] = {}
                for clients in CLIENTS:
                    for name, each in (("chat", 1), ("a streamed token", TOKENS), ("a token alone", TOKENS)):
                        before = shoal.cpu_s()
                        count = int(10_000 * (arguments.seconds + 1))
                        lines = questions(shoal.model, count, stream=each > 1, slow=name == "a token alone")
                        ran = wrk_lines(shoal, PATH, lines, clients, arguments.seconds)
                        spent = shoal.cpu_s() - before
                        one[f"{name}, {clients} clients, us"] = spent / ran["requests"] / each * 1e6
                rounds.append(one)
    figures = medians(rounds)
    for name, value in figures.items():
        print(f"{name:40} {value:10.2f}")
    write("front_chat", METHOD, {"medians": figures, "rounds": rounds})


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve_stub(int(sys.argv[-1]))
    else:
        main()
