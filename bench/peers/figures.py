"""Figures of rounds as tables: ratios first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TypeVar

Figures = dict[str, float]
Row = TypeVar("Row")

RATE, CPU, P50 = "per_s", "cpu_us", "p50_ms"


def label(clients: int) -> str:
    return f"{clients} client{'s' if clients > 1 else ''}"


def turned(contenders: Mapping[str, Row], turn: int) -> Iterator[tuple[str, Row]]:
    """All contenders, another one first in each round."""
    order = list(contenders.items())
    shift = turn % len(order) if order else 0
    yield from order[shift:] + order[:shift]


class Rounds:
    """Figures by contender, number of clients and round."""

    def __init__(self) -> None:
        self._rounds: dict[str, dict[str, list[Figures]]] = {}

    def add(self, name: str, clients: int, figures: Figures) -> None:
        self._rounds.setdefault(name, {}).setdefault(label(clients), []).append(figures)

    def drop(self, name: str) -> None:
        """Forget a contender that failed."""
        self._rounds.pop(name, None)

    @property
    def names(self) -> list[str]:
        return list(self._rounds)

    def table(self, figure: str, leave_out: Sequence[str] = ()) -> dict[str, Figures]:
        """Medians of one figure: contender -> clients -> median."""
        return {
            name: {clients: round(median(one[figure] for one in ran), 3) for clients, ran in columns.items()}
            for name, columns in self._rounds.items()
            if name not in leave_out
        }

    def ratios(self, mine: str, peers: Sequence[str]) -> dict[str, Figures]:
        """`mine` against each peer: rate over rate, then processor time of a request, theirs over mine.

        Each is the median over rounds of the ratio within a round, so that a slow minute counts for both. Above 1,
        `mine` is ahead in both.
        """
        return {
            name: {
                f"{word}, {clients}": compare(self._rounds[mine][clients], ran, figure)
                for word, figure in (("rate", RATE), ("processor time", CPU))
                for clients, ran in self._rounds[name].items()
            }
            for name in peers
            if name in self._rounds
        }

    def added(self, base: str, clients: int = 1) -> Figures:
        """Milliseconds of the median request over those of `base`, the median over rounds."""
        column = label(clients)
        bases = self._rounds[base][column]
        return {
            name: round(median(one[P50] - other[P50] for one, other in zip(columns[column], bases, strict=True)), 3)
            for name, columns in self._rounds.items()
            if name != base
        }

    def raw(self) -> dict[str, dict[str, list[Figures]]]:
        return self._rounds


def compare(mine: Sequence[Figures], theirs: Sequence[Figures], figure: str) -> float:
    """The median ratio of one figure, in the direction in which more is better for `mine`."""
    pairs = [(one[figure], other[figure]) for one, other in zip(mine, theirs, strict=True)]
    if figure != RATE:
        pairs = [(other, one) for one, other in pairs]
    return round(median(top / bottom if bottom else math.inf for top, bottom in pairs), 2)


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    """Raises ValueError when the lengths differ."""
    dot = sum(one * other for one, other in zip(left, right, strict=True))
    return dot / (math.hypot(*left) * math.hypot(*right))
