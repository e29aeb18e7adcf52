"""`bench/sizing.py`: the plans of docs/scaling.md, the simulation that checks them, and the page itself."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "bench" / "sizing.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sizing", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sizing"] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module


sizing = load()
MEASURED: dict[str, Any] = sizing.load_results("scaling")
PLANS: dict[tuple[str, int, int], Any] = sizing.plans(MEASURED)
SIMULATED = MEASURED["simulated"]
INSTANT = sizing.Engine(0.0, 0.0, 1_000_000)


def cell(
    *,
    texts: int = 1,
    front: float = 100.0,
    model: float = 200.0,
    engine: Any = INSTANT,
    fronts: int = 1,
    count: int = 1,
) -> Any:
    return sizing.Cell(sizing.Costs(texts, front, model, 0), engine, fronts, count)


def test_line_through_two_batches() -> None:
    """Fixed and per-text time are those of the line through both batches."""
    assert sizing.line((1, 3.0), (11, 23.0)) == (1.0, 2.0)
    assert sizing.Engine(1.0, 2.0, 2).texts_per_s == 400.0


@pytest.mark.parametrize(
    ("front_us", "model_us", "wire_bytes", "engine_ms", "expected"),
    [
        (10_000, 10, 10, 0.001, "front loops"),
        (10, 1_000, 10, 0.001, "model process"),
        (10, 10, 10, 10, "engines"),
        (10, 10, 1_000_000, 0.001, "network"),
    ],
)
def test_next_limit(front_us: float, model_us: float, wire_bytes: int, engine_ms: float, expected: str) -> None:
    """The part with the least room is the next limit."""
    costs = sizing.Costs(1, front_us, model_us, wire_bytes)
    assert sizing.plan(costs, sizing.Engine(0.0, engine_ms, 1, 1), 50).limits[0][0] == expected


def test_plan_of_a_model_process_that_limits() -> None:
    """600 requests/s of 1 ms are one model process at its bound; one more needs a second machine."""
    costs = sizing.Costs(1, 100, 1_000, 1_000)
    engine = sizing.Engine(0.0, 0.1, 1, 1)
    assert sizing.plan(costs, engine, 600).machines == 1
    assert sizing.plan(costs, engine, 601).machines == 2


def test_plan_divides_the_cores() -> None:
    """Fronts and engines share the cores that the model process leaves."""
    found = sizing.plan(sizing.Costs(1, 1_000, 1, 1), sizing.Engine(0.0, 4.0, 1), 3 * 0.6 * 1_000)
    assert (found.machines, found.cell.fronts, found.cell.engines) == (1, 3, 12)


def test_balancers_of_a_large_plan() -> None:
    """Traffic beyond a balancer's link needs several, and is the next limit."""
    found = sizing.plan(sizing.Costs(1, 10, 10, 10_000), sizing.Engine(0.0, 0.001, 1, 1), 1_500_000)
    assert found.gbit == pytest.approx(120)
    assert found.balancers == 2
    assert found.limits[0] == ("one balancer", pytest.approx(1.2))


def test_connections_grow_with_fronts() -> None:
    """One front takes any number; more fronts need more connections each."""
    assert sizing.connections(1) == 1
    assert 0 < sizing.connections(10) < sizing.connections(1_000)


@pytest.mark.parametrize("key", PLANS)
def test_plans_hold_their_bound(key: tuple[str, int, int]) -> None:
    """Every plan carries its target with no part of a machine above the bound, on the cores there are."""
    made = PLANS[key]
    assert made.machines * made.load == pytest.approx(key[2])
    assert all(use <= sizing.BOUND + 1e-9 for name, use in made.limits if name != "one balancer")
    assert made.gbit / sizing.BALANCER_GBIT <= sizing.BOUND * made.balancers or made.machines == 1
    if key[0] == "CPU":
        assert made.cell.fronts + 1 + made.cell.engines <= sizing.CORES


def test_unloaded_latency_is_the_sum_of_the_parts() -> None:
    """A lone request waits for nothing."""
    lone = cell(engine=sizing.Engine(1.0, 0.5, 8))
    assert sizing.simulate(lone, count=10).p50_ms == pytest.approx(0.1 + 0.2 + 1.5)


