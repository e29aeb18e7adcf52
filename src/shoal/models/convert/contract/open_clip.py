"""Read dual encoders as open_clip saves them: open_clip_config.json, beside open_clip_model.safetensors.

Supports CLIP with a plain ViT, and SigLIP, whose image tower is timm's. open_clip is the reference for every default;
unknown settings, and any variation of the two that changes the vectors, are rejected by key.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from shoal.errors import ModelFileError
from shoal.models.convert.contract.architecture import Activation
from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.models.convert.contract.tower_tokenizer import CLEANS, Clean, read_tower_tokenizer
from shoal.models.convert.contract.tower_types import ImageTower, TextTower, TowerFamily, Towers, text_spec
from shoal.models.convert.contract.transforms import open_clip_image_spec
from shoal.models.sources.select import CONVERT_IMAGES
from shoal.models.sources.select import OPEN_CLIP as CONFIG
from shoal.specs import ImageSpec

_OTHER_MODELS = {
    "multimodal_cfg": "CoCa",
    "audio_cfg": "CLAP, an audio model,",
    "genlip_cfg": "GenLIP",
    "genlap_cfg": "GenLAP, an audio model,",
}
_BLOCKS = ("qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc")
_Plain: TypeAlias = dict[str, tuple[Any, Any]]
"""The required value of a key, and its default; any other value is another architecture."""

_PLAIN: _Plain = {"ls_init_value": (None, None), "block_type": (None, None)} | dict.fromkeys(_BLOCKS, (False, False))
_PLAIN_VISION: _Plain = {
    **_PLAIN,
    "attentional_pool": (False, False),
    "no_ln_pre": (False, False),
    "pos_embed_type": ("learnable", "learnable"),
    "pool_type": ("tok", "tok"),
    "output_tokens": (False, False),
}
_PLAIN_TIMM: _Plain = {
    **_PLAIN,
    "timm_pool": ("map", "avg"),
    "timm_proj": ("none", "linear"),
    "timm_model_kwargs": (None, None),
    "output_tokens": (False, False),
}
_PLAIN_TEXT: _Plain = {
    **_PLAIN,
    "hf_model_name": (None, None),
    "text_arch": ("clip", "clip"),
    "embed_cls": (False, False),
    "proj_type": ("linear", "linear"),
    "output_tokens": (False, False),
    "tokenizer_type": ("", ""),
    "tokenizer_mode": (None, None),
}
_CLIP_TEXT: _Plain = {"no_causal_mask": (False, False), "proj_bias": (False, False)}
_SIGLIP_TEXT: _Plain = {"no_causal_mask": (True, False), "proj_bias": (True, False), "pool_type": ("last", "argmax")}

_READ_BOTH = frozenset({"width", "layers", "mlp_ratio", "act_kwargs", "norm_kwargs"})
_READ_VISION = _READ_BOTH | {"head_width", "patch_size", "image_size", "timm_model_name"}
_READ_TEXT = _READ_BOTH | {"context_length", "vocab_size", "heads", "pool_type", "eos_id"}
_READ_TEXT |= {"hf_tokenizer_name", "tokenizer_kwargs"}
_READ_MODEL = frozenset({"embed_dim", "vision_cfg", "text_cfg", "quick_gelu", *_OTHER_MODELS})
_PREPROCESS_KEYS = frozenset({"mode", "mean", "std", "interpolation", "resize_mode"})
_UNUSED = frozenset(
    {"patch_dropout", "attn_pooler_queries", "attn_pooler_heads", "final_ln_after_pool", "image_seq_len"}
    | {"timm_model_pretrained", "timm_drop", "timm_drop_path", "timm_proj_bias", "hf_model_pretrained"}
    | {"variable_text", "pad_id", "bos_id", "tiktoken_name", "hf_proj_type", "hf_pooler_type"}
    | {"custom_text", "init_logit_scale", "init_logit_bias", "nonscalar_logit_scale", "output_dict"}
    | {"size", "fill_color"}
)
"""Keys for training, or for what these architectures do not have. A norm after choosing one token equals the norm
before it, and the image size is the tower's."""


class _Trunk(NamedTuple):
    """The numbers of a timm ViT."""

    width: int
    layers: int
    heads: int
    mlp_ratio: float = 4.0


_SIGLIP = re.compile(r"vit_(base|large|so400m|giantopt)_patch(\d{1,3})_siglip_(\d{1,4})")
_TRUNKS = {
    "base": _Trunk(768, 12, 12),
    "large": _Trunk(1024, 24, 16),
    "so400m": _Trunk(1152, 27, 16, 3.7362),
    "giantopt": _Trunk(1536, 40, 16),
}
_WITH_TANH = re.compile(r"vit_(base_patch32|so400m_patch16|giantopt_patch16)_.*|vit_large_patch16_siglip_512")
"""SigLIP 2 models, with the approximate GELU; the other names serve the first SigLIP too."""

_TRUNK_EPS = 1e-6
_MOST = 2**31


