"""Verify the graphs of both towers before they serve, against the numpy forward passes of `dual_encoder_reference`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.models.convert.contract.tower_types import Towers
from shoal.models.convert.dual_encoder_reference import embed_images, embed_texts
from shoal.models.convert.numpy_transformer import Floats, Ids
from shoal.models.convert.verify import MAX_DIFFERENCE, MIN_COSINE, SAMPLES, Run, Verification, min_cosine
from shoal.specs import TextSpec
from shoal.types import Array

_IMAGES = 2


def verify_texts(source: Path, towers: Towers, target: Path, run: Run) -> Verification:
    """Compare the text tower's graph, run by `run`, over a padded batch of sample texts.

    `source` is the folder that the graph was made from, `target` holds the tokenizer. The reference reads CLIP's texts
    without padding, so agreement also shows that padding changes nothing.
    """
    spec = towers.text_spec
    rows = _sample_ids(target, spec)
    width = max(spec.pad_to, *map(len, rows))
    ids = np.full((len(rows), width), spec.pad_id, np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
    got = run({"input_ids": ids}, (spec.pooled,))[spec.pooled]
    return _verdict("text", got, embed_texts(source, towers, list(ids) if spec.pad_to else rows))


def verify_images(source: Path, towers: Towers, run: Run) -> Verification:
    """Compare the image tower's graph, run by `run`, over random pixels."""
    spec = towers.image_spec
    pixels = np.random.default_rng(0).standard_normal((_IMAGES, 3, *spec.size)).astype(np.float32)
    got = run({spec.input: pixels}, (spec.output,))[spec.output]
    return _verdict("image", got, embed_images(source, towers, pixels))


def _sample_ids(target: Path, spec: TextSpec) -> list[Ids]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(target / spec.tokenizer))
    tokenizer.no_padding()
    tokenizer.enable_truncation(spec.max_tokens)
    return [np.array(encoding.ids or [spec.pad_id], np.int64) for encoding in tokenizer.encode_batch(list(SAMPLES))]


def _verdict(tower: str, got: Array, expected: Floats) -> Verification:
    cosine = min_cosine(got, expected)
    difference = float(np.abs(got - expected).max()) if got.shape == expected.shape else float("inf")
    passed = cosine >= MIN_COSINE and difference <= MAX_DIFFERENCE * float(np.abs(expected).max())  # false for NaN
    outcome = "agrees with" if passed else "does not agree with"
    return Verification(
        passed=passed,
        min_cosine=cosine,
        max_abs_diff=difference,
        method="reference",
        text=f"the graph of the {tower} tower {outcome} a numpy forward pass: cosine >= {min(cosine, 1.0):.6f}, "
        f"largest difference {difference:.1e}",
    )
