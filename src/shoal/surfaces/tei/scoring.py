"""Scores as text-embeddings-inference gives them, whatever activation a model names: core/src/infer.rs there."""

from __future__ import annotations

import numpy as np

from shoal.types import Array


def apply_activation(logits: Array, *, raw: bool) -> Array:
    """float32 [items, labels]: a sigmoid of one label, a softmax over several; `raw`: as they are."""
    if raw:
        return logits
    if logits.shape[1] == 1:
        with np.errstate(over="ignore"):  # exp of a large number is infinity, and one divided by that is right
            scores: Array = 1 / (1 + np.exp(-logits))
        return scores
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = powers / powers.sum(axis=1, keepdims=True)
    return scores


def sort_descending(scores: Array) -> list[int]:
    """Places of a row of scores, the highest first; of equal ones the later place comes first, as in the original."""
    return np.argsort(scores, kind="stable")[::-1].tolist()  # type: ignore[no-any-return]  # a list of int