def read_open_clip(folder: Path, path: str = "") -> Towers:
    """Read and check everything in `folder / path` except the weights.

    Raises ModelFileError, naming file and key, for missing, malformed, unknown or contradictory content, and for an
    architecture that Shoal does not build (`unsupported_error`).
    """
    config = _config(folder, path)
    model = _section(config, "model_cfg")
    for name, other in _OTHER_MODELS.items():
        if name in model:
            raise _foreign_error(model, name, other)
    vision, text = _section(model, "vision_cfg"), _section(model, "text_cfg")
    _refuse_other_architectures(vision, text)
    _refuse_unknown_keys(model, _READ_MODEL)
    dimension = model.integer("embed_dim", least=1)
    quick = model.boolean("quick_gelu", False)
    family: TowerFamily = "siglip" if "timm_model_name" in vision else "clip"
    image = _timm_tower(vision) if family == "siglip" else _image_tower(vision, quick=quick)
    if family == "siglip" and dimension != image.hidden:
        raise model.refuse("embed_dim", f"{dimension} is not {image.hidden}, the dimension of image vectors")
    tower = _text_tower(text, quick=quick, siglip=family == "siglip")
    tokenizer = read_tower_tokenizer(
        folder,
        family=family,
        vocab_size=tower.vocab_size,
        positions=tower.max_positions,
        eos_id=tower.eos_id,
        path=path,
        clean=_clean(text),
    )
    return Towers(
        family=family,
        text=tower,
        image=image,
        dimension=dimension,
        text_spec=text_spec(tokenizer, family, tower, dimension),
        image_spec=_image_spec(_section(config, "preprocess_cfg", required=False), image.size, dimension),
        layout="open_clip",
        path=path,
    )


def unsupported_error(folder: Path, path: str = "") -> ModelFileError | None:
    """Return the error if Shoal does not build the architecture in `folder / path`, for a caller that can convert it;
    None if it does, whatever else may be wrong. Raises ModelFileError for a file that cannot be read at all."""
    _config(folder, path)
    try:
        read_open_clip(folder, path)
    except ModelFileError as error:
        # Only errors about the architecture advise conversion as the next step.
        return error if CONVERT_IMAGES in error.message else None
    return None


def _config(folder: Path, path: str) -> JsonFile:
    name = f"{path}/{CONFIG}" if path else CONFIG
    config = read_object(folder, name)
    if config is None:
        raise ModelFileError("is missing; this is not an open_clip model, or it is incomplete", file=name)
    return config


def _section(file: JsonFile, key: str, *, required: bool = True) -> JsonFile:
    """Return a part of the file, without nulls."""
    if required and key not in file:
        raise file.refuse(key, "is missing; fetch the model again")
    section = file.section(key)
    return section.with_data({name: value for name, value in section.data.items() if value is not None})


def _refuse_unknown_keys(section: JsonFile, known: Collection[str]) -> None:
    for key in section.data:
        if key not in known and key not in _UNUSED:
            raise section.refuse(key, f"unknown key, which may change the vectors; {CONVERT_IMAGES}")


def _refuse_other_architectures(vision: JsonFile, text: JsonFile) -> None:
    """Reject settings that may be valid, but belong to neither of the two architectures."""
    timm = vision.data.get("timm_model_name")
    if timm and not (isinstance(timm, str) and _SIGLIP.fullmatch(timm)):
        raise _foreign_error(vision, "timm_model_name", repr(timm))
    if isinstance(vision.data.get("layers"), list):
        raise _foreign_error(vision, "layers", "a ResNet")
    if not timm and text.data.get("pool_type", "argmax") not in ("argmax", "eos"):
        raise _foreign_error(text, "pool_type", repr(text.data["pool_type"]))
    _refuse_variation(vision, _PLAIN_TIMM if timm else _PLAIN_VISION)
    _refuse_variation(text, _PLAIN_TEXT | (_SIGLIP_TEXT if timm else _CLIP_TEXT))
    options = text.section("tokenizer_kwargs")
    for name, value in options.data.items():
        if name != "clean" and value:
            raise _foreign_error(options, name, repr(value))


def _refuse_variation(section: JsonFile, plain: _Plain) -> None:
    for name, (expected, default) in plain.items():
        value = section.data.get(name, default)
        if value != expected and (value or expected):
            raise _foreign_error(section, name, repr(value))


def _foreign_error(section: JsonFile, key: str, what: str) -> ModelFileError:
    return section.refuse(
        key,
        f"{what} is not supported; Shoal builds CLIP with a plain ViT and SigLIP: choose one, or {CONVERT_IMAGES}",
    )


