"""The rows of a batch for a server that reads text."""

from __future__ import annotations

from typing import Any

from shoal.core.protocols import Tensors


def to_items(inputs: Tensors) -> list[Any]:
    """Texts, lists of ids, or pairs of texts, of "text" and, where there is one, "pair": object arrays [rows]."""
    texts: list[Any] = inputs["text"].tolist()
    if "pair" not in inputs:
        return texts
    return [text if pair is None else (text, pair) for text, pair in zip(texts, inputs["pair"].tolist(), strict=True)]
