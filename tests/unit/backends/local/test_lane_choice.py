"""Where lone batches run, by measured times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.local import compile as compile_module
from shoal.backends.local.lane_choice import CLEAR, LaneChoice

SECONDS = st.floats(1e-4, 1.0)


def test_lone_batches_run_wide_until_measured() -> None:
    choice = LaneChoice()
    assert all(choice.is_wide(tokens) for tokens in (1, 8, 100, 512, 4096))


def test_a_length_decides_for_its_neighbors() -> None:
    """Short texts run narrow and long ones wide if that is what was measured."""
    choice = LaneChoice((16, 64, 256))
    choice.record(16, wide=[9.0, 2.0, 3.0], narrow=[9.0, 1.0, 4.0])
    assert [choice.is_wide(tokens) for tokens in (1, 8, 16, 31, 64, 100, 256, 4096)] == [False] * 4 + [True] * 4


@given(SECONDS, SECONDS)
def test_the_faster_lane_is_found_from_both_sides(wide: float, narrow: float) -> None:
    """If one is clearly faster, both a wide and a narrow start end there; else the choice stays."""
    for start in (True, False):
        choice = LaneChoice((16,))
        if not start:
            choice.record(16, wide=[1.0, 1.0], narrow=[1.0, 0.1])
        choice.record(16, wide=[5.0, wide], narrow=[5.0, narrow])
        clear = narrow < CLEAR * wide or wide < CLEAR * narrow
        assert choice.is_wide(16) == (wide < narrow if clear else start)


def test_the_first_run_is_ignored() -> None:
    """It compiles kernels."""
    choice = LaneChoice((16,))
    choice.record(16, wide=[1.0, 1.0], narrow=[0.1, 1.0])
    assert choice.is_wide(16)


def test_large_graphs_have_a_wide_lane_where_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wide lane's copy of the weights takes at most a sixteenth of the free memory, or 256 MB."""
    monkeypatch.setattr(compile_module, "available_bytes", lambda: 16 * 2**30)
    assert compile_module.fits_wide(2**30)
    assert not compile_module.fits_wide(2**30 + 1)
    monkeypatch.setattr(compile_module, "available_bytes", lambda: 0)
    assert compile_module.fits_wide(256 * 2**20)
    assert not compile_module.fits_wide(256 * 2**20 + 1)
