"""Timed answers of a language model, and the figures of many of them.

The rows and their meaning are those of GenAI-Perf, so that its published results can be laid beside them: latency and
time to first token count from when a request was sent; the inter-token latency of an answer is the time from its first
to its last token over its tokens but one; throughput is over the whole run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from shoal.bench.stats import percentile


@dataclass(slots=True)
class Answer:
    """One request. Times are seconds of one clock; `arrivals`: when each piece of text came, empty where the answer
    came whole. `token_count`, `prompt_tokens`: as the server says. `error`: why it is no answer."""

    sent_at: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    token_count: int | None = None
    prompt_tokens: int | None = None
    error: str = ""

    @property
    def tokens(self) -> int:
        """As the server counted, else its pieces."""
        return len(self.arrivals) if self.token_count is None else self.token_count


class Figures(msgspec.Struct, frozen=True):
    """How one measure is spread over the requests of a run."""

    avg: float
    min: float
    max: float
    p99: float
    p90: float
    p75: float


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one concurrency. `rows` by their names in GenAI-Perf; beside those "Time Between Chunks (ms)": every
    wait for the next piece of text, which tells stalls that an average over an answer hides. `tokens_by`: who counted
    the tokens. `server_cpu_us`: processor time of the server for one output token."""

    concurrency: int
    requests: int
    seconds: float
    rows: dict[str, Figures]
    output_tokens_per_s: float
    requests_per_s: float
    errors: dict[str, int]
    tokens_by: str
    server_cpu_us: float | None = None


def compute_figures(values: Iterable[float]) -> Figures | None:
    """None when nothing was measured. Percentiles are values that were measured, never between two."""
    ordered = sorted(values)
    if not ordered:
        return None
    p99, p90, p75 = (round(percentile(ordered, q), 3) for q in (0.99, 0.9, 0.75))
    avg = round(sum(ordered) / len(ordered), 3)
    return Figures(avg, round(ordered[0], 3), round(ordered[-1], 3), p99, p90, p75)


def compute_level(answers: Sequence[Answer], *, concurrency: int, seconds: float, cpu_s: float | None = None) -> Level:
    """The figures of a run that lasted `seconds`; answers that failed count as errors alone."""
    good = [one for one in answers if not one.error]
    tokens = sum(one.tokens for one in good)
    measured = {
        "Time To First Token (ms)": compute_figures(
            (one.arrivals[0] - one.sent_at) * 1e3 for one in good if one.arrivals
        ),
        "Inter Token Latency (ms)": compute_figures(_mean_token_gaps(good)),
        "Time Between Chunks (ms)": compute_figures((b - a) * 1e3 for one in good for a, b in pairwise(one.arrivals)),
        "Request Latency (ms)": compute_figures((one.ended - one.sent_at) * 1e3 for one in good),
        "Output Sequence Length (tokens)": compute_figures(one.tokens for one in good),
        "Input Sequence Length (tokens)": compute_figures(
            one.prompt_tokens for one in good if one.prompt_tokens is not None
        ),
    }
    return Level(
        concurrency=concurrency,
        requests=len(good),
        seconds=round(seconds, 3),
        rows={name: found for name, found in measured.items() if found is not None},
        output_tokens_per_s=round(tokens / seconds, 2) if seconds else 0.0,
        requests_per_s=round(len(good) / seconds, 3) if seconds else 0.0,
        errors=dict(Counter(one.error for one in answers if one.error)),
        tokens_by="server" if good and all(one.token_count is not None for one in good) else "chunks",
        server_cpu_us=round(cpu_s / tokens * 1e6, 2) if cpu_s is not None and tokens else None,
    )


def _mean_token_gaps(answers: Iterable[Answer]) -> Iterable[float]:
    for one in answers:
        if one.tokens > 1 and len(one.arrivals) > 1:
            yield (one.arrivals[-1] - one.arrivals[0]) / (one.tokens - 1) * 1e3
