"""Tiny random dual encoders as folders in transformers' layout; no PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from shoal.types import Array
from tests.unit.models.checkpoints import write_json

FAMILIES = ("clip", "siglip")
TEXT_HIDDEN, IMAGE_HIDDEN, INNER, LAYERS, HEADS = 12, 16, 20, 2, 2
CONTEXT, SIZE, PATCH = 14, 10, 4
LETTERS = "abcdefghijklmnopqrstuvwxyz,!"
WORDS = {"clip": [*LETTERS, "<start>", "<end>"], "siglip": ["<pad>", "<eos>", "<bos>", "<unk>", *LETTERS, "▁"]}
MEAN, STD = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]


def towers(
    folder: Path,
    family: str = "clip",
    *,
    config: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    processor: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """Write a whole model; the dictionaries override values of its files, and None removes a key."""
    shared = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": INNER}
    size = len(WORDS[family])
    texts = shared | {"vocab_size": size, "hidden_size": TEXT_HIDDEN, "max_position_embeddings": CONTEXT}
    texts |= {"eos_token_id": size - 1} if family == "clip" else {"projection_size": IMAGE_HIDDEN}
    image_config = shared | {"hidden_size": IMAGE_HIDDEN, "image_size": SIZE, "patch_size": PATCH}
    whole: dict[str, Any] = {"model_type": family, "text_config": _over(texts, text)}
    whole |= {"vision_config": _over(image_config, vision)} | ({"projection_dim": 8} if family == "clip" else {})
    write_json(folder / "config.json", _over(whole, config))
    prepared: dict[str, Any] = {"image_mean": MEAN, "image_std": STD, "resample": 3}
    if family == "clip":
        prepared |= {"size": SIZE, "crop_size": SIZE, "feature_extractor_type": "CLIPFeatureExtractor"}
    else:
        prepared |= {"size": {"height": SIZE, "width": SIZE}, "image_processor_type": "SiglipImageProcessor"}
    write_json(folder / "preprocessor_config.json", _over(prepared, processor))
    kind = {"tokenizer_class": "CLIPTokenizer"}
    if family == "siglip":
        kind = {"tokenizer_class": "GemmaTokenizer", "padding_side": "right", "pad_token": "<pad>"}
    write_json(folder / "tokenizer_config.json", _over(kind | {"model_max_length": 1e30}, settings))
    tokenizer(family).save(str(folder / "tokenizer.json"))
    save_file(tensors(family), folder / "model.safetensors")
    return folder


def _over(data: dict[str, Any], changes: dict[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (data | (changes or {})).items() if value is not None}


def tokenizer(family: str) -> Tokenizer:
    words = {word: place for place, word in enumerate(WORDS[family])}
    start, end = ("<start>", "<end>") if family == "clip" else ("", "<eos>")
    tiny_tokenizer = Tokenizer(models.BPE(words, [], unk_token=end))
    if family == "clip":
        tiny_tokenizer.normalizer = normalizers.Lowercase()
        tiny_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        tiny_tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tiny_tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in words if each.startswith("<")])
    tiny_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}".strip(), special_tokens=[(each, words[each]) for each in (start, end) if each]
    )
    # What a published tokenizer.json often carries, and what must not decide on the lengths.
    tiny_tokenizer.enable_padding(length=CONTEXT, pad_id=0, pad_token=WORDS[family][0])
    return tiny_tokenizer


def tensors(family: str) -> dict[str, Array]:
    """Weights large enough for attention and activations to affect the result."""
    random = np.random.default_rng(11)
    weights: dict[str, Array] = {}

    def normal(name: str, *shape: int) -> None:
        weights[name] = (random.standard_normal(shape) * 0.4).astype(np.float32)

    def pair(name: str, *shape: int) -> None:
        normal(f"{name}.weight", *shape)
        normal(f"{name}.bias", shape[0])

    def norm(name: str, width: int) -> None:
        pair(name, width)
        weights[f"{name}.weight"] += 1

    def layers(prefix: str, width: int) -> None:
        for layer in range(LAYERS):
            at = f"{prefix}encoder.layers.{layer}"
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                pair(f"{at}.self_attn.{name}", width, width)
            norm(f"{at}.layer_norm1", width)
            norm(f"{at}.layer_norm2", width)
            pair(f"{at}.mlp.fc1", INNER, width)
            pair(f"{at}.mlp.fc2", width, INNER)

    clip, patches = family == "clip", (SIZE // PATCH) ** 2
    normal("text_model.embeddings.token_embedding.weight", len(WORDS[family]), TEXT_HIDDEN)
    normal("text_model.embeddings.position_embedding.weight", CONTEXT, TEXT_HIDDEN)
    layers("text_model.", TEXT_HIDDEN)
    norm("text_model.final_layer_norm", TEXT_HIDDEN)
    normal("vision_model.embeddings.patch_embedding.weight", IMAGE_HIDDEN, 3, PATCH, PATCH)
    normal("vision_model.embeddings.position_embedding.weight", patches + clip, IMAGE_HIDDEN)
    layers("vision_model.", IMAGE_HIDDEN)
    norm("vision_model.post_layernorm", IMAGE_HIDDEN)
    if clip:
        normal("vision_model.embeddings.class_embedding", IMAGE_HIDDEN)
        norm("vision_model.pre_layrnorm", IMAGE_HIDDEN)
        normal("text_projection.weight", 8, TEXT_HIDDEN)
        normal("visual_projection.weight", 8, IMAGE_HIDDEN)
        return weights | {"logit_scale": np.array(np.log(100.0), np.float32)}
    normal("vision_model.embeddings.patch_embedding.bias", IMAGE_HIDDEN)
    pair("text_model.head", IMAGE_HIDDEN, TEXT_HIDDEN)
    normal("vision_model.head.probe", 1, 1, IMAGE_HIDDEN)
    normal("vision_model.head.attention.in_proj_weight", 3 * IMAGE_HIDDEN, IMAGE_HIDDEN)
    normal("vision_model.head.attention.in_proj_bias", 3 * IMAGE_HIDDEN)
    pair("vision_model.head.attention.out_proj", IMAGE_HIDDEN, IMAGE_HIDDEN)
    norm("vision_model.head.layernorm", IMAGE_HIDDEN)
    pair("vision_model.head.mlp.fc1", INNER, IMAGE_HIDDEN)
    pair("vision_model.head.mlp.fc2", IMAGE_HIDDEN, INNER)
    return weights | {"logit_scale": np.array([np.log(10.0)], np.float32), "logit_bias": np.array([-12.5], np.float32)}
