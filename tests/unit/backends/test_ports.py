"""Inputs that fit a graph, and those that do not."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from shoal.backends._ports import NOT_FINITE, Port, checked, example, least_cosine, rows_of, score_difference
from shoal.errors import InputRejected
from shoal.specs import Activation, MultiSpec, SparseSpec, TextSpec
from shoal.types import Array

INT = np.dtype(np.int64)
PORTS = (Port("ids", INT, (None, None)), Port("mask", INT, (None, None)))


def batch(rows: int = 2, length: int = 3) -> dict[str, Array]:
    return {"ids": np.arange(rows * length).reshape(rows, length), "mask": np.ones((rows, length), dtype=np.int64)}


def test_fitting_arrays_are_not_copied() -> None:
    """What has the right type and layout goes to the engine as it is."""
    given = batch()
    feeds = checked(given, PORTS, 512)
    assert all(feeds[name] is given[name] for name in given)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_narrower_integers_are_widened(dtype: type[np.generic]) -> None:
    """Ids of a narrower integer type are the same ids."""
    given = batch() | {"ids": np.array([[1, 2, 3], [4, 5, 6]], dtype=dtype)}
    assert checked(given, PORTS, 512)["ids"].dtype == np.int64


def test_views_and_frozen_arrays_are_made_contiguous_and_writeable() -> None:
    """The engine shares the memory, so a strided or read-only array is copied first."""
    frozen = np.ones((2, 3), dtype=np.int64)
    frozen.flags.writeable = False
    feeds = checked({"ids": np.arange(12).reshape(2, 6)[:, ::2], "mask": frozen}, PORTS, 512)
    assert all(array.flags.c_contiguous and array.flags.writeable for array in feeds.values())
    assert feeds["ids"].tolist() == [[0, 2, 4], [6, 8, 10]]


@pytest.mark.parametrize(
    ("changed", "param", "words"),
    [
        ({"mask": None}, "mask", "is missing"),
        ({"extra": np.ones((2, 3), dtype=np.int64)}, "extra", "it takes ids, mask"),
        ({"ids": np.ones(3, dtype=np.int64)}, "ids", r"takes the shape \[any, any\], not \[3\]"),
        ({"ids": np.ones((0, 3), dtype=np.int64)}, "ids", "is empty"),
        ({"ids": np.ones((2, 3))}, "ids", "takes int64, not float64"),
        ({"ids": np.array([["a"]])}, "ids", "takes int64"),
        ({"ids": np.ones((1, 3), dtype=np.int64)}, None, "ids 1, mask 2"),
        ({"ids": np.ones((2, 4), dtype=np.int64)}, None, "ids 4, mask 3"),
    ],
)
def test_each_misfit_is_named(changed: dict[str, Array | None], param: str | None, words: str) -> None:
    """An input that cannot be run is refused by its name, with what the graph takes."""
    given = {name: array for name, array in (batch() | changed).items() if array is not None}
    with pytest.raises(InputRejected, match=words) as caught:
        checked(given, PORTS, 512)
    assert caught.value.param == param


def test_inputs_end_at_the_model_s_length() -> None:
    """The longest length passes; one token more is refused."""
    assert checked(batch(1, 3), PORTS, 3)["ids"].shape == (1, 3)
    with pytest.raises(InputRejected, match="at most 3 tokens"):
        checked(batch(1, 4), PORTS, 3)


def test_a_fixed_axis_must_match() -> None:
    """An axis that the graph fixes takes that size only."""
    port = Port("pixels", np.dtype(np.float32), (None, 3, 4))
    assert checked({"pixels": np.ones((5, 3, 4), dtype=np.float64)}, [port], 512)["pixels"].dtype == np.float32
    with pytest.raises(InputRejected, match=r"\[any, 3, 4\]"):
        checked({"pixels": np.ones((5, 1, 4), dtype=np.float32)}, [port], 512)


def test_examples_fit_their_ports() -> None:
    """What is made for timing passes the check that real inputs pass, fixed axes included."""
    ports = (*PORTS, Port("scale", np.dtype(np.float32), (None,)), Port("pixels", INT, (None, 3)))
    feeds = checked(example(ports, 4, 7), ports, 7)
    assert [array.shape for array in feeds.values()] == [(4, 7), (4, 7), (4,), (4, 3)]


def test_least_cosine_is_the_worst_row() -> None:
    """One bad row among good ones decides."""
    left = [np.eye(3), np.array([[1.0, 0.0]])]
    right = [np.eye(3) * 2, np.array([[1.0, 1.0]])]
    assert least_cosine(left, right) == pytest.approx(2**-0.5)
    assert least_cosine(left, left) == pytest.approx(1.0)


def test_rows_of_zeros_say_nothing() -> None:
    """Two of them agree; where there is nothing else, nothing was compared."""
    zero, one = np.zeros((1, 2)), np.ones((1, 2))
    assert least_cosine([zero, one], [zero, one]) == pytest.approx(1.0)
    assert least_cosine([zero], [zero]) == least_cosine([], []) == least_cosine([one[:0]], [one[:0]]) == 0.0


def test_late_interaction_alone_is_compared_by_its_tokens() -> None:
    """Those that are no padding; beside a dense vector that one counts, and weights of tokens never."""
    spec = TextSpec(tokenizer="t", inputs=("ids",), dimension=0, max_tokens=8, multi=MultiSpec(dimension=3))
    tokens = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    outputs: dict[str, Array] = {"multi_vectors": tokens, "token_weights": np.ones((2, 2)), "pooled": np.ones((2, 4))}
    feeds = {"attention_mask": np.array([[1, 0], [1, 1]])}
    late, _, _ = rows_of(outputs, feeds, spec)
    np.testing.assert_array_equal(late, [tokens[0, 0], tokens[1, 0], tokens[1, 1]])
    both = msgspec.structs.replace(spec, dimension=4, sparse=SparseSpec(output="token_weights", per="token"))
    (dense,) = rows_of(outputs, feeds, both)
    assert dense is outputs["pooled"]
    assert len(rows_of(outputs, feeds, None)) == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_rows_that_have_no_direction_never_agree(bad: float) -> None:
    """NaN, infinity and zero rows count as complete disagreement."""
    assert least_cosine([np.ones((1, 2))], [np.full((1, 2), bad)]) == 0.0


@pytest.mark.parametrize(
    ("activation", "left", "right", "difference"),
    [
        ("identity", [[0.0], [10.0]], [[0.1], [9.95]], 0.01),
        ("identity", [[0.2], [0.4]], [[0.2], [0.5]], 0.1),
        ("sigmoid", [[0.0], [-20.0]], [[0.4], [-20.0]], 1 / (1 + np.exp(-0.4)) - 0.5),
        ("sigmoid", [[20.0], [-20.0]], [[21.0], [-20.0]], 1 / 40),
        ("softmax", [[0.0, 0.0]], [[np.log(3.0), 0.0]], np.log(3.0)),
        ("softmax", [[0.0, 50.0], [50.0, 50.0]], [[0.0, 50.0], [50.0 + np.log(3.0), 50.0]], 0.25),
        ("softmax", [[1000.0, -1000.0]], [[1000.0, -1000.0]], 0.0),
    ],
)
def test_scores_differ_by_their_range_or_by_what_users_see(
    activation: Activation, left: list[list[float]], right: list[list[float]], difference: float
) -> None:
    """Saturated scores hide what raw ones and orders would show, so that logits count as well."""
    a, b = ([np.array([row], np.float32) for row in rows] for rows in (left, right))
    assert score_difference(a, b, activation) == pytest.approx(difference, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("activation", ["identity", "sigmoid", "softmax"])
def test_scores_that_are_not_finite_are_beyond_any_bound(activation: Activation, bad: float) -> None:
    """On either side, and as a number that JSON has."""
    fine, broken = [np.ones((1, 2), np.float32)], [np.full((1, 2), bad, np.float32)]
    assert score_difference(fine, broken, activation) == score_difference(broken, fine, activation) == NOT_FINITE
