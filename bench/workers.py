"""What front processes cost and bring: `shoal serve --workers` beside one process, for a model that costs nothing."""

from __future__ import annotations

import os
import random
from typing import Any

from harness import Server, cpu_s, medians, parser, phase, write, wrk_lines, wrk_threads

from shoal.bench.texts import Bodies, Texts

METHOD = """
`shoal serve fake:dimension=384` with `--workers` 1, 2 and, where there are cores for them, 4 and 8, up to half of the
cores; default settings else. Load comes from wrk on the same cores, with a thread for every four of them, float answers
of 384 numbers, every text distinct, 16 tokens. Requests a second, p50, and processor time of all processes of the
server, in microseconds a request; each in turn in every round; medians over rounds. Where wrk and the server share two
cores, the processor time is the figure: a front more has no core to work on.
"""
CLIENTS = (1, 16, 64)
EXPECTED = {1: 8_000, 16: 60_000, 64: 60_000}
"""Requests a second for which there are bodies, by clients."""

ADDRESS = "fake:dimension=384"


class Workers(Server):
    """All processes of a server count: they are children of its supervisor."""

    def cpu_s(self) -> float:
        assert self.process is not None
        return sum(cpu_s(pid) for pid in (self.process.pid, *children(self.process.pid)))


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]


def main() -> None:
    arguments = parser(__doc__).parse_args()
    cores = len(os.sched_getaffinity(0))
    counts = [1, 2, *(count for count in (4, 8) if count <= cores // 2)]
    rounds: list[dict[str, float]] = []
    with Workers(ADDRESS, workers=1) as one:
        servers: dict[int, Server] = {1: one}
        figures = measure(servers, counts, rounds, arguments)
    write("workers", METHOD, {"medians": figures, "rounds": rounds})


def measure(servers: dict[int, Server], counts: list[int], rounds: list[dict[str, float]], arguments: Any) -> Any:
    if len(servers) < len(counts):
        count = counts[len(servers)]
        with Workers(ADDRESS, workers=count) as server:
            servers[count] = server
            return measure(servers, counts, rounds, arguments)
    for server in servers.values():
        load(server, 64, 2)
    for number in range(arguments.rounds):
        with phase(f"round {number + 1}"):
            one: dict[str, float] = {}
            for clients in CLIENTS:
                for count, server in servers.items():
                    before = server.cpu_s()
                    ran = load(server, clients, arguments.seconds)
                    name = f"workers {count}, {clients} clients"
                    one[f"{name}, us"] = (server.cpu_s() - before) / ran["requests"] * 1e6
                    one[f"{name}, p50 ms"] = ran["p50"]
                    one[f"{name}, requests/s"] = ran["per_s"]
            for count in counts[1:]:
                for clients in CLIENTS:
                    for unit in ("us", "requests/s"):
                        ratio = one[f"workers {count}, {clients} clients, {unit}"]
                        ratio /= one[f"workers 1, {clients} clients, {unit}"]
                        one[f"workers {count} of 1, {clients} clients, {unit}"] = ratio
            rounds.append(one)
    figures = medians(rounds)
    for name, value in figures.items():
        print(f"{name:44} {value:10.2f}")
    return figures


def load(server: Server, clients: int, seconds: float) -> dict[str, Any]:
    bodies = Bodies("openai", server.model, "float", "")
    texts = Texts(16, seed=random.getrandbits(48))
    lines = (bodies.body(texts.take(1)) for _ in range(int(EXPECTED[clients] * (seconds + 1))))
    return wrk_lines(server, "/v1/embeddings", lines, clients, seconds, threads=wrk_threads())


if __name__ == "__main__":
    main()
