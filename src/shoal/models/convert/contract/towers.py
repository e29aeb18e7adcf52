"""Read dual encoders, CLIP and SigLIP: the files that describe them, and how texts and images are prepared. This module
reads transformers' files, with transformers as the reference for every default; `open_clip` reads the other layout. A
folder with both is read as transformers' if its weights are there.

The files are in the model's folder, or in that of sentence-transformers' only module (CLIPModel).

SigLIP 2 of a fixed resolution is a "siglip" by its config.json, with another tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.errors import ModelFileError
from shoal.models.convert.contract.entries import MODULES, inner_path
from shoal.models.convert.contract.families.fields import read_activation
from shoal.models.convert.contract.image_processor import FILE, UNIFIED, read_image_spec
from shoal.models.convert.contract.json_file import JsonFile, is_there, read_json, read_object
from shoal.models.convert.contract.open_clip import read_open_clip
from shoal.models.convert.contract.tower_tokenizer import read_tower_tokenizer
from shoal.models.convert.contract.tower_types import ImageTower, Layout, TextTower, TowerFamily, Towers, text_spec
from shoal.models.convert.contract.weights import has_weights
from shoal.models.sources.select import OPEN_CLIP, OPEN_CLIP_WEIGHTS

CONFIG = "config.json"
_LEGACY_EOS = 2
"""A wrong value in CLIP's configurations before transformers 4.31; such models are pooled at the highest id."""

