"""Figures of timed answers, against values computed by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.bench.answers import Answer, compute_figures, compute_level


def answer(sent: float, *arrivals: float, counted: int | None = None, prompt: int | None = None) -> Answer:
    return Answer(sent, arrivals[-1], list(arrivals), counted, prompt)


def test_each_row_matches_its_name() -> None:
    """Two answers of three and of five tokens; a piece may hold several tokens."""
    answers = [answer(10.0, 10.1, 10.2, 10.4, counted=3, prompt=7), answer(20.0, 20.3, 20.5, counted=5, prompt=9)]
    level_result = compute_level(answers, concurrency=2, seconds=4.0, cpu_s=0.0008)
    rows = level_result.rows
    assert (rows["Time To First Token (ms)"].min, rows["Time To First Token (ms)"].max) == (100.0, 300.0)
    assert (rows["Inter Token Latency (ms)"].max, rows["Inter Token Latency (ms)"].min) == (150.0, 50.0)
    assert rows["Time Between Chunks (ms)"].avg == 166.667
    assert (rows["Request Latency (ms)"].min, rows["Request Latency (ms)"].max) == (400.0, 500.0)
    assert rows["Output Sequence Length (tokens)"].avg == 4.0
    assert rows["Input Sequence Length (tokens)"].avg == 8.0
    assert (level_result.output_tokens_per_s, level_result.requests_per_s) == (2.0, 0.5)
    assert level_result.server_cpu_us == 100.0
    assert level_result.tokens_by == "server"


def test_without_a_count_pieces_are_tokens() -> None:
    """The report says so."""
    level_result = compute_level([answer(0.0, 1.0, 2.0, 3.0)], concurrency=1, seconds=3.0)
    assert level_result.rows["Output Sequence Length (tokens)"].avg == 3
    assert (level_result.tokens_by, level_result.output_tokens_per_s) == ("chunks", 1.0)
    assert "Input Sequence Length (tokens)" not in level_result.rows


def test_an_unstreamed_answer_has_no_first_token() -> None:
    """Only latency and lengths are known."""
    level_result = compute_level([Answer(1.0, 3.0, token_count=10)], concurrency=1, seconds=2.0)
    assert set(level_result.rows) == {"Request Latency (ms)", "Output Sequence Length (tokens)"}
    assert level_result.output_tokens_per_s == 5.0


def test_failures_are_counted_only_by_reason() -> None:
    """Their times and tokens are not counted."""
    broken = Answer(0.0, 9.0, [1.0, 5.0], error="503: busy")
    level_result = compute_level([answer(0.0, 1.0), broken, broken], concurrency=1, seconds=2.0)
    assert level_result.errors == {"503: busy": 2}
    assert level_result.requests == 1
    assert level_result.rows["Request Latency (ms)"].max == 1000.0


def test_a_run_with_only_failures_has_no_rows() -> None:
    """Throughput is zero, without a division by zero."""
    level_result = compute_level([Answer(0.0, error="x")], concurrency=1, seconds=0.0, cpu_s=1.0)
    assert (
        level_result.rows,
        level_result.output_tokens_per_s,
        level_result.requests_per_s,
        level_result.server_cpu_us,
    ) == ({}, 0.0, 0.0, None)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_figures_are_ordered_and_measured(values: list[float]) -> None:
    """min <= p75 <= p90 <= p99 <= max, and every percentile is a measured value."""
    figures = compute_figures(values)
    assert figures is not None
    assert figures.min <= figures.p75 <= figures.p90 <= figures.p99 <= figures.max
    rounded = {round(value, 3) for value in values}
    assert {figures.p75, figures.p90, figures.p99} <= rounded
    assert figures.min - 1e-3 <= figures.avg <= figures.max + 1e-3


def test_without_values_there_are_no_figures() -> None:
    """No values are invented."""
    assert compute_figures([]) is None
