"""Static, sparse and late-interaction models against the libraries that save them, from the same files, end to end:
tokenization, the graph on both engines in float32, and the processing of its outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from shoal.core.protocols import EngineFacts, Prepared, VectorSet
from shoal.errors import ModelFileError
from shoal.models.convert.convert import ConversionResult, convert
from shoal.models.convert.verify import Run, min_cosine, verify
from shoal.pipelines.text.tokens import TextPipeline
from shoal.types import Array, Embed, VectorKind
from tests.parity import head_models as made
from tests.parity.reference_models import LONGEST, Case, _tokenizer, write
from tests.parity.test_reference import TEXTS, reference
from tests.unit.models.engines import RUNS

# Warnings of the reference's libraries are not this project's.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

COSINE, DIFFERENCE = 0.99999, 2e-5
"""Bounds for unit vectors in float32."""


class Served(NamedTuple):
    converted: ConversionResult
    pipeline: TextPipeline
    folder: Path

    def rows(self, run: Run, texts: Sequence[str], kinds: tuple[VectorKind, ...], **options: Any) -> list[VectorSet]:
        """Return the vectors of those kinds for every text, in one batch."""
        task = Embed(model="m", inputs=[*texts], outputs=kinds, **options)
        self.pipeline.check(task)
        prepared = self.pipeline.prepare([(task, text) for text in texts])
        batch = [one for one in prepared if isinstance(one, Prepared)]
        assert len(batch) == len(texts), prepared
        spec = self.converted.spec
        facts = EngineFacts(name="parity", inputs=spec.inputs, outputs=spec.outputs, length_buckets=(8, 24, 64))
        names = tuple({name for one in batch for name in one.outputs})
        rows = self.pipeline.finish(run(self.pipeline.collate(batch, facts), names), batch)
        return [row if isinstance(row, VectorSet) else VectorSet(dense=row) for row in rows]  # type: ignore[arg-type]

    def dense(self, run: Run, texts: Sequence[str], **options: Any) -> Array:
        rows = self.rows(run, texts, ("dense",), **options)
        return np.stack([row.dense for row in rows if row.dense is not None])

    def multi(self, run: Run, texts: Sequence[str], **options: Any) -> list[Array]:
        return [row.multi for row in self.rows(run, texts, ("multi",), **options) if row.multi is not None]

    def sparse(self, run: Run, texts: Sequence[str], **options: Any) -> list[dict[int, float]]:
        rows = [row.sparse for row in self.rows(run, texts, ("sparse",), **options) if row.sparse is not None]
        return [dict(zip(row.indices.tolist(), row.values.tolist(), strict=True)) for row in rows]


def serve(source: Path, target: Path) -> Served:
    target.mkdir(exist_ok=True)
    converted = convert(source, target)
    return Served(converted, TextPipeline(target, converted.spec, truncate=True), target)


def runs(served: Served, source: Path) -> list[Run]:
    """The graph on both engines; each passes its verification against the numpy reference."""
    graphs = [open_run(served.folder / served.converted.graph) for open_run in RUNS.values()]
    for run in graphs:
        verification = verify(source, served.converted.contract, served.folder, served.converted.spec, run)
        assert verification.passed and verification.method == "reference", verification.text
    return graphs


def close(got: Array, expected: Array) -> None:
    assert got.shape == expected.shape
    assert min_cosine(got, expected) >= COSINE
    assert np.abs(got - expected).max(initial=0.0) <= DIFFERENCE * max(1.0, float(np.abs(expected).max(initial=0.0)))


def same_weights(got: dict[int, float], expected: Array) -> None:
    """Assert that a sparse vector equals its dense row."""
    row = np.zeros_like(expected)
    row[list(got)] = list(got.values())
    assert np.abs(row - expected).max() <= DIFFERENCE * max(1.0, float(expected.max()))
    if expected.any():
        assert min_cosine(row[None], expected[None]) >= COSINE


@pytest.mark.parametrize("after", [False, True])
def test_a_static_embedding_equals_sentence_transformers(tmp_path: Path, after: bool) -> None:
    """Every token counts, unknown ones too, no special token is added, and a text without tokens gives zeros."""
    folder = made.write_static(tmp_path / "model", after=after, prompts={"query": "where can i: "})
    model, served = reference(folder), serve(folder, tmp_path / "served")
    for run in runs(served, folder):
        for prompt in (None, "query"):
            expected = model.encode(TEXTS, prompt_name=prompt, convert_to_numpy=True)
            got = served.dense(run, TEXTS, prompt_name=prompt, normalize=after)
            places = [place for place, text in enumerate(TEXTS) if prompt or text.strip()] if after else slice(None)
            close(got[places], expected[places])


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("modules", [True, False])
def test_a_static_model_equals_model2vec(tmp_path: Path, quantized: bool, dtype: str, modules: bool) -> None:
    """Unknown tokens are left out; mapping and weights are in the table; int8 keeps its numeric values."""
    from model2vec import StaticModel

    folder = made.write_model2vec(tmp_path / "model", quantized=quantized, dtype=dtype, modules=modules)
    model, served = StaticModel.from_pretrained(folder), serve(folder, tmp_path / "served")
    assert served.converted.spec.max_tokens == 24
    assert served.converted.spec.ends_normalized
    # model2vec first cuts by characters, at its estimate of 24 tokens: only short texts can be compared.
    texts = [text for text in TEXTS if len(text) <= 24 * model.median_token_length]
    assert "" in texts and len(texts) > 3
    expected = model.encode(texts)
    for run in runs(served, folder):
        got = served.dense(run, texts)
        if dtype == "float16":
            assert min_cosine(got, expected.astype(np.float32)) >= 0.9999  # it computes the mean in float16
        else:
            close(got, expected.astype(np.float32))


@pytest.mark.parametrize("case", made.SPLADES, ids=lambda case: case.name)
def test_splade_equals_sentence_transformers(tmp_path: Path, case: made.Splade) -> None:
    """The weight of every word, for queries and documents, padded and not."""
    from sentence_transformers import SparseEncoder

    folder = made.write_splade(case, tmp_path)
    model, served = SparseEncoder(str(folder), device="cpu"), serve(folder, tmp_path / "served")
    spec = served.converted.spec
    assert spec.kinds == ("sparse",) and spec.max_tokens == model.max_seq_length == LONGEST
    for run in runs(served, folder):
        for role in ("query", "document"):
            encode = model.encode_query if role == "query" else model.encode_document
            expected = encode(TEXTS, convert_to_tensor=True).to_dense().numpy()
            assert (expected > 0).any() and (expected == 0).any()
            for got, row in zip(served.sparse(run, TEXTS, input_type=role), expected, strict=True):
                same_weights(got, row)


def test_a_masked_language_model_declared_as_splade(tmp_path: Path) -> None:
    """Without modules.json it is read as SparseEncoder reads it; under another name it is an encoder to pool."""
    from sentence_transformers import SparseEncoder

    folder = made.write_masked("bert", tmp_path / "model")
    assert serve(folder, tmp_path / "encoder").converted.spec.kinds == ("dense", "tokens")
    place = folder / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"_name_or_path": "naver/Splade-v9"}))
    model, served = SparseEncoder(str(folder), device="cpu"), serve(folder, tmp_path / "served")
    expected = model.encode(TEXTS, convert_to_tensor=True).to_dense().numpy()
    for run in runs(served, folder):
        for got, row in zip(served.sparse(run, TEXTS), expected, strict=True):
            same_weights(got, row)


def test_bge_m3_equals_its_formula(tmp_path: Path) -> None:
    """All three kinds in one call: the first token's vector, relu(w x + b) by id, and a vector of each token but the
    first (Chen et al. 2024, as FlagEmbedding computes them)."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModel

    folder = made.write_m3(tmp_path)
    served = serve(folder, tmp_path / "served")
    assert served.converted.spec.kinds == ("dense", "sparse", "multi", "tokens")
    tokenizer, encoder = _tokenizer("xlm-roberta"), AutoModel.from_pretrained(folder).eval()
    heads = {name: load_file(folder / f"{name}_linear.safetensors") for name in ("sparse", "colbert")}
    without = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    for run in runs(served, folder):
        got = served.rows(run, TEXTS, ("dense", "sparse", "multi"))
        for text, row in zip(TEXTS, got, strict=True):
            ids = tokenizer(text, truncation=True, max_length=LONGEST)["input_ids"]
            with torch.no_grad():
                hidden = encoder(torch.tensor([ids])).last_hidden_state[0]
                weights = torch.relu(hidden @ heads["sparse"]["weight"].T + heads["sparse"]["bias"])[:, 0]
                vectors = hidden[1:] @ heads["colbert"]["weight"].T + heads["colbert"]["bias"]
            expected: dict[int, float] = {}
            for token, weight in zip(ids, weights.tolist(), strict=True):
                if weight > 0 and token not in without:
                    expected[token] = max(weight, expected.get(token, 0.0))
            assert row.dense is not None and row.sparse is not None and row.multi is not None
            close(row.dense[None], torch.nn.functional.normalize(hidden[:1]).numpy())
            close(row.multi, torch.nn.functional.normalize(vectors).numpy())
            assert dict(zip(row.sparse.indices.tolist(), row.sparse.values.tolist(), strict=True)) == pytest.approx(
                expected, rel=1e-4, abs=1e-5
            )


