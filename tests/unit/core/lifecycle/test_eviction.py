from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.lifecycle.eviction import LoadedModel, MemoryLimits, choose_evictions, find_expired

loaded_models = st.lists(
    st.builds(
        LoadedModel,
        name=st.integers().map(str),
        size=st.integers(0, 50),
        use=st.sampled_from(["idle", "busy", "leaving"]),
        last_used=st.floats(0, 100),
    ),
    max_size=6,
    unique_by=lambda each: each.name,
)
bounds = st.builds(MemoryLimits, models=st.integers(0, 5), bytes=st.sampled_from([0, 40, 100]))


def resident(
    name: str, use: Literal["idle", "busy", "leaving"] = "idle", last_used: float = 0, size: int = 1
) -> LoadedModel:
    return LoadedModel(name, size, use, last_used)


def test_a_model_that_fits_evicts_none() -> None:
    """Nothing is evicted without a limit, or below it."""
    there = [resident("a"), resident("b")]
    assert choose_evictions(there, 5, MemoryLimits()) is None
    assert choose_evictions(there, 5, MemoryLimits(models=3)) is None
    assert choose_evictions(there, 5, MemoryLimits(bytes=7)) is None


def test_the_least_recently_used_goes_and_no_more_than_needed() -> None:
    """The limit is by count and by bytes; busy models stay."""
    there = [resident("new", last_used=9), resident("busy", "busy", 0), resident("old", last_used=1)]
    assert choose_evictions(there, 1, MemoryLimits(models=3)) == ["old"]
    assert choose_evictions(there, 1, MemoryLimits(models=2)) == ["old", "new"]
    assert choose_evictions(there, 2, MemoryLimits(bytes=3)) == ["old", "new"]


def test_no_model_is_evicted_in_vain() -> None:
    """If evicting all idle models is not enough, or leaving models free enough, the load only waits."""
    there = [resident("idle"), resident("busy", "busy", size=9)]
    assert choose_evictions(there, 5, MemoryLimits(bytes=10)) == []
    assert choose_evictions([resident("idle"), resident("going", "leaving")], 1, MemoryLimits(models=2)) == []
    assert choose_evictions([resident("busy", "busy")], 1, MemoryLimits(models=1)) == []


@given(loaded_models, st.integers(0, 60), bounds)
def test_a_load_evicts_or_waits(there: list[LoadedModel], size: int, bound: MemoryLimits) -> None:
    """Evicted models were idle; without them and the leaving ones the model fits, and with one less it would not."""
    out = choose_evictions(there, size, bound)
    if out is None:
        assert bound.has_room(there, size)
        return
    assert not bound.has_room(there, size)
    assert {each.name: each.use for each in there if each.name in out} == dict.fromkeys(out, "idle")
    left = [each for each in there if each.use != "leaving" and each.name not in out]
    if out:
        assert bound.has_room(left, size)
        last = next(each for each in there if each.name == out[-1])
        assert not bound.has_room([*left, last], size)


def test_idle_models_expire_each_in_its_time() -> None:
    """The next check is at the next expiry; busy and leaving models are skipped."""
    there = [resident("a", last_used=0), resident("b", last_used=5), resident("c", "busy"), resident("d", "leaving")]
    assert find_expired(there, 9, 10) == ([], 1)
    assert find_expired(there, 10, 10) == (["a"], 5)
    assert find_expired(there, 15, 10) == (["a", "b"], None)
