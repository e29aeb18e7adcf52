"""Gateways before one OpenAI-compatible stub: embeddings, chats and streams."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from front_chat import Stub, questions
from harness import Server, phase
from openai_stub import CHAT_PATH, EMBEDDINGS_PATH

from shoal.bench.texts import Bodies, Texts

from .contenders import Field, Turns, host_and_port, measure_load, post, read_vector
from .environments import Unavailable
from .figures import RATE, Figures
from .table import OPERATIONS, PEERS, Operation

CLIENTS = (1, 16, 64)
DIRECT, SHOAL = "the stub alone", "Shoal"
TOKENS = 16
PATHS: dict[Operation, str] = {"embeddings": EMBEDDINGS_PATH, "chat": CHAT_PATH, "streams": CHAT_PATH}
MOST_PER_S: dict[Operation, int] = {"embeddings": 120_000, "chat": 120_000, "streams": 20_000}
"""Until the warm-up has told the rate of each: so many bodies are made ready."""


def bodies(operation: Operation, model: str, count: int, seed: int) -> Iterable[bytes]:
    """Requests of which no two are alike."""
    if operation == "embeddings":
        made = Bodies("openai", model, "float", "")
        return (made.body([text]) for text in Texts(TOKENS, seed).take(count))
    return questions(model, count, stream=operation == "streams")


def probe(server: Server, operation: Operation) -> None:
    """Raises Unavailable unless the server does this."""
    (body,) = bodies(operation, server.model, 1, 0)
    answer = post(server, PATHS[operation], body)
    if operation == "embeddings":
        read_vector(answer)
    elif b" word" not in answer or (operation == "streams" and b"[DONE]" not in answer):
        raise Unavailable(f"{operation}: {answer[-100:]!r}")


def contest(field: Field, arguments: Any) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        servers: dict[str, Server] = {DIRECT: stack.enter_context(Stub())}
        behind = host_and_port(servers[DIRECT].url)
        with phase("Shoal"):
            servers[SHOAL] = stack.enter_context(Server(f"openai+{servers[DIRECT].url}/v1"))
        servers |= field.start(stack, field.chosen(PEERS, "gateways"), **behind)
        for operation in OPERATIONS:
            able = {name: server for name, server in servers.items() if can(field, name, server, operation)}
            turns = Turns(operation, field, able, (DIRECT, SHOAL))
            run_rounds(turns, operation, arguments)
            results[f"gateways, {operation}"] = turns.report(
                "request", {"Shoal over the peer": SHOAL}, {"added p50 at 1 client, ms": turns.rounds.added(DIRECT)}
            )
    return results


def can(field: Field, name: str, server: Server, operation: Operation, tries: int = 20) -> bool:
    """Whether it answers; some take a while until they know the server behind, although they say they are ready."""
    reason = ""
    for _ in range(tries):
        try:
            probe(server, operation)
            return True
        except Unavailable as error:
            reason = str(error)
            time.sleep(0.5)
    field.qualify(name, f"no {operation}: {reason}")
    return False


def run_rounds(turns: Turns[Server], operation: Operation, arguments: Any) -> None:
    rates: dict[str, float] = {}

    def measure_for(clients: int, seconds: float) -> Callable[[str, Server], Figures]:
        def measure(name: str, server: Server) -> Figures:
            count = int(rates.get(name, MOST_PER_S[operation]) * (seconds + 1))
            lines = bodies(operation, server.model, count, random.getrandbits(48))
            return measure_load(server, PATHS[operation], lines, clients, seconds)

        return measure

    with phase(f"{operation}: warm-up"):
        found = turns.once(measure_for(16, 2.0))
    rates.update({name: figures[RATE] * 3 + 500 for name, figures in found.items()})
    for clients in CLIENTS:
        with phase(f"{operation}, {clients} clients"):
            for number in range(arguments.rounds):
                turns.play(clients, measure_for(clients, arguments.seconds), number)
