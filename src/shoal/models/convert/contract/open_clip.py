"""Read dual encoders as open_clip saves them: open_clip_config.json, beside open_clip_model.safetensors.

Supports CLIP with a plain ViT, and SigLIP, whose image tower is timm's. open_clip is the reference for every default;
unknown settings, and any variation of the two that changes the vectors, are rejected by key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from shoal.errors import ModelFileError
from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.models.convert.contract.tower_tokenizer import CLEANS, Clean, read_tower_tokenizer
from shoal.models.convert.contract.towers import ImageTower, TextTower, TowerFamily, Towers, text_spec
from shoal.models.convert.contract.transforms import open_clip_pictures
from shoal.models.convert.contract.types import Activation
from shoal.models.sources.select import CONVERT_IMAGES
from shoal.models.sources.select import OPEN_CLIP as CONFIG
from shoal.specs import ImageSpec

_MODEL, _TEXT, _VISION, _PICTURES = "model_cfg", "model_cfg.text_cfg", "model_cfg.vision_cfg", "preprocess_cfg"

_OTHER_MODELS = {
    "multimodal_cfg": "CoCa",
    "audio_cfg": "CLAP, a model of sounds,",
    "genlip_cfg": "GenLIP",
    "genlap_cfg": "GenLAP, a model of sounds,",
}
_BLOCKS = ("qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc")
_Plain: TypeAlias = Mapping[str, tuple[Any, Any]]
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
_READ_PICTURES = frozenset({"mode", "mean", "std", "interpolation", "resize_mode"})
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
    refused = _unsupported_error(config)
    if refused is not None:
        raise refused
    model, vision, text = (_section(config, key) for key in (_MODEL, _VISION, _TEXT))
    _refuse_unknown_keys(model, _MODEL, _READ_MODEL)
    dimension = model.integer(f"{_MODEL}.embed_dim", least=1)
    quick = model.boolean(f"{_MODEL}.quick_gelu", False)
    family: TowerFamily = "siglip" if f"{_VISION}.timm_model_name" in vision else "clip"
    image = _timm_tower(vision) if family == "siglip" else _image_tower(vision, quick=quick)
    if family == "siglip" and dimension != image.hidden:
        key = f"{_MODEL}.embed_dim"
        raise model.refuse(key, f"{dimension} is not {image.hidden}, the size of the vectors of pictures")
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
        image_spec=_image_spec(_section(config, _PICTURES), image.size, dimension),
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
        raise ModelFileError("is missing; this is no model of open_clip, or it is incomplete", file=name)
    return config


def _section(config: JsonFile, name: str) -> JsonFile:
    """Return a part of the file by its path, without nulls; keys in errors are full paths."""
    data, at = config.data, ""
    for part in name.split("."):
        at = f"{at}.{part}" if at else part
        if data.get(part) is None and name != _PICTURES:
            raise config.refuse(at, "is missing; fetch the model again")
        data = JsonFile(config.name, {at: data.get(part)}).object(at)
    return JsonFile(config.name, {f"{name}.{key}": value for key, value in data.items() if value is not None})


def _refuse_unknown_keys(section: JsonFile, part: str, read: frozenset[str], plain: _Plain | None = None) -> None:
    """Reject unknown keys."""
    known = read | _UNUSED | frozenset(plain or ())
    for key in section.data:
        if key.removeprefix(f"{part}.") not in known:
            raise section.refuse(key, f"unknown key, which may change the vectors; {CONVERT_IMAGES}")


def _unsupported_error(config: JsonFile) -> ModelFileError | None:
    """Return the error for settings that may be valid, but belong to neither of the two architectures."""
    model = _section(config, _MODEL)
    for name, other in _OTHER_MODELS.items():
        if f"{_MODEL}.{name}" in model:
            return _foreign_error(model, f"{_MODEL}.{name}", other)
    vision, text = _section(config, _VISION), _section(config, _TEXT)
    timm = vision.data.get(f"{_VISION}.timm_model_name")
    if timm and not (isinstance(timm, str) and _SIGLIP.fullmatch(timm)):
        return _foreign_error(vision, f"{_VISION}.timm_model_name", repr(timm))
    if isinstance(vision.data.get(f"{_VISION}.layers"), list):
        return _foreign_error(vision, f"{_VISION}.layers", "a ResNet")
    if not timm and text.data.get(f"{_TEXT}.pool_type", "argmax") not in ("argmax", "eos"):
        return _foreign_error(text, f"{_TEXT}.pool_type", repr(text.data[f"{_TEXT}.pool_type"]))
    return (
        _find_deviation(vision, _VISION, _PLAIN_TIMM if timm else _PLAIN_VISION)
        or _find_deviation(text, _TEXT, _PLAIN_TEXT)
        or _find_deviation(text, _TEXT, _SIGLIP_TEXT if timm else _CLIP_TEXT)
        or _other_tokens(text)
    )


def _find_deviation(section: JsonFile, part: str, plain: _Plain) -> ModelFileError | None:
    for name, (wanted, default) in plain.items():
        given = section.data.get(f"{part}.{name}", default)
        if given != wanted and (given or wanted):
            return _foreign_error(section, f"{part}.{name}", repr(given))
    return None


def _other_tokens(text: JsonFile) -> ModelFileError | None:
    """Return the error for a tokenizer with options other than text cleaning."""
    key = f"{_TEXT}.tokenizer_kwargs"
    for name, value in text.object(key).items():
        if name != "clean" and value:
            return _foreign_error(text, f"{key}.{name}", repr(value))
    return None


def _foreign_error(section: JsonFile, key: str, what: str) -> ModelFileError:
    return section.refuse(
        key,
        f"{what} is not built here, where CLIP with a plain ViT and SigLIP are: choose one, or {CONVERT_IMAGES}",
    )


def _image_tower(section: JsonFile, *, quick: bool) -> ImageTower:
    _refuse_unknown_keys(section, _VISION, _READ_VISION, _PLAIN_VISION)
    hidden = section.integer(f"{_VISION}.width", 768, least=1)
    head = section.integer(f"{_VISION}.head_width", 64, least=1)
    if hidden % head:
        raise section.refuse(f"{_VISION}.head_width", f"{head} does not divide {hidden}, the width")
    tower = ImageTower(
        size=_side(section, f"{_VISION}.image_size", 224),
        patch=_side(section, f"{_VISION}.patch_size", 16),
        hidden=hidden,
        layers=section.integer(f"{_VISION}.layers", 12, least=1),
        heads=hidden // head,
        intermediate=_inner(section, _VISION, hidden),
        norm_eps=_eps(section, _VISION),
        activation=_activation(section, _VISION, quick=quick),
    )
    if tower.patch > tower.size:
        key = f"{_VISION}.patch_size"
        raise section.refuse(key, f"{tower.patch} is larger than the image_size, {tower.size}")
    return tower


def _timm_tower(section: JsonFile) -> ImageTower:
    """Read SigLIP's image tower, whose name determines its numbers."""
    _refuse_unknown_keys(section, _VISION, _READ_VISION, _PLAIN_TIMM)
    key = f"{_VISION}.timm_model_name"
    name = section.text(key)
    match = _SIGLIP.fullmatch(name)
    assert match is not None, "of any other the architecture is refused"
    trunk, patch, size = _TRUNKS[match[1]], int(match[2]), int(match[3])
    stated = _side(section, f"{_VISION}.image_size", 224)
    if stated != size or not 0 < patch <= size:
        raise section.refuse(f"{_VISION}.image_size", f"{stated} does not go with {name}")
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
    _refuse_unknown_keys(section, _TEXT, _READ_TEXT, {**_PLAIN_TEXT, **_SIGLIP_TEXT})
    hidden = section.integer(f"{_TEXT}.width", 512, least=1)
    heads = section.integer(f"{_TEXT}.heads", 8, least=1)
    if hidden % heads:
        raise section.refuse(f"{_TEXT}.heads", f"{heads} heads do not divide {hidden} dimensions")
    vocabulary = section.integer(f"{_TEXT}.vocab_size", 49408, least=1)
    eos_id = None
    if not siglip and section.text(f"{_TEXT}.pool_type", "argmax") == "eos":
        eos_id = section.integer(f"{_TEXT}.eos_id")
        if eos_id >= vocabulary:
            raise section.refuse(f"{_TEXT}.eos_id", f"{eos_id} is outside the vocabulary of {vocabulary}")
    return TextTower(
        vocab_size=vocabulary,
        max_positions=section.integer(f"{_TEXT}.context_length", 77, least=1),
        hidden=hidden,
        layers=section.integer(f"{_TEXT}.layers", 12, least=1),
        heads=heads,
        intermediate=_inner(section, _TEXT, hidden),
        norm_eps=_eps(section, _TEXT),
        activation=_activation(section, _TEXT, quick=quick),
        eos_id=eos_id,
    )


