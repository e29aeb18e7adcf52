"""CLIP and SigLIP: both graphs, and the numpy passes that verify them, against transformers' models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTokenizer,
    Siglip2Config,
    Siglip2Model,
    Siglip2Tokenizer,
    SiglipConfig,
    SiglipModel,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from shoal.core.protocols import EngineFacts, Prepared
from shoal.errors import ModelFileError
from shoal.models.convert.contract.tower_types import IMAGE_EMBEDS, PIXELS, TEXT_EMBEDS, Towers
from shoal.models.convert.contract.tower_weights import read_contrast
from shoal.models.convert.contract.towers import read_towers
from shoal.models.convert.dual_encoder_reference import embed_images, embed_texts
from shoal.models.convert.graphs.towers import build_text_tower
from shoal.models.convert.graphs.vision import build_image_tower
from shoal.models.convert.verify import min_cosine
from shoal.pipelines.text.tokenizer import TextTokenizer
from shoal.pipelines.text.tokens import TextPipeline
from shoal.types import Array, Embed
from tests.unit.models.engines import RUNS

pytestmark = pytest.mark.parity

TEXTS = ["fish", "A picture of FISH, swimming!", "", "a harbour by night  in the rain " * 9, "two  cats"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIZE = 20


@dataclass(frozen=True)
class Case:
    """`legacy`: the wrong end-of-text token, as written before transformers 4.31."""

    name: str
    family: str = "clip"
    activation: str = "quick_gelu"
    legacy: bool = False
    patch: int = 5


CASES = (
    Case("clip-quick"),
    Case("clip-gelu", activation="gelu"),
    Case("clip-legacy-end", legacy=True),
    Case("clip-rest-of-a-patch", patch=8),
    Case("siglip", "siglip", "gelu_pytorch_tanh"),
    Case("siglip-quick", "siglip", "quick_gelu", patch=8),
)


class Model(NamedTuple):
    folder: Path
    towers: Towers
    reference: Any
    tokenizer: Any

    def ids(self, texts: list[str]) -> Array:
        """Return the ids that transformers prepares."""
        padding = "longest" if self.towers.family == "clip" else "max_length"
        length = self.towers.text_spec.max_tokens
        got = self.tokenizer(texts, padding=padding, truncation=True, max_length=length, padding_side="right")
        return np.array(got["input_ids"], np.int64)

    def texts(self, ids: Array) -> Array:
        with torch.no_grad():
            return np.asarray(self.reference.get_text_features(torch.from_numpy(ids)).pooler_output)

    def images(self, pixels: Array) -> Array:
        with torch.no_grad():
            return np.asarray(self.reference.get_image_features(torch.from_numpy(pixels)).pooler_output)


def write(case: Case, folder: Path) -> Model:
    torch.manual_seed(3)
    tokenizer = _clip_tokenizer() if case.family == "clip" else _gemma_tokenizer()
    size = len(tokenizer)
    shared = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_act": case.activation}
    text = shared | {"vocab_size": size, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 24}
    text |= {"eos_token_id": 2 if case.legacy else size - 1, "bos_token_id": size - 2}
    image = shared | {"hidden_size": 24, "intermediate_size": 40, "image_size": SIZE, "patch_size": case.patch}
    model: Any
    if case.family == "clip":
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=20))
        processor: Any = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    else:
        model = SiglipModel(SiglipConfig(text_config=text | {"projection_size": 24}, vision_config=image))
        processor = SiglipImageProcessorPil(size={"height": SIZE, "width": SIZE})
    with torch.no_grad():
        for parameter in model.parameters():  # fresh norms and biases are ones and zeros, which would prove nothing
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if case.family == "siglip":
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"padding_side": "right"}))
    return Model(folder, read_towers(folder), model, tokenizer)


def _clip_tokenizer() -> Any:
    pieces = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "!</w>", ",</w>", "fi", "fish</w>"]
    words = [*pieces, "<|startoftext|>", "<|endoftext|>"]
    merges = [("f", "i")]
    return CLIPTokenizer(vocab={word: place for place, word in enumerate(words)}, merges=merges)


def _gemma_tokenizer() -> Any:
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *LETTERS, "▁", ",", "!", "fi"]
    tokenizer = Siglip2Tokenizer(vocab={word: place for place, word in enumerate(words)}, merges=[("f", "i")])
    # Published models have the end of text in their tokenizer.json.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    return tokenizer


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    return write(request.param, tmp_path)


def run_text(model: Model, engine: str, ids: Array) -> Array:
    path = model.folder / "text.onnx"
    build_text_tower(model.folder, model.towers, path)
    return RUNS[engine](path)({"input_ids": ids}, (TEXT_EMBEDS,))[TEXT_EMBEDS]


def close(got: Array, expected: Array) -> None:
    assert got.shape == expected.shape
    assert got.dtype == np.float32
    assert min_cosine(got, expected) >= 0.9999999
    assert np.abs(got - expected).max() <= 2e-5 * max(1.0, float(np.abs(expected).max()))


@pytest.mark.parametrize("engine", RUNS)
def test_texts_have_the_vectors_of_transformers(model: Model, engine: str) -> None:
    """Short, empty, and over the context, in one batch and alone."""
    ids = model.ids(TEXTS)
    assert ids.shape[1] == model.towers.text_spec.max_tokens
    expected = model.texts(ids)
    close(run_text(model, engine, ids), expected)
    close(run_text(model, engine, ids[1:2]), expected[1:2])
    close(embed_texts(model.folder, model.towers, list(ids)).astype(np.float32), expected)


@pytest.mark.parametrize("engine", RUNS)
def test_images_have_the_vectors_of_transformers(model: Model, engine: str) -> None:
    path = model.folder / "image.onnx"
    build_image_tower(model.folder, model.towers, path)
    pixels = np.random.default_rng(1).standard_normal((3, 3, SIZE, SIZE)).astype(np.float32)
    expected = model.images(pixels)
    run = RUNS[engine](path)
    close(run({PIXELS: pixels}, (IMAGE_EMBEDS,))[IMAGE_EMBEDS], expected)
    close(run({PIXELS: pixels[2:]}, (IMAGE_EMBEDS,))[IMAGE_EMBEDS], expected[2:])
    close(embed_images(model.folder, model.towers, pixels).astype(np.float32), expected)


def test_scores_are_those_of_transformers(model: Model) -> None:
    """Cosine, times the scale, plus the bias."""
    scoring = read_contrast(model.folder, model.towers)
    ids = model.ids(TEXTS[:2])
    pixels = np.random.default_rng(2).standard_normal((2, 3, SIZE, SIZE)).astype(np.float32)
    with torch.no_grad():
        expected = model.reference(input_ids=torch.from_numpy(ids), pixel_values=torch.from_numpy(pixels))
    texts, images = (
        rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (model.texts(ids), model.images(pixels))
    )
    got = images @ texts.T * scoring.scale + scoring.bias
    assert np.allclose(got, expected.logits_per_image.numpy(), atol=1e-4)
    assert scoring.activation == ("softmax" if model.towers.family == "clip" else "sigmoid")


def test_the_tokenizer_alone_gives_the_ids_of_transformers(model: Model) -> None:
    """From tokenizer.json and the TextSpec, keeping the end of text when cut."""
    spec = model.towers.text_spec
    tokenizer = TextTokenizer(model.folder, spec.tokenizer, lower_case=spec.lower_case)
    expected = model.ids(TEXTS)
    for row, fitted in zip(expected, tokenizer.fit(TEXTS, ["right"] * len(TEXTS), spec.max_tokens), strict=True):
        assert fitted.ids == [*row[: len(fitted.ids)]]
        if spec.pad_to:
            assert set(row[len(fitted.ids) :]) <= {spec.pad_id}


def test_the_text_pipeline_gives_the_vectors_of_transformers(model: Model) -> None:
    """Batches of mixed lengths, padded as the TextSpec says, normalized to unit vectors."""
    spec = model.towers.text_spec
    path = model.folder / "text.onnx"
    build_text_tower(model.folder, model.towers, path)
    run = RUNS["openvino"](path)
    pipeline = TextPipeline(model.folder, spec, truncate=True)
    facts = EngineFacts(name="parity", inputs=spec.inputs, outputs=spec.outputs, length_buckets=(4, 8, 64))
    expected = model.texts(model.ids(TEXTS))
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    task = Embed(model="m", inputs=[*TEXTS], normalize=True)
    for places in ([0, 1, 2], [3, 4], [0]):
        items = [one for one in pipeline.prepare([(task, TEXTS[i]) for i in places]) if isinstance(one, Prepared)]
        rows = pipeline.finish(run(pipeline.collate(items, facts), spec.outputs), items)
        close(np.stack([np.asarray(row) for row in rows]), expected[places])


@pytest.mark.parametrize("case", [case for case in CASES if case.family == "siglip"], ids=lambda case: case.name)
def test_wrong_padding_is_detected(case: Case, tmp_path: Path) -> None:
    """SigLIP without its padding, or with another padding token, gives another vector."""
    model = write(case, tmp_path)
    spec = model.towers.text_spec
    ids = model.ids(["fish"])
    expected = model.texts(ids)
    length = int((ids != spec.pad_id).sum())
    assert spec.pad_to == ids.shape[1] > length
    assert min_cosine(run_text(model, "onnxruntime", ids[:, :length]), expected) < 0.99
    other = np.where(ids == spec.pad_id, 1, ids)  # the end of text, as config.json's default has it
    assert min_cosine(run_text(model, "onnxruntime", other), expected) < 0.999


@pytest.mark.parametrize("legacy", [False, True])
def test_padding_changes_nothing_for_clip_and_pooling_elsewhere_does(tmp_path: Path, legacy: bool) -> None:
    model = write(Case("clip", legacy=legacy), tmp_path)
    spec = model.towers.text_spec
    ids = model.ids(["fish"])
    expected = model.texts(ids)
    padded = np.pad(ids, ((0, 0), (0, 9)), constant_values=spec.pad_id)
    close(run_text(model, "onnxruntime", padded), expected)
    longer = np.pad(ids, ((0, 0), (0, 9)), constant_values=ids[0, -1])  # padded with end-of-text tokens, as OpenAI's
    close(run_text(model, "onnxruntime", longer), expected)
    elsewhere = ids.copy()
    elsewhere[0, 1] = ids[0, -1]
    assert min_cosine(run_text(model, "onnxruntime", elsewhere), expected) < 0.999
    close(run_text(model, "onnxruntime", elsewhere), model.texts(elsewhere))


def test_a_text_without_an_end_is_pooled_at_its_start_as_by_transformers(tmp_path: Path) -> None:
    model = write(Case("clip"), tmp_path)
    ids = np.array([[3, 4, 5]], np.int64)
    close(run_text(model, "onnxruntime", ids), model.texts(ids))


def test_siglip2_for_images_of_any_shape_is_refused_by_name(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Siglip2Config(text_config=small | {"vocab_size": 40}, vision_config=small | {"num_patches": 16})
    Siglip2Model(config).save_pretrained(tmp_path)
    with pytest.raises(ModelFileError, match=r"config\.json: model_type: 'siglip2' .*fixed resolution"):
        read_towers(tmp_path)