def test_long_request_takes_several_batches() -> None:
    """32 texts are four batches of eight, in turn on one engine and side by side on four."""
    engine = sizing.Engine(1.0, 0.5, 8)
    one, four = (cell(texts=32, engine=engine, count=count) for count in (1, 4))
    assert sizing.simulate(one, count=10).p50_ms == pytest.approx(0.3 + 4 * 5)
    assert sizing.simulate(four, count=10).p50_ms == pytest.approx(0.3 + 5)


def test_closed_loop_reaches_the_busiest_part() -> None:
    """With many clients and fronts, the model process is the limit and is never idle."""
    ran = sizing.simulate(cell(fronts=4), clients=128)
    assert ran.per_s == pytest.approx(5_000, rel=0.05)
    assert ran.model > 0.95
    assert ran.per_s * 100e-6 / 4 <= ran.front < 0.5


def test_open_loop_carries_what_is_offered() -> None:
    """Below every ceiling, utilizations are rate times cost, and the same seed gives the same run."""
    once, again = (sizing.simulate(cell(), rate=2_000, count=8_000, seed=4) for _ in range(2))
    assert once == again
    assert once.per_s == pytest.approx(2_000, rel=0.05)
    assert once.front == pytest.approx(0.2, rel=0.05)
    assert once.model == pytest.approx(0.4, rel=0.05)


def test_breaking_rate_is_below_the_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stricter latency bound holds only at less load."""
    small = cell()
    usual = sizing.breaking_rate(small, 1_000)
    monkeypatch.setattr(sizing, "LIMIT", 2.0)
    assert 0 < sizing.breaking_rate(small, 1_000) < usual <= 5_000


@pytest.mark.parametrize("fronts", [1, 2, 4, 8])
def test_measured_rates_are_reproduced(fronts: int) -> None:
    """The simulation is within 25 % of the measured rates, in the results and when run."""
    found = SIMULATED["closed loop"][str(fronts)]
    rate = sizing.simulate(sizing.fake_cells()[fronts], clients=64).per_s
    assert found["simulated"] == pytest.approx(found["measured"], rel=0.25)
    assert rate == pytest.approx(found["simulated"], rel=0.05)


@pytest.mark.parametrize("key", PLANS)
def test_planned_cells_hold_their_latency(key: tuple[str, int, int]) -> None:
    """At its load, each planned machine's p99 is below the bound; the results are what the simulation gives."""
    made, found = PLANS[key], SIMULATED["planned"][", ".join(map(str, key))]
    assert found["p99_ms"] < sizing.LIMIT * found["unloaded_ms"]
    assert found["breaks_at"] > made.load
    if key[2] == min(sizing.TARGETS):
        ran = sizing.simulate(made.cell, rate=made.load / key[1], clients=sizing.clients_of(made.cell))
        assert ran.p99_ms == pytest.approx(found["p99_ms"], abs=0.01)


def test_page_is_current() -> None:
    """The tables of docs/scaling.md are those of the results: `python bench/scaling.py --page` writes them."""
    page = sizing.PAGE.read_text()
    assert sizing.fill(page, MEASURED) == page
    costs = {fronts: made.costs for fronts, made in sizing.fake_cells().items()}
    rates = sizing.load_results("gpu")["minilm"]["16 tokens"]["figures"]
    for number in (
        f"({costs[1].front_us:.0f} us)",
        f"({costs[2].model_us:.0f} us)",
        f"({costs[2].front_us:.0f} us)",
        f"{rates['sentence-transformers f32']['texts_per_s']:,.0f}",
        *(f"{engine.texts_per_s:,.0f}" for (name, _), engine in sizing.measured_engines().items() if name == "GPU"),
    ):
        assert number in page, number


def test_page_without_a_table_is_refused() -> None:
    """A table that the page has no place for is an error, not left out."""
    with pytest.raises(ValueError, match="costs"):
        sizing.fill("nothing", MEASURED)
