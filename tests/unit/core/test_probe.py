"""A replica's probe: who may join its peers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from shoal.core.probe import TEXTS, Probed, least_cosine, probe
from shoal.core.protocols import Counted, EngineFacts, Prepared, Tensors
from shoal.errors import ConfigError, EngineFailed, NotFinite, ShoalError, TooLong
from shoal.types import Array, Embed, TextItem


class Scripted:
    """Pipeline and engine in one: row i of the answer is row i of `rows`."""

    def __init__(self, rows: Array, *, most: int = 64) -> None:
        self.rows = rows
        self.facts = EngineFacts(name="probed", inputs=("at",), outputs=("row",), max_batch_size=most)
        self.sizes: list[int] = []
        self.refuse: ShoalError | None = None
        self.bad: ShoalError | None = None
        self.counted = False
        self.params: list[Mapping[str, Any]] = []

    def check(self, task: Embed) -> None: ...

    def estimate(self, item: TextItem) -> int:
        return 1

    def prepare(self, items: Sequence[tuple[Embed, TextItem]]) -> list[Prepared | ShoalError]:
        assert [text for _, text in items] == list(TEXTS)
        assert not any(task.normalize for task, _ in items), "the rows are judged as the model gives them"
        answers: list[Prepared | ShoalError] = [
            Prepared(
                {"at": np.array([at])}, cost=1, group=(), outputs=("row",), tokens=1, params={"input_type": "passage"}
            )
            for at in range(len(items))
        ]
        if self.refuse is not None:
            answers[1] = self.refuse
        return answers

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        return {"at": np.stack([item.tensors["at"] for item in batch])}

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        self.sizes.append(len(inputs["at"]))
        self.params.append(params)
        return {"row": self.rows[inputs["at"][:, 0]]}

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> list[Array | ShoalError | Counted]:
        if self.bad is not None:
            return [self.bad] * len(batch)
        rows = list(outputs["row"])
        return [Counted(row, 3) for row in rows] if self.counted else rows[: len(rows)]

    def ready(self) -> bool:
        return False

    async def aclose(self) -> None: ...


def soon() -> float:
    return time.monotonic() + 5


ROWS = np.array([[3, 4, 0], [0, 1, 2], [1, 1, 1], [2, 0, 1]], dtype=np.float32)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("most", [1, 3, 64])
async def test_rows_come_as_the_model_gives_them(most: int, counted: bool) -> None:
    """In batches that the replica takes, with the parameters that the pipeline asks for; it need not be ready."""
    model = Scripted(ROWS, most=most)
    model.counted = counted
    probed = await probe(model, model, soon())
    assert np.array_equal(probed.vectors, ROWS)
    assert (probed.dimension, probed.unit) == (3, False)
    assert max(model.sizes) <= most
    assert model.params[0] == {"input_type": "passage"}


def test_unit_rows_are_known() -> None:
    units = ROWS / np.linalg.norm(ROWS, axis=1, keepdims=True)
    assert Probed(units).unit
    assert Probed(units.astype(np.float16).astype(np.float32)).unit
    assert not Probed(np.vstack([units[:3], [[2.0, 0, 0]]]).astype(np.float32)).unit


async def test_what_fails_is_raised() -> None:
    """An item's error of either side, and an answer of too few rows."""
    model = Scripted(ROWS)
    model.refuse = TooLong("one text is too long")
    with pytest.raises(TooLong):
        await probe(model, model, soon())
    model.refuse, model.bad = None, NotFinite("NaN")
    with pytest.raises(NotFinite):
        await probe(model, model, soon())

    class Short(Scripted):
        def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> list[Array | ShoalError | Counted]:
            return list(outputs["row"])[1:]

    short = Short(ROWS)
    with pytest.raises(EngineFailed, match="3 rows for 4 inputs"):
        await probe(short, short, soon())


def test_peers_agree_within_precision() -> None:
    """Scale is no matter, a half-precision copy passes; another direction, dimension or nothing at all does not."""
    one = Probed(ROWS)
    one.check(Probed(ROWS * 2), "b")
    one.check(Probed((ROWS + np.float32(0.01)).astype(np.float16).astype(np.float32)), "b")
    with pytest.raises(ConfigError, match="2 dimensions and its peers 3"):
        one.check(Probed(ROWS[:, :2]), "b")
    with pytest.raises(ConfigError, match=r"b does not give the vectors of its peers \(cosine 0\."):
        one.check(Probed(ROWS[:, ::-1].copy()), "b")
    with pytest.raises(ConfigError, match="cosine nan"):
        one.check(Probed(np.zeros_like(ROWS)), "b")


def test_least_cosine_is_the_worst_row() -> None:
    other = ROWS.copy()
    other[2] = -other[2]
    assert least_cosine(ROWS, other) == pytest.approx(-1.0)
