"""Scores as in text-embeddings-inference (core/src/infer.rs), which ignores a model's own activation."""

from __future__ import annotations

import numpy as np

from shoal.types import Array


def apply_activation(logits: Array, *, raw: bool) -> Array:
    """Apply a sigmoid for one label, or a softmax over several, to float32 [items, labels]. `raw` skips it."""
    if raw:
        return logits
    if logits.shape[1] == 1:
        with np.errstate(over="ignore"):  # exp may overflow to infinity, and 1 / infinity is the right score
            scores: Array = 1 / (1 + np.exp(-logits))
        return scores
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = powers / powers.sum(axis=1, keepdims=True)
    return scores


def sort_descending(scores: Array) -> list[int]:
    """Return the indices of a row of scores, highest first. On ties the later index is first, as in the original."""
    return np.argsort(scores, kind="stable")[::-1].tolist()  # type: ignore[no-any-return]  # a list of int
