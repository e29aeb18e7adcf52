"""open_clip's layout, and sentence-transformers' of CLIP, against transformers' models of the same weights.

A random model of transformers is written under open_clip's names, as open_clip publishes the conversion; real open_clip
is compared where it is installed, by the tests of the convert extra.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import CLIPTokenizer

from shoal.core.protocols import EngineFacts, Prepared
from shoal.models.convert.contract import open_clip as reader
from shoal.models.convert.contract.tower_tokenizer import write_tower_tokenizer
from shoal.models.convert.contract.tower_types import IMAGE_EMBEDS, PIXELS, TEXT_EMBEDS, Towers
from shoal.models.convert.contract.tower_weights import read_contrast
from shoal.models.convert.contract.towers import read_towers
from shoal.models.convert.dual_encoder_reference import embed_images, embed_texts
from shoal.models.convert.graphs.towers import build_text_tower
from shoal.models.convert.graphs.vision import build_image_tower
from shoal.models.convert.verify import min_cosine
from shoal.models.convert.verify_dual_encoder import verify_images, verify_texts
from shoal.pipelines.text.tokenizer import TextTokenizer
from shoal.pipelines.text.tokens import TextPipeline
from shoal.types import Array, Embed
from tests.parity.test_towers import LETTERS, SIZE, TEXTS, Case, Model, write
from tests.unit.models.engines import RUNS
from tests.unit.models.open_clip_checkpoints import CONFIG, WEIGHTS, clip_names, siglip_names

pytestmark = pytest.mark.parity

CASES = (
    Case("quick", activation="quick_gelu"),
    Case("gelu", activation="gelu"),
    Case("rest-of-a-patch", activation="gelu", patch=8),
    Case("siglip", "siglip", "gelu"),
    Case("siglip-tanh", "siglip", "gelu_pytorch_tanh"),
)


class Pair(NamedTuple):
    """The same weights twice: `ours` in open_clip's layout."""

    theirs: Model
    folder: Path
    ours: Towers


