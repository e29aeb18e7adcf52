"""How many fronts, model processes, engines and machines a rate needs, from measured costs: pure functions, a small
simulation that checks them, and the tables of docs/scaling.md. `bench/scaling.py` measures and calls this."""

from __future__ import annotations

import heapq
import json
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, inf, log
from pathlib import Path
from random import Random
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"

BOUND = 0.6
"""Planned utilization of the busiest part."""
CORES = 16
LINK_GBIT = 10.0
BALANCER_GBIT = 100.0
"""Assumptions about a machine and a load balancer; nothing else here is assumed."""
LIMIT = 10.0
"""A planned cell's p99 must be below so many times its unloaded latency."""

KEY = "engines | texts a request | texts/s"
LINK = "10 Gbit/s, base64"
TARGETS = (1_000, 100_000, 10_000_000)


@dataclass(frozen=True)
class Costs:
    """Of one request: texts, processor time in us, and bytes in both directions."""

    texts: int
    front_us: float
    model_us: float
    wire_bytes: int


@dataclass(frozen=True)
class Engine:
    """A batch of n texts takes `fixed_ms + n * text_ms`. `count` of a machine; 0: one on each core left over."""

    fixed_ms: float
    text_ms: float
    batch: int
    count: int = 0

    @property
    def texts_per_s(self) -> float:
        took = self.fixed_ms + self.text_ms * self.batch
        return self.batch / took * 1e3 if took else inf


@dataclass(frozen=True)
class Cell:
    """One Shoal: fronts, one model process, engines."""

    costs: Costs
    engine: Engine
    fronts: int
    engines: int

    def ceilings(self) -> dict[str, float]:
        """Texts a second at which each part would be fully used."""
        costs = self.costs
        return {
            "front loops": self.fronts * costs.texts / costs.front_us * 1e6,
            "model process": costs.texts / costs.model_us * 1e6 if costs.model_us else inf,
            "engines": self.engines * self.engine.texts_per_s,
            "network": LINK_GBIT * 1e9 / 8 / costs.wire_bytes * costs.texts if costs.wire_bytes else inf,
        }


@dataclass(frozen=True)
class Plan:
    cell: Cell
    machines: int
    load: float
    """Texts a second of one machine."""
    gbit: float
    """Of all machines, both directions."""
    balancers: int
    limits: tuple[tuple[str, float], ...]
    """Each part and its utilization at this load, the busiest first: the next limits. `one balancer` may be above 1."""

    @property
    def fronts(self) -> int:
        return self.cell.fronts * self.machines

    @property
    def engines(self) -> int:
        return self.cell.engines * self.machines


def line(first: tuple[int, float], second: tuple[int, float]) -> tuple[float, float]:
    """`fixed_ms, text_ms` of the line through two batches of (texts, ms)."""
    text_ms = (second[1] - first[1]) / (second[0] - first[0])
    return first[1] - first[0] * text_ms, text_ms


def largest_cell(costs: Costs, engine: Engine) -> Cell:
    """The division of a machine's cores that serves most, with the fewest fronts."""
    cells = (Cell(costs, engine, fronts, engine.count or CORES - 1 - fronts) for fronts in range(1, CORES - 1))
    return max(cells, key=lambda cell: (min(cell.ceilings().values()), -cell.fronts))


def plan(costs: Costs, engine: Engine, target: float) -> Plan:
    """The fewest machines for `target` texts a second with no part above BOUND, and on each the fewest processes."""
    machines = ceil(target / (BOUND * min(largest_cell(costs, engine).ceilings().values())))
    load = target / machines
    fronts = ceil(load / costs.texts * costs.front_us / 1e6 / BOUND)
    engines = ceil(load / engine.texts_per_s / BOUND)
    cell = Cell(costs, engine, fronts, engines)
    use = {name: load / ceiling for name, ceiling in cell.ceilings().items()}
    gbit = target / costs.texts * costs.wire_bytes * 8 / 1e9
    balancers = ceil(gbit / BALANCER_GBIT / BOUND) if machines > 1 else 0
    if balancers:
        use["one balancer"] = gbit / BALANCER_GBIT
    limits = sorted(use.items(), key=lambda item: -item[1])
    return Plan(cell, machines, load, gbit, balancers, tuple(limits))


