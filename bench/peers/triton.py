"""Gateways before one real Triton, with the model of bench/triton_grpc.py, where a peer's program is given."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from harness import Server, phase
from triton_kit import model_repository, open_options

from shoal.backends.triton.server import run_triton
from shoal.bench.texts import Bodies, Texts

from .contenders import Field, Turns, host_and_port, measure_load, post
from .environments import Unavailable
from .figures import P50, Figures
from .table import PEERS, Peer

CLIENTS = (1, 16, 64)
SHOAL, PATH, TOKENS, MOST_PER_S = "Shoal", "/v1/embedding", 16, 10_000


def contest(field: Field, arguments: Any) -> dict[str, Any]:
    peers = []
    for peer in field.chosen(PEERS, "triton"):
        try:
            field.locate(peer)
            peers.append(peer)
        except Unavailable as error:
            field.note(peer.name, f"not measured: {error}")
    return asyncio.run(run(field, peers, arguments)) if peers else {}


async def run(field: Field, peers: list[Peer], arguments: Any) -> dict[str, Any]:
    with model_repository() as repository:
        async with run_triton(open_options(repository, ["near_free"])) as server:
            return await asyncio.to_thread(measure_all, field, peers, server.url, arguments)


def measure_all(field: Field, peers: list[Peer], url: str, arguments: Any) -> dict[str, Any]:
    with ExitStack() as stack:
        address = f"near_free=triton://{url}#near_free"
        servers: dict[str, Server] = {}
        with phase("Shoal"):
            servers[SHOAL] = stack.enter_context(Server(address))
        servers |= field.start(stack, peers, **host_and_port(f"http://{url}"))
        for name in list(servers):
            try:
                post(servers[name], PATH, next(iter(bodies(servers[name], 1))))
            except Unavailable as error:
                field.note(name, f"not measured: {error}")
                del servers[name]
        turns = Turns("Triton", field, servers, (SHOAL,))
        for clients in CLIENTS:
            with phase(f"Triton, {clients} clients"):
                for number in range(-1, arguments.rounds):
                    run_round(turns, clients, number, arguments.seconds)
    found = turns.report("request", {"Shoal over the peer": SHOAL}, {"p50, ms": turns.rounds.table(P50)})
    return {"gateways, Triton": found}


def bodies(server: Server, count: int) -> Iterable[bytes]:
    made = Bodies("embedding", server.model, "float", "")
    return (made.body([text]) for text in Texts(TOKENS, random.getrandbits(48)).take(count))


def run_round(turns: Turns[Server], clients: int, number: int, seconds: float) -> None:
    """Round -1 warms up and does not count."""

    def measure(_: str, server: Server) -> Figures:
        return measure_load(server, PATH, bodies(server, int(MOST_PER_S * (seconds + 1))), clients, seconds)

    if number < 0:
        turns.once(measure)
    else:
        turns.play(clients, measure, number)
