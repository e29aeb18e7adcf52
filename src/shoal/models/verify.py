"""No converted model serves before a second path agrees with it.

Where the weights are known, the second path is the numpy forward pass of `reference`. For a shipped graph of another
architecture it is the graph against itself: each text alone, unpadded, against the padded batch, and unit length
where a Normalize ends the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from shoal.errors import VerificationFailed
from shoal.models.contract import Contract
from shoal.models.graphs.text import can_build
from shoal.models.reference import embed
from shoal.types import Array, TextSpec

Run: TypeAlias = Callable[[dict[str, Array], Sequence[str]], dict[str, Array]]
"""Named arrays and wanted outputs in, those outputs out, on whatever engine."""

MIN_COSINE = 0.9999
"""The bar for a conversion in float32."""

MAX_DIFFERENCE = 0.02
"""Of the largest value: catches vectors of the right direction and the wrong length, with room for bfloat16."""

SAMPLES = (
    "Fish swim together.",
    "A",
    "Where can I renew my passport, and how long does it take?",
    "def total(prices): return sum(p * 1.19 for p in prices)",
)


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The worst row of both outputs. `method`: "reference" (numpy) or "itself". `text`: the outcome in words."""

    passed: bool
    min_cosine: float
    max_abs_diff: float
    method: str
    text: str


def verify(source: Path, contract: Contract, target: Path, spec: TextSpec, run: Run) -> Verification:
    """Compare the graph in `target`, run by `run`, with a second path over a padded batch of sample texts.

    `source` is the folder that the graph was made from.
    """
    batch = sample_inputs(target, spec, SAMPLES)
    outputs = tuple(dict.fromkeys((spec.sentence_embedding, spec.pooled)))
    got = run(batch, outputs)
    encoder = contract.encoder
    if encoder is not None and can_build(source, contract):
        lengths = batch["attention_mask"].sum(axis=1)
        skips = (batch["attention_mask"] - batch.get("pooling_mask", batch["attention_mask"])).sum(axis=1)
        texts = [row[:length] for row, length in zip(batch["input_ids"], lengths, strict=True)]
        expected = embed(source, contract, encoder, texts, [int(skip) for skip in skips])
        pairs = [(got[spec.sentence_embedding], expected.sentence)]
        if spec.pooled != spec.sentence_embedding:
            pairs.append((got[spec.pooled], expected.pooled))
        return _verdict(pairs, spec, "reference", "a numpy forward pass")
    pairs = [(got[name], np.concatenate([run(one, (name,))[name] for one in _alone(batch)])) for name in outputs]
    if spec.ends_normalized:
        whole = got[spec.sentence_embedding]
        length = np.linalg.norm(got[spec.pooled], axis=-1, keepdims=True)
        pairs.append((whole, got[spec.pooled] / np.maximum(length, 1e-12)))
    return _verdict(pairs, spec, "itself", "itself, each text alone and in a batch")


def require(verification: Verification) -> Verification:
    """Answer a passed verification; raise VerificationFailed for another."""
    if not verification.passed:
        raise VerificationFailed(
            f"{verification.text}; the model is not served, please report it with the model's name"
        )
    return verification


def min_cosine(left: Array, right: Array) -> float:
    """The smallest cosine between rows; two zero rows agree (1.0), anything that is not finite does not (-1.0)."""
    if left.shape != right.shape or not (np.isfinite(left).all() and np.isfinite(right).all()):
        return -1.0
    a, b = left.astype(np.float64), right.astype(np.float64)
    lengths = np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1)
    product = lengths[0] * lengths[1]
    cosines = (a * b).sum(axis=-1) / np.where(product > 0, product, 1.0)
    return float(np.where(product > 0, cosines, np.where(lengths[0] == lengths[1], 1.0, -1.0)).min(initial=1.0))


def sample_inputs(target: Path, spec: TextSpec, texts: Sequence[str]) -> dict[str, Array]:
    """Texts as one padded batch of the graph's inputs, int64 [b, l].

    With `pooling_mask`, the first two tokens of each text that has more than three stand for a prompt.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(target / spec.tokenizer))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    rows = [encoding.ids[: spec.max_tokens] for encoding in tokenizer.encode_batch_fast(list(texts))]
    rows = [row or [spec.pad_id] for row in rows]
    width = max(map(len, rows))
    ids = np.full((len(rows), width), spec.pad_id, np.int64)
    mask = np.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
    pooled = mask.copy()
    pooled[mask.sum(axis=1) > 3, :2] = 0
    made = {
        "input_ids": ids,
        "attention_mask": mask,
        "token_type_ids": np.zeros_like(ids),
        "position_ids": np.broadcast_to(np.arange(width), ids.shape).copy(),
        "pooling_mask": pooled,
    }
    return {name: made[name] for name in spec.inputs}


def _alone(batch: dict[str, Array]) -> list[dict[str, Array]]:
    lengths = batch["attention_mask"].sum(axis=1)
    return [
        {name: np.ascontiguousarray(value[row : row + 1, :length]) for name, value in batch.items()}
        for row, length in enumerate(lengths)
    ]


def _verdict(pairs: Sequence[tuple[Array, Array]], spec: TextSpec, method: str, words: str) -> Verification:
    cosine, difference, relative = 1.0, 0.0, 0.0
    for got, expected in pairs:
        if got.shape[-1] != spec.dimension:
            text = f"the graph gives {got.shape[-1]} dimensions, but the model's files say {spec.dimension}"
            return Verification(passed=False, min_cosine=-1.0, max_abs_diff=math.inf, method=method, text=text)
        furthest = float(np.abs(got - expected).max(initial=0.0))
        cosine = min(cosine, min_cosine(got, expected))
        difference = max(difference, furthest)
        relative = max(relative, furthest / max(float(np.abs(expected).max(initial=0.0)), 1e-12))
    passed = cosine >= MIN_COSINE and relative <= MAX_DIFFERENCE
    outcome = "agrees with" if passed else "does not agree with"
    text = f"the graph {outcome} {words}: cosine >= {min(cosine, 1.0):.6f}, largest difference {difference:.1e}"
    return Verification(passed=passed, min_cosine=cosine, max_abs_diff=difference, method=method, text=text)
