"""Families beyond BERT's have the vectors of sentence-transformers, without PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.models.convert.verify import verify
from tests.parity.family_models import NATIVE, other
from tests.parity.test_reference import TEXTS, close, reference, serve
from tests.unit.models.engines import RUNS

# Warnings of the reference's libraries are not this project's.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", NATIVE)
def test_vectors_equal_those_of_sentence_transformers(tmp_path: Path, name: str) -> None:
    """Texts of mixed lengths, some longer than the windows and some cut, on both engines. The reference pads decoders
    on the left, Shoal on the right."""
    folder = other(name, tmp_path)
    model, served = reference(folder), serve(folder, tmp_path / "served")
    spec = served.converted.spec
    assert served.converted.source == "built"
    assert spec.max_tokens == model.max_seq_length
    expected = model.encode(TEXTS, convert_to_numpy=True)
    for engine, open_run in RUNS.items():
        run = open_run(served.folder / served.converted.graph)
        close(served.embed(run, TEXTS), expected)
        verification = verify(folder, served.converted.contract, served.folder, spec, run)
        assert verification.passed, (engine, verification.text)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["modernbert", "qwen3", "embeddinggemma"])
def test_weights_in_half_precision(tmp_path: Path, name: str, dtype: str) -> None:
    """The reference computes in float32 too, with the same rounded weights."""
    folder = other(name, tmp_path, dtype)
    served = serve(folder, tmp_path / "served")
    run = RUNS["openvino"](served.folder / served.converted.graph)
    close(served.embed(run, TEXTS), reference(folder).encode(TEXTS, convert_to_numpy=True))
