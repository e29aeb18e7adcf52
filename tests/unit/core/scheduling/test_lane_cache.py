"""A lane with a cache: cached answers skip the engine and are otherwise the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shoal.backends.fake.model import (
    MAX_TOKENS,
    FakeEngine,
    FakePipeline,
    FakeScript,
    compute_scores,
    compute_vector,
    tokenize_item,
)
from shoal.core.cache import MemoryCache
from shoal.core.protocols import CountedRow, Prepared, Row, Tensors
from shoal.core.scheduling.lane import Lane, LaneOptions
from shoal.core.scheduling.planner import Limits
from shoal.errors import EngineFailed, InputRejected, InvalidValue, NotFinite, ShoalError
from shoal.types import Embed, Rerank
from tests.unit.core.conftest import Run, gathered, until
from tests.unit.core.lanes import Inline, context, embed, engine, right
from tests.unit.core.scheduling.test_lane import idle

SLOW = FakeScript(delay_ms=20)


def cached_lane(script: FakeScript = SLOW, *, pipeline: FakePipeline | None = None, mb: int = 1) -> Lane:
    options = LaneOptions(model="m", limits=Limits(), space="s", cache=MemoryCache(mb << 20))
    loop = asyncio.get_running_loop()
    return Lane(pipeline or FakePipeline(script), [FakeEngine(script)], options, threads=Inline(), clock=loop.time)


def computed(lane: Lane) -> list[int]:
    """Return the item count of each engine call."""
    return [size for size, _ in engine(lane).batches]


def test_a_hit_skips_the_engine(virtual: Run[None]) -> None:
    """A hit returns the same vector, tokens and space at once, and its facts say that no batch ran."""

    async def main() -> None:
        lane = cached_lane()
        first = await lane.run(embed("one two three"), context())
        assert (first.facts.cached, first.facts.batches) == (0, 1)
        start = asyncio.get_running_loop().time()
        again = await lane.run(embed("one two three"), context(client="other"))
        assert asyncio.get_running_loop().time() == start
        assert right(again, ["one two three"])
        assert (again.tokens, again.space, again.truncated) == (first.tokens, "s", 0)
        assert (again.facts.cached, again.facts.batches, again.facts.size, again.facts.infer_ms) == (1, 0, 0, 0.0)
        assert computed(lane) == [1]
        assert idle(lane)

    virtual(main)


def test_hits_and_misses_of_one_request_keep_their_order(virtual: Run[None]) -> None:
    """With every other text cached, rows, tokens and usage are the same as without a cache."""

    async def main() -> None:
        lane = cached_lane()
        texts = [f"w{number} " * (1 + number % 5) for number in range(20)]
        await lane.run(embed(*texts[::2]), context())
        answer = await lane.run(embed(*texts), context())
        assert right(answer, texts)
        assert answer.tokens == [1 + number % 5 for number in range(20)]
        assert (answer.facts.cached, sum(computed(lane))) == (10, 20)
        assert answer.facts.batches == 1
        assert idle(lane)

    virtual(main)


def test_other_options_are_another_row(virtual: Run[None]) -> None:
    """Truncated or normalized vectors are separate entries."""

    async def main() -> None:
        lane = cached_lane()
        await lane.run(embed("a b"), context())
        cut = await lane.run(embed("a b", dimensions=4), context())
        unit = await lane.run(embed("a b", normalize=True), context())
        assert cut.vectors.tolist() == [compute_vector(tokenize_item("a b"), 32)[:4].tolist()]
        assert np.linalg.norm(unit.vectors) == pytest.approx(1.0)
        assert computed(lane) == [1, 1, 1]
        again = await lane.run(embed("a b", dimensions=4), context())
        assert (again.vectors.tolist(), again.facts.cached) == (cut.vectors.tolist(), 1)

    virtual(main)


def test_identical_items_are_cached_once(virtual: Run[None]) -> None:
    """Identical items in flight are computed once; later ones are hits."""

    async def main() -> None:
        lane = cached_lane()
        first, second = await asyncio.gather(
            lane.run(embed("same", "same", "own"), context(client="a")), lane.run(embed("same"), context(client="b"))
        )
        assert right(first, ["same", "same", "own"])
        assert right(second, ["same"])
        later = await lane.run(embed("same", "own", "same"), context(client="c"))
        assert right(later, ["same", "own", "same"])
        assert (later.facts.cached, sum(computed(lane))) == (3, 2)
        assert idle(lane)

    virtual(main)


def test_truncated_hits_count_as_truncated(virtual: Run[None]) -> None:
    """`truncated` and usage belong to the request, whether its rows are computed or cached."""

    async def main() -> None:
        lane = cached_lane()
        long = "w " * (MAX_TOKENS + 5)
        first = await lane.run(embed(long, "short"), context())
        again = await lane.run(embed(long, "short", long), context())
        assert (first.truncated, again.truncated) == (1, 2)
        assert again.tokens == [*first.tokens, first.tokens[0]]
        assert again.facts.cached == 3

    virtual(main)


def test_a_cancelled_request_leaves_the_rows_that_came(virtual: Run[None]) -> None:
    """A request that waits for a miss can be cancelled; a row that was computed for no caller is not cached."""

    async def main() -> None:
        lane = cached_lane()
        await lane.run(embed("known"), context())
        goes = asyncio.create_task(lane.run(embed("known", "new"), context()))
        await until(lambda: bool(engine(lane).running))
        goes.cancel()
        (outcome,) = await gathered(goes)
        assert isinstance(outcome, asyncio.CancelledError)
        await until(lambda: idle(lane))
        assert engine(lane).cancelled == 1
        answer = await lane.run(embed("known", "new"), context())
        assert right(answer, ["known", "new"])
        assert answer.facts.cached == 1

    virtual(main)


def test_a_request_of_hits_leaves_the_preparer(virtual: Run[None]) -> None:
    """A request with far more hits than the prepare-ahead limit ends and leaves no state."""

    async def main() -> None:
        lane = cached_lane(FakeScript(), mb=64)
        texts = [f"t{number}" for number in range(2048)]
        await lane.run(embed(*texts), context())
        before = len(computed(lane))
        answer = await lane.run(embed(*texts), context())
        assert right(answer, texts)
        assert (answer.facts.cached, len(computed(lane))) == (2048, before)
        assert idle(lane)

    virtual(main)


@pytest.mark.parametrize(
    ("word", "kind"), [("nan-item", NotFinite), ("poison-item", EngineFailed), ("reject-item", InputRejected)]
)
def test_failures_are_not_cached(virtual: Run[None], word: str, kind: type[ShoalError]) -> None:
    """A failing input is retried each time; the other rows are cached."""

    async def main() -> None:
        lane = cached_lane(FakeScript())
        outcomes = await gathered(lane.run(embed(word), context()), lane.run(embed("good"), context(client="b")))
        assert isinstance(outcomes[0], kind)
        before = len(computed(lane))
        with pytest.raises(kind):
            await lane.run(embed(word), context())
        assert len(computed(lane)) > before
        assert (await lane.run(embed("good"), context())).facts.cached == 1
        assert idle(lane)

    virtual(main)


def test_an_error_before_the_engine_is_no_row(virtual: Run[None]) -> None:
    """An unreadable input fails its request, whatever other inputs are cached."""

    async def main() -> None:
        lane = cached_lane()
        await lane.run(embed("known"), context())
        for _ in range(2):
            with pytest.raises(InvalidValue, match="input 1"):
                await lane.run(embed("known", [2**31]), context())
        assert idle(lane)

    virtual(main)


class _Counting(FakePipeline):
    """A model whose answer says the token count: twice the estimate."""

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> Any:
        return [
            row if isinstance(row, ShoalError) else CountedRow(row, 2 * item.tokens)
            for row, item in zip(super().finish(outputs, batch), batch, strict=True)
        ]


def test_token_counts_of_the_model_are_cached(virtual: Run[None]) -> None:
    """The usage of a hit is the count of the answer, not the estimate."""

    async def main() -> None:
        lane = cached_lane(pipeline=_Counting(SLOW))
        first = await lane.run(embed("a b c"), context())
        again = await lane.run(embed("a b c"), context())
        assert first.tokens == again.tokens == [6]

    virtual(main)


class _Keyless(FakePipeline):
    def prepare(self, items: Any) -> Any:
        return [
            each
            if isinstance(each, ShoalError)
            else Prepared(each.tensors, each.cost, (), each.outputs, 1, extra=each.extra)
            for each in super().prepare(items)
        ]


def test_an_item_without_a_key_is_computed_each_time(virtual: Run[None]) -> None:
    """An item that callers may not share is not cached either."""

    async def main() -> None:
        lane = cached_lane(pipeline=_Keyless(SLOW))
        for _ in range(2):
            assert right(await lane.run(embed("same"), context()), ["same"])
        assert computed(lane) == [1, 1]
        assert lane.options.cache is not None
        assert isinstance(lane.options.cache, MemoryCache)
        assert len(lane.options.cache) == 0

    virtual(main)


def test_every_kind_of_vector_comes_from_the_cache(virtual: Run[None]) -> None:
    """Sets of vectors are built from hits and misses as from misses alone."""

    async def main() -> None:
        script = FakeScript(vectors="dense+sparse+multi+tokens")
        lane, plain = cached_lane(script), cached_lane(script)
        task = Embed(model="m", inputs=["a b", "c", "a a"], outputs=("dense", "sparse", "multi", "tokens"))
        half = Embed(model="m", inputs=["c"], outputs=task.outputs)
        await lane.run(half, context())
        mixed, fresh = await lane.run(task, context()), await plain.run(task, context())
        assert mixed.facts.cached == 1
        assert np.array_equal(mixed.vectors, fresh.vectors)
        for one, other in zip(mixed.sparse, fresh.sparse, strict=True):
            assert np.array_equal(one.indices, other.indices)
            assert np.array_equal(one.values, other.values)
        for name in ("token_vectors", "multi_vectors"):
            for left, right_ in zip(getattr(mixed, name), getattr(fresh, name), strict=True):
                assert np.array_equal(left, right_)

    virtual(main)


def test_scores_come_from_the_cache(virtual: Run[None]) -> None:
    """Scored pairs are cached, raw and normalized scores separately."""

    async def main() -> None:
        lane = cached_lane(FakeScript(labels=1))
        task = Rerank(model="m", queries=["q"], documents=["x", "y"])
        first = await lane.run(task, context())
        again = await lane.run(Rerank(model="m", queries=["q"], documents=["y", "x", "z"]), context())
        assert again.facts.cached == 2
        assert again.scores[:2, 0].tolist() == first.scores[::-1, 0].tolist()
        raw = await lane.run(Rerank(model="m", queries=["q"], documents=["x"], raw_scores=True), context())
        assert raw.facts.cached == 0
        assert raw.scores[0].tolist() == compute_scores(tokenize_item(("q", "x")), 1, raw=True).tolist()

    virtual(main)


def test_an_answer_cannot_be_changed_under_the_cache(virtual: Run[None]) -> None:
    """A caller that writes into its answer changes no other answer."""

    async def main() -> None:
        lane = cached_lane()
        first = await lane.run(embed("a"), context())
        first.vectors[:] = 0.0
        hit = await lane.run(embed("a"), context())
        assert right(hit, ["a"])
        with pytest.raises(ValueError, match="read-only"):
            hit.vectors[:] = 0.0
        both = await lane.run(embed("a", "a"), context())
        both.vectors[:] = 0.0
        assert right(await lane.run(embed("a"), context()), ["a"])

    virtual(main)


def test_a_full_cache_only_costs_time(virtual: Run[None]) -> None:
    """With a cache of a few rows the answers stay correct, whatever was evicted."""

    async def main() -> None:
        lane = cached_lane()
        cache = MemoryCache(2000)
        lane.options = LaneOptions(model="m", space="s", cache=cache)
        rows: list[Row] = []
        for number in range(50):
            answer = await lane.run(embed(f"t{number % 7}"), context())
            assert right(answer, [f"t{number % 7}"])
            rows.append(answer.vectors[0])
        assert cache.counts().evicted > 30
        assert cache.size <= 2000

    virtual(main)