def text_config(model: Model, case: Case) -> dict[str, Any]:
    tower = model.towers.text
    config = {"context_length": tower.max_positions, "vocab_size": tower.vocab_size, "width": tower.hidden}
    config |= {"heads": tower.heads, "layers": tower.layers}
    fields: dict[str, Any] = {"mlp_ratio": tower.intermediate / tower.hidden}
    if case.family == "siglip":
        fields |= {"hf_tokenizer_name": "org/name", "no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
        fields |= {"norm_kwargs": {"eps": 1e-6}}
        fields |= {"act_kwargs": {"approximate": "tanh"}} if case.activation == "gelu_pytorch_tanh" else {}
    return config | fields


def image_config(model: Model, case: Case, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    tower = model.towers.image
    ratio = tower.intermediate / tower.hidden + 1e-9
    if case.family == "clip":
        config = {"image_size": tower.size, "patch_size": tower.patch, "width": tower.hidden, "layers": tower.layers}
        return config | {"head_width": tower.hidden // tower.heads, "mlp_ratio": ratio}
    kind, patch = ("giantopt", 16) if case.activation == "gelu_pytorch_tanh" else ("base", tower.patch)
    monkeypatch.setitem(reader._TRUNKS, kind, reader._Trunk(tower.hidden, tower.layers, tower.heads, ratio))
    name = f"vit_{kind}_patch{patch}_siglip_{tower.size}"
    return {"image_size": tower.size, "timm_model_name": name, "timm_pool": "map", "timm_proj": "none"}


def published(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    theirs = write(case, tmp_path / "transformers")
    folder = tmp_path / "open_clip"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((theirs.folder / name).read_bytes())
    names = clip_names if case.family == "clip" else siglip_names
    save_file(names(load_file(theirs.folder / "model.safetensors")), folder / WEIGHTS)
    model = {"embed_dim": theirs.towers.dimension, "vision_cfg": image_config(theirs, case, monkeypatch)}
    model |= {"text_cfg": text_config(theirs, case), "quick_gelu": case.activation == "quick_gelu"}
    preprocess = {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"} if case.family == "siglip" else {}
    (folder / CONFIG).write_text(json.dumps({"model_cfg": model, "preprocess_cfg": preprocess}), encoding="utf-8")
    return Pair(theirs, folder, read_towers(folder))


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    case = request.param
    if case.activation == "gelu_pytorch_tanh":
        case = Case(case.name, case.family, case.activation, patch=16)  # as timm's towers that have it
    return published(case, tmp_path, monkeypatch)


def close(got: Array, expected: Array) -> None:
    assert got.shape == expected.shape
    assert got.dtype == np.float32
    assert min_cosine(got, expected) >= 0.9999999
    assert np.abs(got - expected).max() <= 2e-5 * max(1.0, float(np.abs(expected).max()))


def test_the_configuration_is_read_as_by_transformers(pair: Pair) -> None:
    theirs, ours = pair.theirs.towers, pair.ours
    assert ours.layout == "open_clip"
    # torchvision, with which open_clip prepares images, rounds the middle of an odd remainder differently.
    steps = msgspec.structs.replace(theirs.image_spec, centre="even")
    assert (ours.family, ours.dimension, ours.image_spec) == (theirs.family, theirs.dimension, steps)
    assert ours.image == theirs.image
    assert ours.text_spec.max_tokens == theirs.text_spec.max_tokens
    assert read_contrast(pair.folder, ours) == read_contrast(pair.theirs.folder, theirs)


@pytest.mark.parametrize("engine", RUNS)
def test_texts_have_the_vectors_of_transformers(pair: Pair, engine: str) -> None:
    path = pair.folder / "text.onnx"
    build_text_tower(pair.folder, pair.ours, path)
    run = RUNS[engine](path)
    ids = pair.theirs.ids(TEXTS)
    expected = pair.theirs.texts(ids)
    close(run({"input_ids": ids}, (TEXT_EMBEDS,))[TEXT_EMBEDS], expected)
    close(embed_texts(pair.folder, pair.ours, list(ids)).astype(np.float32), expected)
    assert verify_texts(pair.folder, pair.ours, pair.folder, run).passed


@pytest.mark.parametrize("engine", RUNS)
def test_images_have_the_vectors_of_transformers(pair: Pair, engine: str) -> None:
    path = pair.folder / "image.onnx"
    build_image_tower(pair.folder, pair.ours, path)
    run = RUNS[engine](path)
    pixels = np.random.default_rng(1).standard_normal((3, 3, SIZE, SIZE)).astype(np.float32)
    expected = pair.theirs.images(pixels)
    close(run({PIXELS: pixels}, (IMAGE_EMBEDS,))[IMAGE_EMBEDS], expected)
    close(embed_images(pair.folder, pair.ours, pixels).astype(np.float32), expected)
    assert verify_images(pair.folder, pair.ours, run).passed


def test_the_text_pipeline_gives_the_vectors_of_transformers(pair: Pair) -> None:
    """Texts of any length, keeping the end token when cut, padded as each family requires."""
    spec = pair.ours.text_spec
    path = pair.folder / "text.onnx"
    build_text_tower(pair.folder, pair.ours, path)
    pipeline = TextPipeline(pair.folder, spec, truncate=True)
    facts = EngineFacts(name="parity", inputs=spec.inputs, outputs=spec.outputs, length_buckets=(4, 8, 64))
    expected = pair.theirs.texts(pair.theirs.ids(TEXTS))
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    task = Embed(model="m", inputs=[*TEXTS], normalize=True)
    # open_clip also cleans white space and lower-cases SigLIP's texts; texts without either are unaffected.
    places = [
        i for i, text in enumerate(TEXTS) if pair.ours.family == "clip" or (text == text.lower() and "  " not in text)
    ]
    assert len(places) > 1
    items = [one for one in pipeline.prepare([(task, TEXTS[i]) for i in places]) if isinstance(one, Prepared)]
    rows = pipeline.finish(RUNS["openvino"](path)(pipeline.collate(items, facts), spec.outputs), items)
    close(np.stack([np.asarray(row) for row in rows]), expected[places])


def test_a_tokenizer_of_vocabulary_and_merges_is_transformers(tmp_path: Path) -> None:
    words = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "!</w>", ",</w>", "1</w>", "'", "fi", "fish</w>"]
    vocabulary = {word: place for place, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    theirs: Any = CLIPTokenizer(vocab=vocabulary, merges=[("f", "i")])
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nf i\n", encoding="utf-8")
    write_tower_tokenizer(tmp_path, tmp_path / "tokenizer.json", family="clip")
    ours = TextTokenizer(tmp_path, "tokenizer.json")
    texts = [
        *TEXTS,
        "it's  1 caf\u0065\u0301,\u00a0<|endoftext|> FISH's\u3000b!!",
        "\u0130\u00df\ufb01 \U0001f41f",
        "<|STARTOFTEXT|>",
    ]
    for text, fitted in zip(texts, ours.fit(texts, ["right"] * len(texts), 16), strict=True):
        assert fitted.ids == theirs(text, truncation=True, max_length=16)["input_ids"], text


def test_sentence_transformers_older_layout(tmp_path: Path) -> None:
    """The folder of its only module, against the library itself."""
    inner = tmp_path / "0_CLIPModel"
    write(Case("clip"), inner)
    settings = json.loads((inner / "tokenizer_config.json").read_text(encoding="utf-8"))
    limited = settings | {"model_max_length": 24}  # published ones have it
    (inner / "tokenizer_config.json").write_text(json.dumps(limited), encoding="utf-8")
    listed = [{"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}]
    (tmp_path / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    layout = read_towers(tmp_path)
    assert layout.path == "0_CLIPModel"
    build_text_tower(tmp_path, layout, tmp_path / "text.onnx")
    write_tower_tokenizer(tmp_path, tmp_path / "tokenizer.json", family=layout.family, path=layout.path)
    pipeline = TextPipeline(tmp_path, layout.text_spec, truncate=True)
    facts = EngineFacts(name="parity", inputs=("input_ids",), outputs=layout.text_spec.outputs, length_buckets=(64,))
    task = Embed(model="m", inputs=[*TEXTS], normalize=False)
    items = [one for one in pipeline.prepare([(task, text) for text in TEXTS]) if isinstance(one, Prepared)]
    run = RUNS["onnxruntime"](tmp_path / "text.onnx")
    rows = pipeline.finish(run(pipeline.collate(items, facts), layout.text_spec.outputs), items)
    with torch.no_grad():
        expected = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    close(np.stack([np.asarray(row) for row in rows]), np.asarray(expected))
