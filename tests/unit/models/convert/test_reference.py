"""The numpy forward pass compared with formulas and published values: graphs are verified against it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from shoal.models.convert.contract import read_contract
from shoal.models.convert.contract.architecture import Buckets
from shoal.models.convert.graphs.encoder import relative_buckets
from shoal.models.convert.numpy_transformer import activate, bucket, norm, token_positions
from shoal.models.convert.reference import _pool, embed
from shoal.types import Array
from tests.unit.models.checkpoints import checkpoint

MPNET = Buckets(tensor="", buckets=32, maximum=128)
X = np.linspace(-8, 8, 4001).astype(np.float32)


def test_gelu_is_the_exact_one() -> None:
    """x times the normal distribution's cumulative function, to float32's precision."""
    expected = np.array([x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in X.tolist()])
    assert np.abs(activate("gelu", X) - expected).max() < 2e-6


@pytest.mark.parametrize(
    ("name", "at_one"),
    [
        ("tanh", 0.7615942),
        ("sigmoid", 0.7310586),
        ("silu", 0.7310586),
        ("relu", 1.0),
        ("identity", 1.0),
        ("gelu", 0.8413447),
        ("gelu_tanh", 0.8411920),
    ],
)
def test_activations_at_one(name: str, at_one: float) -> None:
    """Known values, to seven digits."""
    assert activate(name, np.ones(1, np.float32))[0] == pytest.approx(at_one, abs=1e-6)


def test_layer_norm_uses_the_biased_variance() -> None:
    """Mean 0 and, with a large scale, variance 1 over the last axis; then scale and shift."""
    x = np.array([[1.0, 2.0, 3.0, 6.0]], np.float32)
    got = norm(x, np.full(4, 2, np.float32), np.ones(4, np.float32), 1e-12)
    assert got[0].tolist() == pytest.approx(
        [1 - 4 / math.sqrt(3.5), 1 - 2 / math.sqrt(3.5), 1.0, 1 + 6 / math.sqrt(3.5)]
    )


def test_buckets_of_distances() -> None:
    """T5's buckets: exact to 7, logarithmic to 128, 16 more for keys that follow the query."""
    known = {0: 0, -1: 1, -7: 7, -8: 8, -11: 8, -12: 9, -16: 10, -32: 12, -64: 14, -127: 15, -128: 15, -500: 15}
    assert {distance: bucket(distance, MPNET) for distance in known} == known
    assert bucket(3, MPNET) == 19
    assert bucket(200, MPNET) == 31


def test_both_bucket_formulas_agree_at_every_distance() -> None:
    """The graph's float32 logarithm never differs from the borders 8 * 2 ** (k / 2) used here."""
    assert relative_buckets(513).tolist() == [bucket(distance, MPNET) for distance in range(-513, 514)]


def test_positions_skip_padding_ids(tmp_path: Path) -> None:
    """RoBERTa counts from the padding id on and leaves padding at it."""
    encoder = read_contract(checkpoint(tmp_path, "roberta")).encoder
    assert encoder is not None
    assert token_positions(encoder, np.array([5, 1, 6, 7])).tolist() == [2, 1, 3, 4]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("cls", [3.0, 4.0]),
        ("max", [7.0, 4.0]),
        ("mean", [5.0, 3.0]),
        ("mean_sqrt_len_tokens", [10 / math.sqrt(2), 6 / math.sqrt(2)]),
        ("lasttoken", [7.0, 2.0]),
        ("weightedmean", [(2 * 3 + 3 * 7) / 5, (2 * 4 + 3 * 2) / 5]),
    ],
)
def test_poolings_by_hand(mode: str, expected: list[float]) -> None:
    """Three tokens, the first one of a prompt: weights keep their positions."""
    tokens: Array = np.array([[9, 9], [3, 4], [7, 2]], np.float32)
    assert _pool(mode, tokens, 1).tolist() == pytest.approx(expected)


def test_rows_do_not_see_each_other(tmp_path: Path) -> None:
    """A text's vector is the same alone and among others, since there is no padding."""
    contract = read_contract(checkpoint(tmp_path, "mpnet"))
    assert contract.encoder is not None
    texts = [np.array([0, 9, 2]), np.array([0, 9, 10, 11, 2])]
    together = embed(tmp_path, contract, contract.encoder, texts)
    for row, text in enumerate(texts):
        assert np.array_equal(embed(tmp_path, contract, contract.encoder, [text]).sentence[0], together.sentence[row])