def _side(section: JsonFile, key: str, default: int) -> int:
    """Return a square's side, stated once or twice."""
    stated = section.data.get(key, default)
    if isinstance(stated, list) and len(stated) == 2:
        if stated[0] != stated[1]:
            raise section.refuse(key, f"{stated!r} is no square, and only squares are read")
        stated = stated[0]
    return JsonFile(section.name, {key: stated}).integer(key, least=1)


def _inner(section: JsonFile, part: str, hidden: int) -> int:
    """Return the inner width, rounded down as in open_clip."""
    ratio = section.number(f"{part}.mlp_ratio", 4.0)
    if not 1 <= hidden * ratio < _MOST:
        raise section.refuse(f"{part}.mlp_ratio", f"{ratio} is out of all proportion for {hidden} dimensions")
    return int(hidden * ratio)


def _eps(section: JsonFile, part: str) -> float:
    key = f"{part}.norm_kwargs"
    stated = JsonFile(section.name, {f"{key}.{name}": value for name, value in section.object(key).items()})
    stated.only(frozenset({f"{key}.eps"}))
    return stated.number(f"{key}.eps", 1e-5)


def _activation(section: JsonFile, part: str, *, quick: bool) -> Activation:
    key = f"{part}.act_kwargs"
    stated = section.object(key)
    if not stated or (stated == {"approximate": "none"} and not quick):
        return "quick_gelu" if quick else "gelu"
    if quick or stated != {"approximate": "tanh"}:
        raise section.refuse(key, f'{stated!r} is not known; {{"approximate": "tanh"}} is, where quick_gelu is false')
    return "gelu_tanh"


def _clean(section: JsonFile) -> Clean:
    """Return the cleaning of texts; the tokenizer's class determines the default."""
    key = f"{_TEXT}.tokenizer_kwargs"
    default = "whitespace" if section.text(f"{_TEXT}.hf_tokenizer_name", "") else "lower"
    stated = JsonFile(section.name, {f"{key}.clean": section.object(key).get("clean")}).text(f"{key}.clean", default)
    if stated not in CLEANS:
        raise section.refuse(f"{key}.clean", f"{stated!r} is not read here; Shoal knows {', '.join(CLEANS)}")
    return stated


def _image_spec(section: JsonFile, size: int, dimension: int) -> ImageSpec:
    _refuse_unknown_keys(section, _PICTURES, _READ_PICTURES)
    if section.text(f"{_PICTURES}.mode", "RGB") != "RGB":
        raise section.refuse(f"{_PICTURES}.mode", "must be RGB: no other pictures are read")
    stated = {key.removeprefix(f"{_PICTURES}."): value for key, value in section.data.items()}
    return open_clip_pictures(stated | {"size": size}, dimension=dimension, file=section.name)
