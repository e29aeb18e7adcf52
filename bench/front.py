"""What the front costs: processor time of `fake:` embeddings, of a bare ASGI answer of the same size beside it."""

from __future__ import annotations

import sys
import urllib.request
from typing import Any

from harness import Server, medians, parser, phase, write, wrk

METHOD = """
`shoal serve fake:` with default settings, and beside it uvicorn with httptools and uvloop answering the same number of
bytes from a constant after it has read the body. Load comes from wrk on the same cores, float answers of 384 numbers,
every text distinct, 16 tokens. Processor time of the whole server process, in microseconds a request; each in turn in
every round; medians over rounds.
"""
CLIENTS = (1, 16, 64)
ADDRESS = "fake:dimension=384"


class Bare(Server):
    """This file as a server: `serve` and what follows it are read by `main`."""

    program = (__file__,)


def serve_bare(port: int, size: int) -> None:
    import uvicorn

    body = b'{"data":[{"id":"bare"}]}' + b" " * (size - 24)
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % size)]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})

    uvicorn.run(app, port=port, http="httptools", loop="uvloop", lifespan="off", access_log=False, log_level="warning")


def answer_size(server: Server) -> int:
    data = f'{{"model":"{server.model}","input":"a text of about sixteen tokens"}}'.encode()
    request = urllib.request.Request(server.url + "/v1/embeddings", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return len(reply.read())


def main() -> None:
    arguments = parser(__doc__).parse_args()
    rounds: list[dict[str, float]] = []
    with Server(ADDRESS) as shoal, Bare(str(answer_size(shoal))) as bare:
        for server in (shoal, bare):
            wrk(server, 16, 16, 1, expected=60000)
        for number in range(arguments.rounds):
            with phase(f"round {number + 1}"):
                one: dict[str, float] = {}
                for clients in CLIENTS:
                    for name, server in (("fake", shoal), ("bare", bare)):
                        before = server.cpu_s()
                        ran = wrk(server, 16, clients, arguments.seconds, expected=60000)
                        one[f"{name}, {clients} clients, us"] = (server.cpu_s() - before) / ran["requests"] * 1e6
                        one[f"{name}, {clients} clients, p50 ms"] = ran["p50"]
                    one[f"{clients} clients, ratio"] = (
                        one[f"fake, {clients} clients, us"] / one[f"bare, {clients} clients, us"]
                    )
                rounds.append(one)
    figures = medians(rounds)
    for name, value in figures.items():
        print(f"{name:32} {value:10.2f}")
    write("front", METHOD, {"medians": figures, "rounds": rounds})


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve_bare(int(sys.argv[4]), int(sys.argv[2]))
    else:
        main()