def compare_late(folder: Path, target: Path) -> Served:
    """Compare queries and documents of a late-interaction model, with all vectors of each."""
    from sentence_transformers import MultiVectorEncoder

    model, served = MultiVectorEncoder(str(folder), device="cpu"), serve(folder, target)
    assert served.converted.spec.kinds == ("multi",)
    for run in runs(served, folder):
        for role in ("query", "document"):
            encode = model.encode_query if role == "query" else model.encode_document
            expected = encode(TEXTS, convert_to_numpy=True)
            for got, rows in zip(served.multi(run, TEXTS, input_type=role), expected, strict=True):
                close(got, rows)
    return served


@pytest.mark.parametrize("case", made.LATES, ids=lambda case: case.name)
def test_late_interaction_equals_sentence_transformers(tmp_path: Path, case: made.Late) -> None:
    """PyLate's files: markers, padded queries, documents without their punctuation."""
    served = compare_late(made.write_pylate(case, tmp_path), tmp_path / "served")
    assert served.converted.spec.max_tokens == 30


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"query_maxlen": 12, "doc_maxlen": 20, "dim": 12, "similarity": "cosine", "bsize": 32},
        {"query_maxlen": 20, "doc_maxlen": 40, "attend_to_mask_tokens": True, "mask_punctuation": False},
    ],
)
def test_a_checkpoint_of_the_stanford_library(tmp_path: Path, metadata: dict[str, Any] | None) -> None:
    """The projection among the encoder's weights, with the settings of artifact.metadata or that library's own."""
    compare_late(made.write_stanford(tmp_path, metadata=metadata), tmp_path / "served")


