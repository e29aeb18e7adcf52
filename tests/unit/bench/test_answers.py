"""Figures of timed answers, against numbers worked out by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.bench.answers import Answer, compute_figures, compute_level


def answer(sent: float, *arrivals: float, counted: int | None = None, prompt: int | None = None) -> Answer:
    return Answer(sent, arrivals[-1], list(arrivals), counted, prompt)


def test_each_row_matches_its_name() -> None:
    """Two answers of three and of five tokens; a piece may hold several tokens."""
    answers = [answer(10.0, 10.1, 10.2, 10.4, counted=3, prompt=7), answer(20.0, 20.3, 20.5, counted=5, prompt=9)]
    found = compute_level(answers, concurrency=2, seconds=4.0, cpu_s=0.0008)
    rows = found.rows
    assert (rows["Time To First Token (ms)"].min, rows["Time To First Token (ms)"].max) == (100.0, 300.0)
    assert (rows["Inter Token Latency (ms)"].max, rows["Inter Token Latency (ms)"].min) == (150.0, 50.0)
    assert rows["Time Between Chunks (ms)"].avg == 166.667
    assert (rows["Request Latency (ms)"].min, rows["Request Latency (ms)"].max) == (400.0, 500.0)
    assert rows["Output Sequence Length (tokens)"].avg == 4.0
    assert rows["Input Sequence Length (tokens)"].avg == 8.0
    assert (found.output_tokens_per_s, found.requests_per_s) == (2.0, 0.5)
    assert found.server_cpu_us == 100.0
    assert found.tokens_by == "server"


def test_without_a_count_pieces_are_tokens() -> None:
    """And the report says so."""
    found = compute_level([answer(0.0, 1.0, 2.0, 3.0)], concurrency=1, seconds=3.0)
    assert found.rows["Output Sequence Length (tokens)"].avg == 3
    assert (found.tokens_by, found.output_tokens_per_s) == ("chunks", 1.0)
    assert "Input Sequence Length (tokens)" not in found.rows


def test_an_answer_that_came_whole_has_no_first_token() -> None:
    """Latency and lengths are all that can be told of it."""
    found = compute_level([Answer(1.0, 3.0, token_count=10)], concurrency=1, seconds=2.0)
    assert set(found.rows) == {"Request Latency (ms)", "Output Sequence Length (tokens)"}
    assert found.output_tokens_per_s == 5.0


def test_failures_are_counted_by_their_reason_and_nothing_else() -> None:
    """Their time and their tokens are no figures."""
    broken = Answer(0.0, 9.0, [1.0, 5.0], error="503: busy")
    found = compute_level([answer(0.0, 1.0), broken, broken], concurrency=1, seconds=2.0)
    assert found.errors == {"503: busy": 2}
    assert found.requests == 1
    assert found.rows["Request Latency (ms)"].max == 1000.0


def test_a_run_of_nothing_but_failures_has_no_rows() -> None:
    """Throughput is zero, not a division by it."""
    found = compute_level([Answer(0.0, error="x")], concurrency=1, seconds=0.0, cpu_s=1.0)
    assert (found.rows, found.output_tokens_per_s, found.requests_per_s, found.server_cpu_us) == ({}, 0.0, 0.0, None)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_figures_are_ordered_and_measured(values: list[float]) -> None:
    """min <= p75 <= p90 <= p99 <= max, percentiles are values that occurred."""
    found = compute_figures(values)
    assert found is not None
    assert found.min <= found.p75 <= found.p90 <= found.p99 <= found.max
    rounded = {round(value, 3) for value in values}
    assert {found.p75, found.p90, found.p99} <= rounded
    assert found.min - 1e-3 <= found.avg <= found.max + 1e-3


def test_no_values_no_figures() -> None:
    """Nothing is made up."""
    assert compute_figures([]) is None