def connections(fronts: int, highest: float = 0.9) -> int:
    """Connections a front so that the fullest of `fronts`, filled at random, stays below `highest` while the mean is at
    BOUND: a Poisson count exceeds its mean n by sqrt(2 n ln(fronts))."""
    return ceil(2 * log(fronts) / (highest / BOUND - 1) ** 2) if fronts > 1 else 1


@dataclass(frozen=True)
class Simulated:
    per_s: float
    p50_ms: float
    p99_ms: float
    front: float
    model: float
    engine: float
    """Utilizations; `front` is that of the fullest one."""


class _Run:
    """One simulated cell. Event loops work in turns: they take all that has arrived, and what goes to another process
    leaves at the end of the turn in one write, as Shoal's do. Half of a loop's time goes to the request, half to the
    answer."""

    def __init__(self, cell: Cell, rate: float, clients: int, seed: int) -> None:
        self.cell, self.rate, self.random = cell, rate, Random(seed)
        self.pins = [self.random.randrange(cell.fronts) for _ in range(clients)]
        self.halves = [cell.costs.front_us / 2e6] * cell.fronts + [cell.costs.model_us / 2e6]
        self.queues: list[list[tuple[int, bool]]] = [[] for _ in self.halves]
        self.running = [False] * len(self.halves)
        self.busy = [0.0] * len(self.halves)
        self.waiting: deque[list[int]] = deque()
        self.queued, self.free, self.engine_busy = 0, cell.engines, 0.0
        self.events: list[tuple[float, int, str, Any]] = []
        self.order = 0
        self.client: list[int] = []
        self.arrived: list[float] = []
        self.left: list[int] = []
        self.latencies: list[float] = []

    def at(self, when: float, kind: str, what: Any) -> None:
        self.order += 1
        heapq.heappush(self.events, (when, self.order, kind, what))

    def run(self, count: int) -> Simulated:
        for client in range(1 if self.rate else len(self.pins)):
            self.at(0.0, "arrive", client)
        now = 0.0
        while len(self.latencies) < count:
            now, _, kind, what = heapq.heappop(self.events)
            getattr(self, kind)(now, what)
        ordered = sorted(self.latencies[count // 10 :])
        return Simulated(
            count / now,
            ordered[len(ordered) // 2] * 1e3,
            ordered[len(ordered) * 99 // 100] * 1e3,
            max(self.busy[:-1]) / now,
            self.busy[-1] / now,
            self.engine_busy / now / self.cell.engines,
        )

    def arrive(self, now: float, client: int) -> None:
        if self.rate:
            self.at(now + self.random.expovariate(self.rate), "arrive", self.random.randrange(len(self.pins)))
        self.client.append(client)
        self.arrived.append(now)
        self.left.append(self.cell.costs.texts)
        self.give(now, self.pins[client], [(len(self.client) - 1, False)])

    def give(self, now: float, loop: int, entries: list[tuple[int, bool]]) -> None:
        self.queues[loop] += entries
        if self.running[loop] or not self.queues[loop]:
            return
        taken, self.queues[loop] = self.queues[loop], []
        half = self.halves[loop]
        self.running[loop] = True
        self.busy[loop] += half * len(taken)
        for number, (request, is_answer) in enumerate(taken, 1):
            if is_answer and loop < self.cell.fronts:
                self.at(now + half * number, "answer", request)
        self.at(now + half * len(taken), "turn", (loop, taken))

    def answer(self, now: float, request: int) -> None:
        self.latencies.append(now - self.arrived[request])
        if not self.rate:
            self.at(now, "arrive", self.client[request])

    def turn(self, now: float, ended: tuple[int, list[tuple[int, bool]]]) -> None:
        loop, taken = ended
        self.running[loop] = False
        models = self.cell.fronts
        if loop < models:
            self.give(now, models, [(request, False) for request, is_answer in taken if not is_answer])
        else:
            for request, is_answer in taken:
                if is_answer:
                    self.give(now, self.pins[self.client[request]], [(request, True)])
                else:
                    self.waiting.append([request, self.left[request]])
                    self.queued += self.left[request]
            self.start_batches(now)
        self.give(now, loop, [])

    def start_batches(self, now: float) -> None:
        engine = self.cell.engine
        while self.free and self.queued:
            room = size = min(engine.batch, ceil(self.queued / self.free))
            parts: list[tuple[int, int]] = []
            while room:
                head = self.waiting[0]
                part = min(room, head[1])
                parts.append((head[0], part))
                head[1] -= part
                room -= part
                if not head[1]:
                    self.waiting.popleft()
            self.queued -= size
            self.free -= 1
            took = (engine.fixed_ms + engine.text_ms * size) / 1e3
            self.at(now + took, "batch", (took, parts))

    def batch(self, now: float, ended: tuple[float, list[tuple[int, int]]]) -> None:
        took, parts = ended
        self.engine_busy += took
        self.free += 1
        done = []
        for request, part in parts:
            self.left[request] -= part
            if not self.left[request]:
                done.append((request, True))
        self.give(now, self.cell.fronts, done)
        self.start_batches(now)


def simulate(cell: Cell, *, rate: float = 0.0, clients: int = 1, count: int = 4000, seed: int = 1) -> Simulated:
    """`count` requests of `clients` connections, each pinned to a front at random: Poisson arrivals of `rate` requests
    a second, or a closed loop without a rate."""
    return _Run(cell, rate, clients, seed).run(count)


def unloaded_ms(cell: Cell) -> float:
    return simulate(cell, count=20).p50_ms


def breaking_rate(cell: Cell, count: int = 20_000) -> float:
    """Texts a second, in steps of 1 % of the cell's ceiling and at most that, up to which p99 stays within LIMIT of the
    unloaded latency."""
    bound, top = LIMIT * unloaded_ms(cell), min(cell.ceilings().values())
    low, high = 0, 101
    while high - low > 1:
        middle = (low + high) // 2
        ran = simulate(cell, rate=top * middle / 100 / cell.costs.texts, clients=clients_of(cell), count=count)
        low, high = (middle, high) if ran.p99_ms <= bound else (low, middle)
    return top * low / 100


def clients_of(cell: Cell) -> int:
    """Connections of a simulated cell: so many that their division over the fronts is not what is measured."""
    return 256 * cell.fronts


def load_results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    return found


def planned_costs(measured: dict[str, Any]) -> dict[int, Costs]:
    """By texts a request. Fronts tokenize, and the model process does nothing in the place of what `fake:` computes."""
    us, own = measured["us"], measured["text_us"]
    found = {}
    for texts in (1, 32):
        wire = measured["bytes"][f"{texts} x 16, base64"]
        front = us[f"{texts} x 16, front"] + texts * own["tokenizer, 16"]
        model = us[f"{texts} x 16, models"] - texts * own["fake, 16"]
        found[texts] = Costs(texts, front, model, wire["request"] + wire["answer"])
    return found


def measured_engines() -> dict[tuple[str, int], Engine]:
    """By name and texts a request; a CPU engine is one core."""
    cpu, gpu = load_results("throughput"), load_results("gpu")["minilm"]["16 tokens"]["figures"]
    streams, rate = cpu["engine"]["streams"], cpu["16 tokens"]["texts_per_s"]["engine"]
    core = Engine(*line((1, cpu["lone"]["16 tokens"]["engine_p50_ms"]), (32, 32 * streams / rate * 1e3)), 32)
    by_batch = {
        size: size / gpu[f"shoal {workers} workers, batches of {size}, 64 clients, 32 a request"]["texts_per_s"] * 1e3
        for size, workers in ((64, 4), (256, 8))
    }
    lists = Engine(*line((64, by_batch[64]), (256, by_batch[256])), 256, 1)
    single = gpu["shoal 4 workers, batches of 64, 256 clients, 1 a request"]["texts_per_s"]
    alone = replace(lists, fixed_ms=64 / single * 1e3 - 64 * lists.text_ms, batch=64)
    return {("CPU", 1): core, ("CPU", 32): core, ("GPU", 1): alone, ("GPU", 32): lists}


def plans(measured: dict[str, Any]) -> dict[tuple[str, int, int], Plan]:
    """By engine, texts a request, target."""
    costs = planned_costs(measured)
    return {
        (name, texts, target): plan(costs[texts], engine, target)
        for (name, texts), engine in measured_engines().items()
        for target in TARGETS
    }


def fake_cells() -> dict[int, Cell]:
    """The machine of workers.json, by fronts. One process: 1 / its rate. The model process: 1 / the rate of four
    fronts, which it limits. A front: the processor time of two fronts and the model process, less the latter's."""
    found = load_results("workers")["medians"]
    model = 1e6 / found["workers 4, 64 clients, requests/s"]
    front = found["workers 2, 64 clients, us"] - model
    instant = Engine(0.0, 0.0, 1_000_000)
    alone = Cell(Costs(1, 1e6 / found["workers 1, 64 clients, requests/s"], 0.0, 0), instant, 1, 1)
    return {1: alone} | {fronts: Cell(Costs(1, front, model, 0), instant, fronts, 1) for fronts in (2, 4, 8)}


def simulate_all(measured: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """The figures of the simulation that the page shows: `closed loop` against workers.json, `planned` cells."""
    found = load_results("workers")["medians"]
    closed = {}
    for fronts, cell in fake_cells().items():
        rates = [simulate(cell, clients=64, count=8000, seed=seed).per_s for seed in range(5)]
        was = found[f"workers {fronts}, 64 clients, requests/s"]
        closed[str(fronts)] = {"measured": was, "simulated": round(sum(rates) / len(rates), 1)}
    planned = {}
    for (name, texts, target), made in plans(measured).items():
        cell = made.cell
        ran = simulate(cell, rate=made.load / texts, clients=clients_of(cell))
        planned[f"{name}, {texts}, {target}"] = {
            "unloaded_ms": round(unloaded_ms(cell), 2),
            "p50_ms": round(ran.p50_ms, 2),
            "p99_ms": round(ran.p99_ms, 2),
            "front": round(ran.front, 2),
            "model process": round(ran.model, 2),
            "engine": round(ran.engine, 2),
            "breaks_at": round(breaking_rate(cell)),
        }
    return {"closed loop": closed, "planned": planned}


def update_page() -> None:
    PAGE.write_text(fill(PAGE.read_text(), load_results("scaling")))


def fill(page: str, measured: dict[str, Any]) -> str:
    """The page with its tables, each between `<!-- NAME -->` and `<!-- end -->`, made from the results."""
    for name, lines in tables(measured).items():
        page, found = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda at, lines=lines: at[1] + lines + at[2], page, flags=re.S
        )
        if found != 1:
            raise ValueError(f"the page has {found} places for the table {name!r}, not one")
    return page


def tables(measured: dict[str, Any]) -> dict[str, str]:
    return {
        "costs": cost_table(measured),
        "bytes": byte_table(measured),
        "ceilings": ceiling_table(measured),
        "plans": plan_table(measured),
        "simulated": simulated_table(measured),
        "closed loop": closed_loop_table(measured),
    }


def cost_table(measured: dict[str, Any]) -> str:
    costs, us, own, memory = planned_costs(measured), measured["us"], measured["text_us"], measured["memory_mb"]
    cpu, gpu = load_results("throughput"), load_results("gpu")["minilm"]
    cores, listed = cpu["engine"]["streams"], "shoal 8 workers, batches of 256, 64 clients, 32 a request"
    core = {tokens: cores * 1e6 / cpu[f"{tokens} tokens"]["texts_per_s"]["engine"] for tokens in (16, 100)}
    card = {tokens: 1e6 / gpu[f"{tokens} tokens"]["figures"][listed]["texts_per_s"] for tokens in (16, 100)}
    padded = cpu["100 tokens"]["padded_to"] - cpu["16 tokens"]["padded_to"]
    front = us["1 x 128, front"] - us["1 x 16, front"]
    planned = front + own["tokenizer, 128"] - own["tokenizer, 16"]
    model = us["1 x 128, models"] - us["1 x 16, models"] - own["fake, 128"] + own["fake, 16"]
    single = 1e6 / measured_engines()["GPU", 1].texts_per_s
    rows = [
        ("front, with `fake:`", us["1 x 16, front"], us["32 x 16, front"] / 32, front / 112, memory["front"]),
        ("front, planned", costs[1].front_us, costs[32].front_us / 32, planned / 112, ""),
        ("model process, with `fake:`", us["1 x 16, models"], us["32 x 16, models"] / 32, "", memory["model process"]),
        ("model process, planned", costs[1].model_us, costs[32].model_us / 32, model / 112, ""),
        ("CPU core, batches of 32", core[16], core[16], (core[100] - core[16]) / padded, ""),
        ("GPU", single, card[16], (card[100] - card[16]) / 84, ""),
    ]
    return table("tier | one text, us | a text of a list, us | a further token, us | memory, MB", rows)


def byte_table(measured: dict[str, Any]) -> str:
    rows = []
    for name, wire in measured["bytes"].items():
        texts = int(name.split()[0])
        gbit = (wire["request"] + wire["answer"]) / texts * 8 * TARGETS[-1] / 1e9
        rows.append((texts, name.split(", ")[1], wire["request"], wire["answer"], gbit))
    return table("texts a request | numbers | request, bytes | answer, bytes | Gbit/s at 10 M", rows)


def ceiling_table(measured: dict[str, Any]) -> str:
    costs, engines = planned_costs(measured), measured_engines()
    ceilings = {texts: Cell(costs[texts], engines["GPU", texts], 1, 1).ceilings() for texts in (1, 32)}
    rows: list[list[object]] = [
        [label, *(round(one[name]) for one in ceilings.values())]
        for label, name in (("one front", "front loops"), ("one model process", "model process"), (LINK, "network"))
    ]
    for name, label, plural in (("CPU", "one CPU core", "CPU cores"), ("GPU", "one GPU", "GPUs")):
        rates = {texts: engines[name, texts].texts_per_s for texts in (1, 32)}
        rows.append([label, *map(round, rates.values())])
        feeds = (ceilings[texts]["model process"] / rate for texts, rate in rates.items())
        rows.append([f"{plural} that a model process feeds", *feeds])
    return table("fully used | single texts | lists of 32", rows)


def plan_table(measured: dict[str, Any]) -> str:
    rows = []
    for key, made in plans(measured).items():
        limits = (f"{part} {use:.2f}" for part, use in made.limits[:2])
        counts = (made.machines, made.fronts, made.engines, made.gbit, made.balancers or "")
        rows.append((*key, *counts, *limits, connections(made.fronts)))
    limit = "Gbit/s | balancers | next limit | then | connections a front"
    return table(f"{KEY} | machines = model processes | fronts | engines | {limit}", rows)


def simulated_table(measured: dict[str, Any]) -> str:
    rows = []
    for key, made in plans(measured).items():
        ran = measured["simulated"]["planned"][", ".join(map(str, key))]
        times = (ran["unloaded_ms"], ran["p50_ms"], ran["p99_ms"], ran["p99_ms"] / ran["unloaded_ms"])
        processes = f"{made.cell.fronts}, {made.cell.engines}"
        uses = (ran["front"], ran["model process"], ran["engine"])
        rows.append((*key, round(made.load), processes, *times, *(f"{use:.2f}" for use in uses), ran["breaks_at"]))
    use = "fullest front | model process | engines | holds to, texts/s"
    latency = "unloaded, ms | p50, ms | p99, ms | p99 / unloaded"
    return table(f"{KEY} | of a machine | fronts, engines | {latency} | {use}", rows)


def closed_loop_table(measured: dict[str, Any]) -> str:
    rows = []
    for name, one in measured["simulated"]["closed loop"].items():
        was, rate = one["measured"], one["simulated"]
        rows.append((name, round(was), round(rate), f"{(rate / was - 1) * 100:+.0f} %"))
    return table("fronts | measured, requests/s | simulated | difference", rows)


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    lines = [f"| {head} |", "|---|" + "---:|" * head.count(" | ")]
    lines += ["| " + " | ".join(map(shown, row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def shown(value: object) -> str:
    """Three digits of a fraction, thousands of a whole number separated."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
