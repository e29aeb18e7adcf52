"""What the front costs before an OpenAI-compatible server: processor time of a chat and of a streamed token."""

from __future__ import annotations

import json
from collections.abc import Iterator

from harness import HERE, Server, medians, parser, phase, write, wrk_lines
from openai_stub import CHAT_PATH, TOKENS

METHOD = """
`shoal serve openai+http://...` with default settings before bench/openai_stub.py, which answers each chat with a
constant of 64 words: whole, or as a stream of 64 chunks, each written by itself, at once or 2 ms apart, as a model
would. Load comes from wrk on the same cores, every question distinct. Processor time of Shoal's whole process, in
microseconds: of a request that is not streamed, and of a token of one that is, its share of the request included. Each
in turn in every round; medians over rounds.
"""
CLIENTS = (1, 16)


class Stub(Server):
    """The server behind."""

    program = (str(HERE / "openai_stub.py"),)


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
                        ran = wrk_lines(shoal, CHAT_PATH, lines, clients, arguments.seconds)
                        spent = shoal.cpu_s() - before
                        one[f"{name}, {clients} clients, us"] = spent / ran["requests"] / each * 1e6
                rounds.append(one)
    figures = medians(rounds)
    for name, value in figures.items():
        print(f"{name:40} {value:10.2f}")
    write("front_chat", METHOD, {"medians": figures, "rounds": rounds})


if __name__ == "__main__":
    main()
