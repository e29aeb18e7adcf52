"""Verify converted models against a second computation before they serve.

If the weights are known, the second computation is the numpy forward pass of `reference`. A shipped graph of another
architecture is compared with itself: each text alone, unpadded, against the padded batch, and unit length if a
Normalize ends the model. Models that score are compared by their logits, over texts and pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from shoal.errors import VerificationFailed
from shoal.models.convert import reference
from shoal.models.convert.contract import Contract, Encoder
from shoal.models.convert.graphs.text import can_build
from shoal.models.convert.reference import score
from shoal.specs import TextSpec
from shoal.types import Array, TextPair

Run: TypeAlias = Callable[[dict[str, Array], Sequence[str]], dict[str, Array]]
"""Takes named arrays and the names of outputs, returns those outputs, on any engine."""

MIN_COSINE = 0.9999
"""Required cosine for a conversion in float32."""

MAX_DIFFERENCE = 0.02
"""Relative to the largest value: catches vectors with the right direction but wrong length, with room for bfloat16."""

SAMPLES = (
    "Fish swim together.",
    "A",
    "Where can I renew my passport, and how long does it take?",
    "def total(prices): return sum(p * 1.19 for p in prices)",
)


PAIRS = (
    (SAMPLES[2], SAMPLES[0]),
    SAMPLES[1],
    (SAMPLES[1], SAMPLES[3]),
    SAMPLES[3],
)
"""For models that score: pairs and single texts."""

LONGEST_WINDOW = 512
"""Windows of more tokens are not verified with a text of their own."""

MAX_LOGIT_DIFFERENCE = 2e-3
"""Relative to the largest logit, or to 1 if that is larger: float32 differs by less than 1e-5, a wrong head by more."""


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The result for the worst row of all outputs. `min_cosine` is 1 for a model without vectors that passed, else -1.
    `method`: "reference" (numpy) or "itself". `text`: the result in words."""

    passed: bool
    min_cosine: float
    max_abs_diff: float
    method: str
    text: str


def verify(source: Path, contract: Contract, target: Path, spec: TextSpec, run: Run) -> Verification:
    """Compare the graph in `target`, run by `run`, with a second computation over a padded batch of sample texts.

    `source` is the folder that the graph was made from.
    """
    if spec.score is not None:
        return _verify_scores(source, contract, target, spec, run)
    batch = sample_inputs(target, spec, (*SAMPLES, *long_samples(contract.encoder)))
    got = run(batch, spec.outputs)
    lengths = batch["attention_mask"].sum(axis=1)
    if can_build(source, contract):
        skips = (batch["attention_mask"] - batch.get("pooling_mask", batch["attention_mask"])).sum(axis=1)
        texts = _cut(batch["input_ids"], lengths)
        adapters = [int(row[0]) for row in batch.get("adapter_ids", ())]
        expected = reference.outputs(source, contract, spec, texts, [int(skip) for skip in skips], adapters)
        method, words = "reference", "a numpy forward pass"
    else:
        alone = [run(one, spec.outputs) for one in _split_batch(batch)]
        expected = {name: [row[name][0] for row in alone] for name in spec.outputs}
        method, words = "itself", "itself, each text alone and in a batch"
    pairs = [_pair(name, got[name], expected[name], lengths, spec) for name in spec.outputs]
    if method == "itself" and spec.dimension and spec.ends_normalized:
        whole = got[spec.sentence_embedding]
        length = np.linalg.norm(got[spec.pooled], axis=-1, keepdims=True)
        pairs.append(_Pair("", whole, got[spec.pooled] / np.maximum(length, 1e-12), spec.dimension))
    return _verdict(pairs, method, words)


def long_samples(encoder: Encoder | None) -> tuple[str, ...]:
    """Return a text longer than the windows of the encoder's layers, in which these matter; none without windows, or
    with ones too long for a forward pass in numpy."""
    windows = [layer.window for layer in encoder.layers if layer.window is not None] if encoder else []
    if not windows or min(windows) > LONGEST_WINDOW:
        return ()
    words = itertools.cycle(SAMPLES[2].split())
    return (" ".join(itertools.islice(words, min(windows) + 16)),)