def _image_tower(section: JsonFile, *, quick: bool) -> ImageTower:
    _refuse_unknown_keys(section, _READ_VISION | _PLAIN_VISION.keys())
    hidden = section.integer("width", 768, least=1)
    head = section.integer("head_width", 64, least=1)
    if hidden % head:
        raise section.refuse("head_width", f"{head} does not divide {hidden}, the width")
    tower = ImageTower(
        size=_side(section, "image_size", 224),
        patch=_side(section, "patch_size", 16),
        hidden=hidden,
        layers=section.integer("layers", 12, least=1),
        heads=hidden // head,
        intermediate=_inner(section, hidden),
        norm_eps=_eps(section),
        activation=_activation(section, quick=quick),
    )
    if tower.patch > tower.size:
        raise section.refuse("patch_size", f"{tower.patch} is larger than the image_size, {tower.size}")
    return tower


def _timm_tower(section: JsonFile) -> ImageTower:
    """Read SigLIP's image tower, whose name determines its numbers."""
    _refuse_unknown_keys(section, _READ_VISION | _PLAIN_TIMM.keys())
    name = section.text("timm_model_name")
    match = _SIGLIP.fullmatch(name)
    assert match is not None, "other architectures are rejected"
    trunk, patch, size = _TRUNKS[match[1]], int(match[2]), int(match[3])
    stated = _side(section, "image_size", 224)
    if stated != size or not 0 < patch <= size:
        raise section.refuse("image_size", f"{stated} does not match {name}")
    return ImageTower(
        size=size,
        patch=patch,
        hidden=trunk.width,
        layers=trunk.layers,
        heads=trunk.heads,
        intermediate=int(trunk.width * trunk.mlp_ratio),
        norm_eps=_TRUNK_EPS,
        activation="gelu_tanh" if _WITH_TANH.fullmatch(name) else "gelu",
    )


def _text_tower(section: JsonFile, *, quick: bool, siglip: bool) -> TextTower:
    _refuse_unknown_keys(section, _READ_TEXT | _PLAIN_TEXT.keys() | _SIGLIP_TEXT.keys())
    hidden = section.integer("width", 512, least=1)
    heads = section.integer("heads", 8, least=1)
    if hidden % heads:
        raise section.refuse("heads", f"{heads} heads do not divide {hidden} dimensions")
    vocabulary = section.integer("vocab_size", 49408, least=1)
    eos_id = None
    if not siglip and section.text("pool_type", "argmax") == "eos":
        eos_id = section.integer("eos_id")
        if eos_id >= vocabulary:
            raise section.refuse("eos_id", f"{eos_id} is outside the vocabulary of {vocabulary}")
    return TextTower(
        vocab_size=vocabulary,
        max_positions=section.integer("context_length", 77, least=1),
        hidden=hidden,
        layers=section.integer("layers", 12, least=1),
        heads=heads,
        intermediate=_inner(section, hidden),
        norm_eps=_eps(section),
        activation=_activation(section, quick=quick),
        eos_id=eos_id,
    )


def _side(section: JsonFile, key: str, default: int) -> int:
    """Return a square's side, stated once or twice."""
    stated = section.data.get(key, default)
    if isinstance(stated, list) and len(stated) == 2:
        if stated[0] != stated[1]:
            raise section.refuse(key, f"{stated!r} is not square, and only square images are supported")
        stated = stated[0]
    return section.with_data({key: stated}).integer(key, least=1)


def _inner(section: JsonFile, hidden: int) -> int:
    """Return the inner width, rounded down as in open_clip."""
    ratio = section.number("mlp_ratio", 4.0)
    if not 1 <= hidden * ratio < _MOST:
        raise section.refuse("mlp_ratio", f"{ratio} is implausible for {hidden} dimensions")
    return int(hidden * ratio)


def _eps(section: JsonFile) -> float:
    stated = section.section("norm_kwargs")
    stated.only(frozenset({"eps"}))
    return stated.number("eps", 1e-5)


def _activation(section: JsonFile, *, quick: bool) -> Activation:
    stated = section.object("act_kwargs")
    if not stated or (stated == {"approximate": "none"} and not quick):
        return "quick_gelu" if quick else "gelu"
    if quick or stated != {"approximate": "tanh"}:
        why = f'{stated!r} is not supported; use {{"approximate": "tanh"}} with quick_gelu false'
        raise section.refuse("act_kwargs", why)
    return "gelu_tanh"


def _clean(section: JsonFile) -> Clean:
    """Return the cleaning of texts; the tokenizer's class determines the default."""
    options = section.section("tokenizer_kwargs")
    stated = options.text("clean", "whitespace" if section.text("hf_tokenizer_name", "") else "lower")
    if stated not in CLEANS:
        raise options.refuse("clean", f"{stated!r} is not read here; Shoal knows {', '.join(CLEANS)}")
    return stated


def _image_spec(section: JsonFile, size: int, dimension: int) -> ImageSpec:
    _refuse_unknown_keys(section, _PREPROCESS_KEYS)
    if section.text("mode", "RGB") != "RGB":
        raise section.refuse("mode", "must be RGB: only RGB images are supported")
    return open_clip_image_spec(section.data | {"size": size}, dimension=dimension, file=section.name)
