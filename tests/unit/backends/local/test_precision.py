"""The comparison figures of 16-bit precisions, and the bounds that `auto` applies."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from shoal.backends.local.precision import (
    MAX_COMPARE_COST,
    MAX_FIGURES,
    MIN_FIGURES,
    MIN_NEIGHBOR_ROWS,
    MIN_SAMPLES,
    NOT_FINITE,
    PrecisionCheck,
    compare,
    compare_scores,
    compare_vectors,
    limit_samples,
    to_comparable_rows,
)
from shoal.specs import Activation, MultiSpec, ScoreSpec, SparseSpec, TextSpec
from shoal.types import Array

SPEC = TextSpec(tokenizer="t", inputs=("ids",), dimension=4, max_tokens=8)
SOUND = {"mean_cosine": 0.99999, "low_cosine": 0.9999, "spearman": 0.9999, "neighbors": 0.99}


def vectors(rows: int = 300, width: int = 64) -> Array:
    """Return random directions around a common one, like embeddings."""
    random = np.random.default_rng(1)
    found: Array = random.standard_normal((rows, width)) + 0.5 * random.standard_normal(width)
    return found


def moved(exact: Array, by: float) -> Array:
    """Return the rows moved by a fraction of their length."""
    noise = np.random.default_rng(2).standard_normal(exact.shape)
    lengths = np.linalg.norm(exact, axis=-1) / np.linalg.norm(noise, axis=-1)
    found: Array = exact + by * noise * lengths[:, np.newaxis]
    return found


class TestChoice:
    def test_one_odd_text_decides_nothing(self) -> None:
        """A single short text with a far lower cosine does not change the choice."""
        exact = vectors()
        fast = moved(exact, 0.003)
        fast[7] = moved(exact, 0.2)[7]
        found = PrecisionCheck("", figures=compare_vectors([exact], [fast]))
        assert found.agrees
        assert found.figures["mean_cosine"] > 0.9998

    @pytest.mark.parametrize(("by", "agrees"), [(0.002, True), (0.01, True), (0.07, False), (0.3, False)])
    def test_how_far_vectors_may_move(self, by: float, agrees: bool) -> None:
        """The bounds are where order and neighbors begin to change, far from the measured models."""
        exact = vectors()
        assert PrecisionCheck("", figures=compare_vectors([exact], [moved(exact, by)])).agrees is agrees

    @pytest.mark.parametrize("name", MIN_FIGURES)
    def test_every_figure_of_vectors_counts(self, name: str) -> None:
        """Any single failed figure selects f32, and comes first in the reason, with its bound."""
        assert PrecisionCheck("", figures={**SOUND, name: MIN_FIGURES[name]}).agrees
        found = PrecisionCheck("", figures={**SOUND, name: MIN_FIGURES[name] - 1e-6})
        assert not found.agrees
        words = name.replace("_", " ")
        assert found.reason.startswith(
            f"bf16 compared with f32: {words} {MIN_FIGURES[name] - 1e-6:.6f} < {MIN_FIGURES[name]:g}, "
        )

    @pytest.mark.parametrize("name", MAX_FIGURES)
    def test_every_figure_of_scores_counts(self, name: str) -> None:
        sound = {"mean_difference": 0.0001, "high_difference": 0.001, "spearman": 0.9999}
        assert PrecisionCheck("", figures={**sound, name: MAX_FIGURES[name]}).agrees
        found = PrecisionCheck("", "fp16", {**sound, name: MAX_FIGURES[name] * 1.01})
        assert not found.agrees
        assert found.reason.startswith("fp16 compared with f32: ")
        assert f"> {MAX_FIGURES[name]:g}" in found.reason

    @pytest.mark.parametrize("figures", [{}, {**SOUND, "mean_cosine": float("nan")}])
    def test_nothing_compared_is_no_reason(self, figures: dict[str, float]) -> None:
        assert not PrecisionCheck("", figures=figures).agrees


class TestVectors:
    def test_order_and_neighbors_are_of_pairs(self) -> None:
        """Shuffling close vectors keeps their cosine, but not their order."""
        exact = vectors() * 0.001
        exact[:, 0] += 1.0
        mixed = exact[::-1].copy()
        found = compare_vectors([exact], [mixed])
        assert found["mean_cosine"] > MIN_FIGURES["mean_cosine"]
        assert found["spearman"] < 0.5
        assert found["neighbors"] < 0.5

    def test_few_rows_have_no_count_of_neighbors(self) -> None:
        """Neighbors are not counted for few rows: one tie among eight images would be a quarter."""
        exact = vectors(MIN_NEIGHBOR_ROWS)
        assert "neighbors" in compare_vectors([exact], [exact])
        assert "neighbors" not in compare_vectors([exact[1:]], [exact[1:]])

    def test_rows_of_zeros_say_nothing(self) -> None:
        """Two rows of zeros agree; without any other row there are no figures."""
        zero, one = np.zeros((1, 2)), np.ones((1, 2))
        assert compare_vectors([zero, one], [zero, one])["mean_cosine"] == pytest.approx(1.0)
        assert compare_vectors([zero], [zero]) == compare_vectors([], []) == {}

    @pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
    def test_rows_that_have_no_direction_never_agree(self, bad: float) -> None:
        """NaN, infinity, or zeros on only one side give zero for all figures."""
        exact = vectors()
        fast = exact.copy()
        fast[3] = bad
        assert compare_vectors([exact], [fast]) == dict.fromkeys(MIN_FIGURES, 0.0)

    def test_the_worst_output_counts(self) -> None:
        """Each figure is that of the output with the worst value."""
        exact = vectors(40, 4)
        fine, bad = {"a": exact, "b": exact}, {"a": exact, "b": moved(exact, 0.2)}
        assert compare([fine], [bad], SPEC) == compare_vectors([exact], [bad["b"]])

    def test_weights_of_tokens_are_not_compared_with_one_another(self) -> None:
        """Token weights are padded to one width but not ranked: positions of different texts are not comparable."""
        spec = msgspec.structs.replace(SPEC, sparse=SparseSpec(output="w", per="token"))
        batches = [{"w": np.ones((2, 3))}, {"w": np.ones((2, 5))}]
        assert compare(batches, batches, spec) == pytest.approx({"mean_cosine": 1.0, "low_cosine": 1.0})


@pytest.mark.parametrize(
    ("activation", "left", "right", "difference"),
    [
        ("identity", [[0.0], [10.0]], [[0.1], [10.1]], 0.01),
        ("identity", [[0.2], [0.4]], [[0.3], [0.5]], 0.1),
        ("sigmoid", [[20.0], [-20.0]], [[21.0], [-19.0]], 1 / 40),
        ("softmax", [[0.0, 0.0]], [[np.log(3.0), 0.0]], (np.log(3.0) + 0.25) / 2),
        ("softmax", [[1000.0, -1000.0]], [[1000.0, -1000.0]], 0.0),
    ],
)
def test_scores_differ_by_their_range_or_by_what_users_see(
    activation: Activation, left: list[list[float]], right: list[list[float]], difference: float
) -> None:
    """Saturated scores hide differences, so logits are compared as well."""
    a, b = ([np.array([row], np.float32) for row in rows] for rows in (left, right))
    assert compare_scores(a, b, activation)["mean_difference"] == pytest.approx(difference, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("activation", ["identity", "sigmoid", "softmax"])
def test_scores_that_are_not_finite_are_beyond_any_bound(activation: Activation, bad: float) -> None:
    """A non-finite score on either side gives NOT_FINITE, which JSON can represent."""
    fine, broken = [np.ones((1, 2), np.float32)], [np.full((1, 2), bad, np.float32)]
    for found in (compare_scores(fine, broken, activation), compare_scores(broken, fine, activation)):
        assert found == dict.fromkeys(MAX_FIGURES, NOT_FINITE)
        assert not PrecisionCheck("", figures=found).agrees


def test_scores_keep_their_order() -> None:
    """Small changes of nearly equal logits lower the rank correlation."""
    exact = np.linspace(0.0, 0.001, 300)[:, None]
    exact[0], exact[-1] = -1.0, 1.0
    fast = exact + np.random.default_rng(3).normal(0, 0.001, exact.shape)
    spec = msgspec.structs.replace(SPEC, dimension=0, score=ScoreSpec(labels=("a",), activation="sigmoid"))
    found = compare([{"logits": exact}], [{"logits": fast}], spec)
    assert found["high_difference"] < MAX_FIGURES["high_difference"]
    assert found["spearman"] < MIN_FIGURES["spearman"]


def test_padding_is_not_judged() -> None:
    """Padding is left out of multi-vectors, token weights of padding are zero, and pooled tokens are not compared."""
    spec = msgspec.structs.replace(
        SPEC, multi=MultiSpec(dimension=3), sparse=SparseSpec(output="token_weights", per="token")
    )
    tokens = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    outputs: dict[str, Array] = {"multi_vectors": tokens, "token_weights": np.ones((2, 2)), "pooled": np.ones((2, 4))}
    found = to_comparable_rows(
        {**outputs, "token_embeddings": tokens}, {"attention_mask": np.array([[1, 0], [1, 1]])}, spec
    )
    assert found.keys() == outputs.keys()
    np.testing.assert_array_equal(found["multi_vectors"], [tokens[0, 0], tokens[1, 0], tokens[1, 1]])
    np.testing.assert_array_equal(found["token_weights"], [[1, 0], [1, 1]])


def test_a_large_model_is_compared_with_fewer_samples() -> None:
    """A large model gets evenly spaced samples, at least MIN_SAMPLES; a small one gets all."""
    samples = [{"ids": np.arange(32 * 10).reshape(32, 10)} for _ in range(10)]
    tokens = 32 * 10 * 10
    assert limit_samples(samples, MAX_COMPARE_COST // tokens) == samples
    half = limit_samples(samples, 2 * MAX_COMPARE_COST // tokens)
    assert sum(len(one["ids"]) for one in half) == 160
    assert MIN_SAMPLES <= sum(len(one["ids"]) for one in limit_samples(samples, 10**12)) <= MIN_SAMPLES + len(samples)