class _Pair(NamedTuple):
    """An output and its expected value, [rows, width]; `label`: its name in messages."""

    label: str
    actual: Array
    expected: Array
    width: int


def _pair(name: str, got: Array, expected: Sequence[Array], lengths: Array, spec: TextSpec) -> _Pair:
    """Pair an output with its expected value. Outputs per token lose their padding; their rows are the tokens of all
    texts."""
    if spec.multi is not None and name == spec.multi.output:
        return _Pair(
            "multi vectors", np.concatenate(_cut(got, lengths)), np.concatenate(expected), spec.multi.dimension
        )
    if name == spec.tokens:
        flat = np.concatenate(expected)
        return _Pair("token vectors", np.concatenate(_cut(got, lengths)), flat, flat.shape[-1])
    if spec.sparse is None or name != spec.sparse.output:
        return _Pair("", got, np.stack(expected), spec.dimension)
    width = got.shape[1]
    if spec.sparse.per == "token":
        width = max(width, int(lengths.max()))
        return _Pair("sparse vectors", _pad_rows(_cut(got, lengths), width), _pad_rows(expected, width), width)
    return _Pair("sparse vectors", got, np.stack(expected), spec.vocab_size or width)


def _pad_rows(rows: Sequence[Array], width: int) -> Array:
    return np.stack([np.pad(row, (0, width - len(row))) for row in rows])


def _verify_scores(source: Path, contract: Contract, target: Path, spec: TextSpec, run: Run) -> Verification:
    """Verify the logits of texts and pairs by their difference: their direction says little (one label has only
    two)."""
    outputs: Sequence[str] = spec.outputs
    pairs: tuple[str | TextPair, ...] = (*PAIRS, *long_samples(contract.encoder))
    batch = sample_inputs(target, spec, pairs)
    got = run(batch, outputs)[outputs[0]]
    encoder = contract.encoder
    if encoder is not None and can_build(source, contract):
        lengths = batch["attention_mask"].sum(axis=1)
        segments = batch.get("token_type_ids", np.zeros_like(batch["input_ids"]))
        expected = score(source, contract, encoder, _cut(batch["input_ids"], lengths), _cut(segments, lengths))
        method, words = "reference", "a numpy forward pass"
    else:
        expected = np.concatenate([run(one, outputs)[outputs[0]] for one in _split_batch(batch)])
        method, words = "itself", "itself, each text alone and in a batch"
    labels = len(contract.classifier.spec.labels) if contract.classifier else 0
    if got.shape != (len(pairs), labels):
        return _failed(
            f"the graph returns scores of shape {list(got.shape)}, but the files name {labels} labels", method
        )
    furthest = float(np.abs(got - expected).max())
    passed = furthest <= MAX_LOGIT_DIFFERENCE * max(float(np.abs(expected).max()), 1.0)  # false for NaN
    outcome = "agrees with" if passed else "does not agree with"
    return Verification(
        passed=passed,
        min_cosine=1.0 if passed else -1.0,
        max_abs_diff=furthest,
        method=method,
        text=f"the graph {outcome} {words}: largest difference of a logit {furthest:.1e}",
    )


def _cut(rows: Array, lengths: Array) -> list[Array]:
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _failed(text: str, method: str) -> Verification:
    return Verification(passed=False, min_cosine=-1.0, max_abs_diff=math.inf, method=method, text=text)


def require(verification: Verification) -> Verification:
    """Return a passed verification; raise VerificationFailed for any other."""
    if not verification.passed:
        raise VerificationFailed(
            f"{verification.text}; the model is not served; please report this with the model's name"
        )
    return verification


def min_cosine(left: Array, right: Array) -> float:
    """Return the smallest of `row_cosines`, 1.0 without rows; -1.0 for arrays of different shapes."""
    return float(row_cosines(left, right).min(initial=1.0)) if left.shape == right.shape else -1.0


