"""What a local model is put together from: the batches of its precision check."""

from __future__ import annotations

from pathlib import Path

from shoal.local import SAMPLE_ROWS, precision_samples
from shoal.models.convert import convert
from shoal.models.samples import TEXTS
from shoal.pipelines.text import TextPipeline
from tests.unit.models.checkpoints import checkpoint


def test_every_sample_text_is_in_the_check_once(tmp_path: Path) -> None:
    """Batches of bounded size, and last the longest text alone, cut to the model's length."""
    target = tmp_path / "out"
    target.mkdir()
    spec = convert(checkpoint(tmp_path), target).spec
    *batches, longest = [
        inputs["attention_mask"] for inputs in precision_samples(TextPipeline(target, spec, truncate=False))
    ]
    assert longest.shape == (1, spec.max_tokens)
    assert sum(len(batch) for batch in batches) == len(TEXTS)
    assert max(len(batch) for batch in batches) <= SAMPLE_ROWS
    lengths = [length for batch in batches for length in batch.sum(axis=1)]
    assert lengths == sorted(lengths)
