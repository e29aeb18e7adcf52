"""Converts a batch's rows for servers that read text."""

from __future__ import annotations

from typing import Any

from shoal.core.protocols import Tensors


def to_items(inputs: Tensors) -> list[Any]:
    """Return texts, token id lists, or text pairs from "text" and the optional "pair", both object arrays [rows]."""
    texts: list[Any] = inputs["text"].tolist()
    if "pair" not in inputs:
        return texts
    return [text if pair is None else (text, pair) for text, pair in zip(texts, inputs["pair"].tolist(), strict=True)]