def row_cosines(left: Array, right: Array) -> Array:
    """Return the cosine of each pair of rows, float64. Two zero rows agree (1.0). A row that is not finite, or zero on
    one side only, does not (-1.0)."""
    finite: Array = np.asarray(np.isfinite(left).all(axis=-1) & np.isfinite(right).all(axis=-1))
    a, b = (np.where(finite[..., np.newaxis], rows, 0.0).astype(np.float64) for rows in (left, right))
    lengths = np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1)
    product = lengths[0] * lengths[1]
    cosines = (a * b).sum(axis=-1) / np.where(product > 0, product, 1.0)
    found: Array = np.where(product > 0, cosines, np.where(finite & (lengths[0] == lengths[1]), 1.0, -1.0))
    return found


def sample_inputs(target: Path, spec: TextSpec, texts: Sequence[str | TextPair]) -> dict[str, Array]:
    """Return texts or pairs as one padded batch of the graph's inputs, int64 [b, l].

    With `pooling_mask`, the first two tokens of each text with more than three represent a prompt. With `adapter_ids`,
    each text has another task, the last one none.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(target / spec.tokenizer))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    encodings = tokenizer.encode_batch_fast(list(texts))
    rows = [encoding.ids[: spec.max_tokens] or [spec.pad_id] for encoding in encodings]
    width = max(map(len, rows))
    ids = np.full((len(rows), width), spec.pad_id, np.int64)
    mask, segments = np.zeros_like(ids), np.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
        if spec.score is not None:
            types = encodings[index].type_ids[: len(row)]
            segments[index, : len(types)] = types
    pooled = mask.copy()
    pooled[mask.sum(axis=1) > 3, :2] = 0
    adapters = np.arange(1, len(rows) + 1) % (len(spec.embedding_tasks) + 1)
    made = {
        "input_ids": ids,
        "attention_mask": mask,
        "token_type_ids": segments,
        "position_ids": np.broadcast_to(np.arange(width), ids.shape).copy(),
        "pooling_mask": pooled,
        "adapter_ids": np.broadcast_to(adapters[:, None], ids.shape).copy(),
    }
    return {name: made[name] for name in spec.inputs}


def _split_batch(batch: dict[str, Array]) -> list[dict[str, Array]]:
    lengths = batch["attention_mask"].sum(axis=1)
    return [
        {name: np.ascontiguousarray(value[row : row + 1, :length]) for name, value in batch.items()}
        for row, length in enumerate(lengths)
    ]


def _verdict(pairs: Sequence[_Pair], method: str, words: str) -> Verification:
    cosine, difference, wrong = 1.0, 0.0, ""
    for pair in pairs:
        if pair.actual.shape[-1] != pair.width:
            text = f"the graph returns {pair.actual.shape[-1]} dimensions, but the model's files say {pair.width}"
            return _failed(text, method)
        if pair.actual.shape != pair.expected.shape:
            shapes = f"{list(pair.actual.shape)}, not {list(pair.expected.shape)}"
            return _failed(f"the graph's {pair.label or 'vectors'} have the shape {shapes}", method)
        own = min_cosine(pair.actual, pair.expected)
        furthest = float(np.abs(pair.actual - pair.expected).max(initial=0.0))
        relative = furthest / max(float(np.abs(pair.expected).max(initial=0.0)), 1e-12)
        if not wrong and not (own >= MIN_COSINE and relative <= MAX_DIFFERENCE):
            wrong = f"the graph's {pair.label} do not agree" if pair.label else "the graph does not agree"
        cosine, difference = min(cosine, own), max(difference, furthest)
    text = f"{wrong or 'the graph agrees'} with {words}"
    text = f"{text}: cosine >= {min(cosine, 1.0):.6f}, largest difference {difference:.1e}"
    return Verification(passed=not wrong, min_cosine=cosine, max_abs_diff=difference, method=method, text=text)