_TEXT = "text_config"
_VISION = "vision_config"
_SIZES = {"intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_VISION_SIZES = {"hidden_size": 768, "num_channels": 3, "image_size": 224}
_CLIP = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_DEFAULTS: dict[TowerFamily, dict[str, dict[str, Any]]] = {
    "clip": {
        _TEXT: _CLIP
        | {
            "vocab_size": 49408,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "max_position_embeddings": 77,
            "eos_token_id": 49407,
        },
        _VISION: _CLIP | _SIZES | _VISION_SIZES | {"patch_size": 32},
    },
    "siglip": {
        _TEXT: _SIGLIP | _SIZES | {"vocab_size": 32000, "hidden_size": 768, "max_position_embeddings": 64},
        _VISION: _SIGLIP | _SIZES | _VISION_SIZES | {"patch_size": 16, "vision_use_head": True},
    },
}
"""Defaults of transformers 5 for missing settings; files from older versions omit defaults."""

_MODULE = "CLIPModel"
_NEWER = "Transformer"
"""sentence-transformers' old and new names for the module with two towers."""

_ARCHITECTURES = {"clip": ("CLIPModel",), "siglip": ("SiglipModel",)}
_INSTEAD = {
    "siglip2": "accepts images of any shape (NaFlex); use a SigLIP 2 with a fixed resolution, such as "
    "google/siglip2-base-patch16-224, whose model_type is 'siglip'",
    "jina_clip": "has towers of its own, which Shoal does not build; use openai/clip-vit-base-patch32 or "
    "google/siglip2-base-patch16-224, or for texts alone jinaai/jina-embeddings-v3",
    "qwen2_5_vl": "is a language model that sees, without towers; use google/siglip2-base-patch16-224 for texts and "
    "images, jinaai/jina-embeddings-v3 for texts, or serve this model with vLLM and give Shoal the address",
    "clip_text_model": "is only the text tower; use the repository of the whole model",
    "clip_vision_model": "is only the image tower; use the repository of the whole model",
    "siglip_text_model": "is only the text tower; use the repository of the whole model",
    "siglip_vision_model": "is only the image tower; use the repository of the whole model",
}


def has_towers(folder: Path) -> bool:
    """Whether the folder contains a dual encoder, supported or not. Raises ModelFileError for a file that is not
    JSON."""
    modules = _modules(folder)
    path = _path(modules)
    if modules and modules[0]["type"].split(".")[-1] == _MODULE:
        return True
    return is_there(folder, _prefix(path) + OPEN_CLIP) or _is_of_transformers(
        read_object(folder, _prefix(path) + CONFIG)
    )


def read_towers(folder: Path) -> Towers:
    """Read and check every file that determines the vectors, except the weights.

    Raises ModelFileError, naming file and key, for missing, malformed, unknown or contradictory content.
    """
    modules = _modules(folder)
    if len(modules) > 1:
        raise ModelFileError(
            f"a {modules[1]['type']} after the two towers is not supported; serve the model without it",
            file=MODULES,
            key="[1].type",
        )
    path = _path(modules)
    config = read_object(folder, _prefix(path) + CONFIG)
    if _layout(folder, path, config) == "open_clip":
        return read_open_clip(folder, path)
    if config is None:
        raise ModelFileError(
            "is missing; this is not a transformers model, or it is incomplete", file=_prefix(path) + CONFIG
        )
    family = _family(config)
    text_config, image_config = _section(config, family, _TEXT), _section(config, family, _VISION)
    text, image = _text_tower(family, text_config), _image_tower(family, image_config)
    dimension = _dimension(family, config, text_config, text, image)
    tokenizer = read_tower_tokenizer(
        folder,
        family=family,
        vocab_size=text.vocab_size,
        positions=text.max_positions,
        eos_id=text.eos_id,
        path=path,
    )
    return Towers(
        family=family,
        text=text,
        image=image,
        dimension=dimension,
        text_spec=text_spec(tokenizer, family, text, dimension),
        image_spec=read_image_spec(folder, family=family, size=image.size, dimension=dimension, path=path),
        path=path,
    )


def _modules(folder: Path) -> list[dict[str, str]]:
    """Return the modules of modules.json if the list can start with two towers; else nothing: other readers report
    errors in it."""
    listed = read_json(folder, MODULES)
    if not isinstance(listed, list) or not all(
        isinstance(each, dict) and isinstance(each.get("type"), str) and isinstance(each.get("path"), str)
        for each in listed
    ):
        return []
    types = [each["type"].split(".") for each in listed]
    known = types and types[0][0] == "sentence_transformers" and types[0][-1] in (_MODULE, _NEWER)
    return listed if known else []


def _path(modules: list[dict[str, str]]) -> str:
    return inner_path(modules[0]["path"], 0) if modules else ""


def _prefix(path: str) -> str:
    return f"{path}/" if path else ""


def _is_of_transformers(config: JsonFile | None) -> bool:
    if config is None:
        return False
    return config.data.get("model_type") in {*_DEFAULTS, *_INSTEAD} or {_TEXT, _VISION} <= config.data.keys()


def _layout(folder: Path, path: str, config: JsonFile | None) -> Layout:
    """Choose whose files to read if a folder has both."""
    if not is_there(folder, _prefix(path) + OPEN_CLIP):
        return "transformers"
    if config is None or config.data.get("model_type") not in _DEFAULTS:
        return "open_clip"  # timm's config.json, of its image tower alone
    whole = has_weights(folder, path) and any(is_there(folder, _prefix(path) + name) for name in (FILE, UNIFIED))
    return "open_clip" if is_there(folder, _prefix(path) + OPEN_CLIP_WEIGHTS) and not whole else "transformers"


def _family(config: JsonFile) -> TowerFamily:
    model_type = config.text("model_type")
    if model_type in _INSTEAD:
        raise config.refuse("model_type", f"{model_type!r} {_INSTEAD[model_type]}")
    if model_type not in ("clip", "siglip"):
        raise config.refuse(
            "model_type",
            f"{model_type!r} is not supported as an image tower: Shoal builds {' and '.join(_DEFAULTS)}; use a "
            "repository of one of these in transformers' format",
        )
    if "auto_map" in config:
        raise config.refuse("auto_map", "the model contains custom code, which Shoal never runs")
    if "quantization_config" in config:
        raise config.refuse("quantization_config", "quantized weights are not supported; use the unquantized model")
    known = _ARCHITECTURES[model_type]
    for architecture in config.texts("architectures"):
        if architecture not in known:
            raise config.refuse("architectures", f"{architecture!r} is not {known[0]}, the model with both towers")
    return "clip" if model_type == "clip" else "siglip"


def _section(config: JsonFile, family: TowerFamily, name: str) -> JsonFile:
    """Return a tower's part of config.json, with the defaults.

    CLIP's older files have the part twice: `text_config_dict` wins, with its defaults, as in transformers.
    """
    defaults, stated = _DEFAULTS[family][name], config.section(name)
    old = config.object(f"{name}_dict") if family == "clip" else {}
    return stated.with_data(defaults | stated.data | (defaults | old if old else {}))


def _text_tower(family: TowerFamily, section: JsonFile) -> TextTower:
    eos_id = section.integer("eos_token_id") if family == "clip" else None
    tower = TextTower(
        **_sizes(section),
        vocab_size=section.integer("vocab_size", least=1),
        max_positions=section.integer("max_position_embeddings", least=1),
        eos_id=None if eos_id == _LEGACY_EOS else eos_id,
    )
    if tower.eos_id is not None and tower.eos_id >= tower.vocab_size:
        raise section.refuse("eos_token_id", f"{tower.eos_id} is outside the vocabulary of {tower.vocab_size}")
    return tower


def _image_tower(family: TowerFamily, section: JsonFile) -> ImageTower:
    tower = ImageTower(
        **_sizes(section),
        size=section.integer("image_size", least=1),
        patch=section.integer("patch_size", least=1),
    )
    if section.integer("num_channels") != 3:
        raise section.refuse("num_channels", "must be 3: images are decoded as RGB")
    if tower.patch > tower.size:
        raise section.refuse("patch_size", f"{tower.patch} is larger than the image_size, {tower.size}")
    if family == "siglip" and not section.boolean("vision_use_head"):
        raise section.refuse("vision_use_head", "must be true: without the head, an image has no vector")
    return tower


def _sizes(section: JsonFile) -> dict[str, Any]:
    """Return what both towers have."""
    hidden = section.integer("hidden_size", least=1)
    heads = section.integer("num_attention_heads", least=1)
    if hidden % heads:
        raise section.refuse("num_attention_heads", f"{heads} heads do not divide {hidden} dimensions")
    return {
        "hidden": hidden,
        "layers": section.integer("num_hidden_layers", least=1),
        "heads": heads,
        "intermediate": section.integer("intermediate_size", least=1),
        "norm_eps": section.number("layer_norm_eps"),
        "activation": read_activation(section, "hidden_act"),
    }


def _dimension(family: TowerFamily, config: JsonFile, text_config: JsonFile, text: TextTower, image: ImageTower) -> int:
    if family == "clip":
        return config.integer("projection_dim", 512, least=1)
    dimension = text_config.integer("projection_size", text.hidden, least=1)
    if dimension != image.hidden:
        raise text_config.refuse(
            "projection_size", f"{dimension} is not {image.hidden}, the dimension of image vectors"
        )
    return dimension
