"""Explanations of stored models: from their manifests, and from their files while these are there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from shoal.backends import parse_address
from shoal.models.explain import UNVERIFIED, Explanation, explain
from shoal.models.prepare import prepare
from shoal.models.store import Store, StoredModel
from tests.unit.models import classifiers, head_checkpoints
from tests.unit.models.checkpoints import MEAN, checkpoint, write_json
from tests.unit.models.convert.graphs.test_shipped import ship
from tests.unit.models.engines import openvino_run
from tests.unit.models.tower_checkpoints import towers

VERIFIED = "the graph agrees with a numpy forward pass: cosine >= 1.000000"


def stored(folder: Path, store: Store, *, engine: Any = openvino_run) -> StoredModel:
    return prepare(parse_address(f"file:{folder}"), store=store, engine=engine)


def test_an_embedder(store: Store, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "xlm-roberta", config={"architectures": ["XLMRobertaModel"]})
    saved = {"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": "query"}
    write_json(folder / "config_sentence_transformers.json", saved)
    found = explain(stored(folder, store))
    assert found.verified.startswith(VERIFIED)
    assert found == Explanation(
        family="xlm-roberta (XLMRobertaModel)",
        way="built from config.json and safetensors",
        weights=("model.safetensors",),
        settings=(
            "1_Pooling/config.json",
            "config.json",
            "config_sentence_transformers.json",
            "modules.json",
            "sentence_bert_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
        vectors="dense (16 dimensions, cosine similarity), tokens",
        pooling="mean (1_Pooling/config.json), then normalize",
        normalization="a Normalize module ends the model",
        prompts="query: 'query: '; passage: 'passage: '; default: query",
        max_length="32 tokens with special ones (sentence_bert_config.json: max_seq_length)",
        verified=found.verified,
        differs=("longer texts are cut and counted in `x-shoal-truncated`; there they are cut silently",),
    )


def test_what_no_file_says(store: Store, tmp_path: Path) -> None:
    """A plain encoder, not verified: the defaults are named as such, and vectors get unit length."""
    found = explain(stored(checkpoint(tmp_path / "model", pooling=None), store, engine=None))
    assert (found.pooling, found.prompts) == ("mean (no file says: the default)", "none")
    assert found.normalization == "none in the model; on request, by default"
    assert found.verified == UNVERIFIED
    assert found.differs[0].startswith("vectors get unit length unless a request says")


def test_a_shipped_graph_of_normalized_vectors(store: Store, tmp_path: Path) -> None:
    """Without weights it is compared with itself."""
    folder = checkpoint(tmp_path / "model", pooling=MEAN)
    (folder / "model.safetensors").unlink()
    ship(folder, outputs=("sentence_embedding",))
    found = explain(stored(folder, store))
    assert (found.way, found.weights) == ("the model's own onnx/model.onnx (pooled)", ("onnx/model.onnx",))
    refused, itself, _ = found.differs
    assert "only normalized vectors" in refused
    assert "agrees with itself" in itself


def test_heads(store: Store, tmp_path: Path) -> None:
    found = explain(stored(head_checkpoints.m3(tmp_path / "model"), store))
    assert "sparse, multi (" in found.vectors
    assert "sparse_linear.safetensors" in found.weights


def test_a_classifier(store: Store, tmp_path: Path) -> None:
    found = explain(stored(classifiers.classifier(tmp_path / "model", labels=3), store))
    assert found.scores == "of texts: 3 labels, softmax activation"
    assert (found.vectors, found.pooling, found.normalization) == ("", "", "")


def test_static_embeddings(store: Store, tmp_path: Path) -> None:
    found = explain(stored(head_checkpoints.static(tmp_path / "model"), store))
    assert found.family == "a table of static embeddings"


def test_a_dual_encoder(store: Store, tmp_path: Path) -> None:
    found = explain(stored(towers(tmp_path / "model", "clip"), store))
    assert found.family.startswith("clip")
    assert "pixels, in image.onnx" in found.images


@pytest.mark.parametrize("changed", [True, False])
def test_a_folder_that_has_changed_or_gone(store: Store, tmp_path: Path, changed: bool) -> None:
    """The manifest alone explains the rest."""
    folder = checkpoint(tmp_path / "model")
    model = stored(folder, store, engine=None)
    if changed:
        write_json(folder / "config.json", {"model_type": "bert"})
    else:
        shutil.rmtree(folder)
    found = explain(model)
    assert (found.family, found.settings) == ("unknown", ())
    assert found.max_length == "32 tokens with special ones"
    assert found.weights == ("model.safetensors",)
