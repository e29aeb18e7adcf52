"""Embedding servers on the same model, and sentence-transformers in process."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import Server, check_lengths, phase, stored
from versus_st import SentenceTransformers

from shoal.bench.texts import Bodies, Texts

from .contenders import Field, PeerServer, Turns, measure_load, post, read_vector, threads
from .environments import Unavailable
from .figures import CPU, P50, RATE, Figures, cosine
from .processes import tree_cpu_s
from .table import PEERS

LENGTHS = (16, 100)
CLIENTS = (1, 16, 64)
PATH = "/v1/embeddings"
MOST_PER_S = {16: 5000.0, 100: 2500.0}
"""Texts a second at most on this number of cores: so many bodies are made ready."""

SHOAL, DEFAULT = "Shoal f32", "Shoal"
REFERENCE = "sentence-transformers"
PATIENT = {"max_queue_ms": 0, "embed_timeout_s": 600}
"""Peers let 64 clients wait however slow the machine is; by default Shoal refuses what would wait for over a second."""

SAME_MODEL = 0.999
"""Least cosine between a peer's vectors and Shoal's."""

Measure = Callable[[list[str], int, float], Figures]


def measure_server(server: Server, texts: list[str], clients: int, seconds: float) -> Figures:
    """Single texts from so many clients."""
    bodies = Bodies("openai", server.model, "float", "")
    return measure_load(server, PATH, (bodies.body([text]) for text in texts), clients, seconds)


def measure_encode(peer: SentenceTransformers, texts: list[str], clients: int, seconds: float) -> Figures:
    """`encode` of so many texts at a time, as if the clients had been put together at no cost."""
    before = tree_cpu_s(peer.process.pid)
    ran = peer.encode_for(seconds, texts, each=clients)
    spent = tree_cpu_s(peer.process.pid) - before
    return {RATE: ran["texts"] / ran["seconds"], P50: ran["p50_ms"], CPU: spent / ran["texts"] * 1e6}


def contest(field: Field, arguments: Any) -> dict[str, Any]:
    with ExitStack() as stack:
        measures = start(field, stack, arguments)
        results: dict[str, Any] = {}
        for tokens in LENGTHS:
            turns = Turns(f"{tokens} tokens", field, measures, (SHOAL, DEFAULT))
            for clients in CLIENTS:
                with phase(f"{tokens} tokens, {clients} clients"):
                    run_rounds(turns, tokens, clients, arguments)
            measures = turns.contenders
            comparisons = {"Shoal in f32 over the peer": SHOAL, "Shoal by default over the peer": DEFAULT}
            results[f"engines, {tokens} tokens"] = turns.report(
                "text", comparisons, {"p50, ms": turns.rounds.table(P50)}
            )
    return results


def run_rounds(turns: Turns[Measure], tokens: int, clients: int, arguments: Any) -> None:
    """A round to warm up, then those that count: everyone in turn, with the same texts, new in each round."""
    most = MOST_PER_S[tokens] * max(1.0, threads() / 2)

    def fresh(seconds: float) -> Callable[[str, Measure], Figures]:
        texts = Texts(tokens, seed=random.getrandbits(48)).take(int(most * (seconds + 1)))
        return lambda _, measure: measure(texts, clients, seconds)

    turns.once(fresh(arguments.seconds))
    for number in range(arguments.rounds):
        turns.play(clients, fresh(arguments.seconds), number)


def start(field: Field, stack: ExitStack, arguments: Any) -> dict[str, Measure]:
    servers: dict[str, Server] = {}
    with phase("Shoal, twice"):
        servers[DEFAULT] = stack.enter_context(Server(arguments.model, **PATIENT))
        servers[SHOAL] = stack.enter_context(Server(arguments.model, precision="f32", **PATIENT))
        for server in servers.values():
            server.settle()
    entry = stored(arguments.model)
    check_lengths(entry.tokenizer, LENGTHS)
    own = next(path.parent for path in entry.path.rglob("modules.json"))
    peers = field.chosen(PEERS, "engines")
    onnx = field.export_onnx(own) if peers else ""
    servers |= compare_models(field, servers[SHOAL], field.start(stack, peers, model=str(own), onnx=onnx))
    measures: dict[str, Measure] = {name: over_http(server) for name, server in servers.items()}
    if field.wants(REFERENCE):
        measures |= start_reference(field, stack, arguments.python, own)
    return measures


def over_http(server: Server) -> Measure:
    return lambda texts, clients, seconds: measure_server(server, texts, clients, seconds)


def compare_models(field: Field, shoal: Server, servers: dict[str, PeerServer]) -> dict[str, Server]:
    """The peers whose vectors of some texts are those of Shoal; others run another model."""
    same: dict[str, Server] = {}
    texts = Texts(LENGTHS[0], seed=11).take(3)
    for name, server in servers.items():
        try:
            worst = min(cosine(ask(shoal, text), ask(server, text)) for text in texts)
            if worst < SAME_MODEL:
                raise Unavailable(f"its vectors are not Shoal's: cosine {worst:.4f}")
            same[name] = server
        except (Unavailable, ValueError) as error:
            field.note(name, f"not measured: {error}")
    return same


def ask(server: Server, text: str) -> list[float]:
    return read_vector(post(server, PATH, Bodies("openai", server.model, "float", "").body([text])))


def start_reference(field: Field, stack: ExitStack, python: str, model: Path) -> dict[str, Measure]:
    if not Path(python).exists():
        field.note(REFERENCE, f"not measured: {python} does not exist")
        return {}
    with phase(REFERENCE):
        peer = SentenceTransformers(python, model)
    stack.callback(peer.close)
    field.states[REFERENCE] = "measured"
    field.installed[REFERENCE] = peer.facts["versions"]
    return {REFERENCE: lambda texts, clients, seconds: measure_encode(peer, texts, clients, seconds)}
