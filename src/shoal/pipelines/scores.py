"""Convert logits to scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.errors import ShoalError
from shoal.pipelines.vectors import not_finite_error
from shoal.specs import Activation
from shoal.types import Array


def score_rows(logits: Array, activation: Activation, raw: Sequence[bool]) -> list[Array | ShoalError]:
    """Convert `logits` [rows, labels] to one float32 [labels] array per row, with the activation applied except where
    `raw` is true. A row that holds NaN or infinity becomes NotFinite."""
    logits = logits.astype(np.float32, copy=False)
    finite: Array = np.asarray(np.isfinite(logits).all(axis=1))
    if not finite.all():
        logits = np.where(finite[:, None], logits, np.float32(0))
    scores = logits if activation == "identity" or all(raw) else apply_activation(logits, activation)
    return [
        (logits[place] if own else scores[place]) if fine else not_finite_error()
        for place, (own, fine) in enumerate(zip(raw, finite.tolist(), strict=True))
    ]


def apply_activation(logits: Array, activation: Activation) -> Array:
    """Apply the activation to finite float32 [rows, labels], over the labels of each row. Powers never overflow,
    however large the logits."""
    if activation == "sigmoid":
        powers = np.exp(-np.abs(logits))
        scores: Array = np.where(logits >= 0, np.float32(1), powers) / (1 + powers)
        return scores
    if activation == "softmax":
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = powers / powers.sum(axis=1, keepdims=True)
        return scores
    return logits
