"""Convert token log probabilities to values that JSON can represent."""

from __future__ import annotations

import math

from shoal.types import TokenLogprob

MIN_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI writes this instead."""


def to_finite_logprob(value: float) -> float:
    return value if math.isfinite(value) else MIN_LOGPROB


def token_bytes(token: TokenLogprob) -> list[int]:
    return list(token.data if token.data is not None else token.token.encode("utf-8", "replace"))
