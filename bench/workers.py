"""What front processes cost and bring: `shoal serve --workers` beside one process, for a model that costs nothing."""

from __future__ import annotations

import os
from typing import Any

from harness import Server, cpu_s, medians, parser, phase, write, wrk

METHOD = """
`shoal serve fake:dimension=384` with `--workers` 1, 2 and, where there are more cores, up to a quarter of them, default
settings else. Load comes from wrk on the same cores, float answers of 384 numbers, every text distinct, 16 tokens.
Requests a second, p50, and processor time of all processes of the server, in microseconds a request; each in turn in
every round; medians over rounds. Where wrk and the server share two cores, the processor time is the figure: a front
more has no core to work on.
"""
CLIENTS = (1, 16, 64)
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
        wrk(server, 16, 64, 2, expected=60000)
    for number in range(arguments.rounds):
        with phase(f"round {number + 1}"):
            one: dict[str, float] = {}
            for clients in CLIENTS:
                for count, server in servers.items():
                    before = server.cpu_s()
                    ran = wrk(server, 16, clients, arguments.seconds, expected=60000)
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


if __name__ == "__main__":
    main()
