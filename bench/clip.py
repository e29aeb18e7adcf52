"""A CLIP of random weights as a folder of files, as transformers saves one: of ViT-B-32's shape, or of any other.

Its vectors mean nothing; what it costs is what the real one costs. The vocabulary is small: its table is looked up, not
multiplied.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

START, END = "<|startoftext|>", "<|endoftext|>"
CHARACTERS = string.ascii_lowercase + string.digits + string.punctuation
WORDS = (*CHARACTERS, *(f"{each}</w>" for each in CHARACTERS), START, END)
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int

    @property
    def intermediate_size(self) -> int:
        return 4 * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`image_size` and `patch_size` in pixels, `context` in tokens."""

    text: Tower = Tower(hidden_size=512, num_hidden_layers=12, num_attention_heads=8)
    image: Tower = Tower(hidden_size=768, num_hidden_layers=12, num_attention_heads=12)
    dimension: int = 512
    image_size: int = 224
    patch_size: int = 32
    context: int = 77

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


VIT_B_32 = Shape()
TINY = Shape(
    text=Tower(hidden_size=16, num_hidden_layers=1, num_attention_heads=2),
    image=Tower(hidden_size=24, num_hidden_layers=1, num_attention_heads=2),
    dimension=8,
    image_size=32,
    patch_size=16,
)


def write_clip(folder: Path, shape: Shape = VIT_B_32, seed: int = 1) -> Path:
    """The whole model; answers the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = asdict(shape.text) | {"intermediate_size": shape.text.intermediate_size, "vocab_size": len(WORDS)}
    text |= {"max_position_embeddings": shape.context, "eos_token_id": WORDS.index(END)}
    text |= {"bos_token_id": WORDS.index(START), "hidden_act": "quick_gelu"}
    image = asdict(shape.image) | {"intermediate_size": shape.image.intermediate_size, "hidden_act": "quick_gelu"}
    image |= {"image_size": shape.image_size, "patch_size": shape.patch_size}
    config = {"model_type": "clip", "projection_dim": shape.dimension, "text_config": text, "vision_config": image}
    square = {"height": shape.image_size, "width": shape.image_size}
    processor: dict[str, Any] = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": shape.image_size},
    }
    processor |= {"crop_size": square, "resample": 3, "image_mean": MEAN, "image_std": STD, "do_convert_rgb": True}
    _json(folder / "config.json", config)
    _json(folder / "preprocessor_config.json", processor)
    _json(folder / "tokenizer_config.json", {"tokenizer_class": "CLIPTokenizer", "model_max_length": shape.context})
    _tokenizer().save(str(folder / "tokenizer.json"))
    save_file(dict(_tensors(shape, seed)), folder / "model.safetensors")
    return folder


def _json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


def _tokenizer() -> Tokenizer:
    """Every character a token, the last one of a word another."""
    made = Tokenizer(
        models.BPE({word: place for place, word in enumerate(WORDS)}, [], unk_token=END, end_of_word_suffix="</w>")
    )
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(each, normalized=False) for each in (START, END)])
    made.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(each, WORDS.index(each)) for each in (START, END)]
    )
    return made


def _tensors(shape: Shape, seed: int) -> Iterator[tuple[str, Any]]:
    """Small enough weights that twelve layers stay finite in bf16, large enough that all of them matter."""
    random = np.random.default_rng(seed)

    def normal(*size: int) -> Any:
        return random.standard_normal(size, dtype=np.float32) * np.float32(0.6 / max(1, size[-1]) ** 0.5)

    def norm(name: str, width: int) -> Iterator[tuple[str, Any]]:
        yield f"{name}.weight", 1 + normal(width)
        yield f"{name}.bias", normal(width)

    def tower(name: str, sizes: Tower) -> Iterator[tuple[str, Any]]:
        width, inner = sizes.hidden_size, sizes.intermediate_size
        matrices = {f"self_attn.{each}_proj": (width, width) for each in ("q", "k", "v", "out")}
        matrices |= {"mlp.fc1": (inner, width), "mlp.fc2": (width, inner)}
        for layer in range(sizes.num_hidden_layers):
            at = f"{name}.encoder.layers.{layer}"
            yield from norm(f"{at}.layer_norm1", width)
            yield from norm(f"{at}.layer_norm2", width)
            for each, size in matrices.items():
                yield f"{at}.{each}.weight", normal(*size)
                yield f"{at}.{each}.bias", normal(size[0])

    text, image = shape.text.hidden_size, shape.image.hidden_size
    yield "text_model.embeddings.token_embedding.weight", normal(len(WORDS), text)
    yield "text_model.embeddings.position_embedding.weight", normal(shape.context, text)
    yield from tower("text_model", shape.text)
    yield from norm("text_model.final_layer_norm", text)
    yield "vision_model.embeddings.class_embedding", normal(image)
    yield "vision_model.embeddings.patch_embedding.weight", normal(image, 3, shape.patch_size, shape.patch_size)
    yield "vision_model.embeddings.position_embedding.weight", normal(shape.patches + 1, image)
    yield from norm("vision_model.pre_layrnorm", image)
    yield from tower("vision_model", shape.image)
    yield from norm("vision_model.post_layernorm", image)
    yield "text_projection.weight", normal(shape.dimension, text)
    yield "visual_projection.weight", normal(shape.dimension, image)
    yield "logit_scale", np.array(np.log(100.0), np.float32)