def expanded(model: Any) -> None:
    model[0].query_expansion = {"strategy": "fixed", "length": 16, "attend": True, "token": "fish"}
    model[0].document_length = 24
    model.prompts = {"query": "renew my: ", "document": "harbour "}


def cut(model: Any) -> None:
    model[0].query_length = 10


def skipping(model: Any) -> None:
    model[2].skiplist_words = ["?", "fish"]
    model[2].resolve_with_tokenizer(model.tokenizer)


@pytest.mark.parametrize("finish", [lambda model: None, expanded, cut, skipping])
def test_a_multi_vector_encoder(tmp_path: Path, finish: Any) -> None:
    """As saved by sentence-transformers 6: the settings are on the modules, markers are prompts."""
    compare_late(made.write_multi_vector(tmp_path, finish), tmp_path / "served")


@pytest.mark.parametrize("after", [(("Normalize", ()),), (("LayerNorm", (32,)),), ()])
def test_a_matryoshka_model_keeps_its_dimensions(
    tmp_path: Path, after: tuple[tuple[str, tuple[Any, ...]], ...]
) -> None:
    """truncate_dim is the model's own dimension; a request's `dimensions` cut from it."""
    folder = write(Case("short", after=after), tmp_path)
    place = folder / "config_sentence_transformers.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"truncate_dim": 20}))
    model, served = reference(folder), serve(folder, tmp_path / "served")
    assert served.converted.spec.dimension == 20
    for run in runs(served, folder):
        for dimensions in (None, 8):
            expected = model.encode(TEXTS, truncate_dim=dimensions or 20, normalize_embeddings=True)
            close(served.dense(run, TEXTS, dimensions=dimensions, normalize=True), expected)


def test_left_padding_changes_nothing(tmp_path: Path) -> None:
    """A tokenizer that pads on the left is padded on the right here; positions that skip padding are the same."""

    def pad_left(folder: Path) -> None:
        place = folder / "tokenizer_config.json"
        place.write_text(json.dumps(json.loads(place.read_text()) | {"padding_side": "left"}))

    folder = write(Case("left", "roberta", pooling="lasttoken", finish=pad_left), tmp_path)
    model, served = reference(folder), serve(folder, tmp_path / "served")
    assert model.tokenizer.padding_side == "left"
    expected = model.encode(TEXTS, convert_to_numpy=True)
    for run in runs(served, folder):
        close(served.dense(run, TEXTS), expected)


def test_a_residual_dense_equals_sentence_transformers(tmp_path: Path) -> None:
    """With one size and with two."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    plain = SentenceTransformer(str(write(Case("plain", after=()), tmp_path)), device="cpu")
    layers = [modules.Dense(32, out, activation_function=torch.nn.ReLU(), use_residual=True) for out in (32, 12)]
    folder = tmp_path / "residual"
    SentenceTransformer(modules=[*plain, *layers], device="cpu").save(str(folder), create_model_card=False)
    served = serve(folder, tmp_path / "served")
    expected = reference(folder).encode(TEXTS, convert_to_numpy=True)
    for run in runs(served, folder):
        close(served.dense(run, TEXTS, normalize=False), expected)


def test_routers_are_refused_by_name(tmp_path: Path) -> None:
    """Two models in one folder: the error says what to do."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Router

    parts = [reference(made.write_static(tmp_path / side)) for side in ("query", "document")]
    router = Router.for_query_document(query_modules=list(parts[0]), document_modules=list(parts[1]))
    SentenceTransformer(modules=[router], device="cpu").save(str(tmp_path / "model"), create_model_card=False)
    with pytest.raises(ModelFileError, match="serve them under two names") as caught:
        serve(tmp_path / "model", tmp_path / "served")
    assert (caught.value.file, caught.value.key) == ("modules.json", "[0].type")
