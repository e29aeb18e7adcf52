"""Read the weights of a dual encoder by transformers' names, whichever layout they are stored in.

open_clip stores the three maps of attention as one matrix, and its last maps transposed; SigLIP's image tower has
timm's names. Nothing is copied: the pieces are views of the files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.errors import ModelFileError
from shoal.models.convert.contract.tower_types import ImageTower, TextTower, Towers
from shoal.models.convert.contract.weights import Part, Weights, open_file, open_weights
from shoal.models.sources.select import OPEN_CLIP_WEIGHTS
from shoal.specs import ContrastSpec

_Stored: TypeAlias = npt.NDArray[Any]
_Parts: TypeAlias = Iterator[tuple[str, Part]]
_MAPS = ("q_proj", "k_proj", "v_proj")


class _Names(NamedTuple):
    """Names of a layer's parts, under the layer's own prefix; `maps`: the three of attention in one."""

    maps_weight: str
    maps_bias: str
    out: str
    norm1: str
    norm2: str
    up: str
    down: str


_BLOCK = _Names("attn.in_proj_weight", "attn.in_proj_bias", "attn.out_proj", "ln_1", "ln_2", "mlp.c_fc", "mlp.c_proj")
_TIMM = _Names("attn.qkv.weight", "attn.qkv.bias", "attn.proj", "norm1", "norm2", "mlp.fc1", "mlp.fc2")


def open_tower_weights(folder: Path, towers: Towers) -> Weights:
    """Open the weights of both towers. Raises ModelFileError, with the stored names, for missing or broken weights,
    and for those that do not fit the configuration."""
    if towers.layout == "transformers":
        return open_weights(folder, towers.path)
    prefix = f"{towers.path}/" if towers.path else ""
    stored = open_file(folder, prefix + OPEN_CLIP_WEIGHTS)
    own = "text." if stored.has("text.token_embedding.weight") else ""
    parts = dict(_text(towers, own))
    parts |= _clip_image(towers) if towers.family == "clip" else _timm_image(towers.image)
    parts |= {number: Part(number, None) for number in ("logit_scale", "logit_bias") if stored.has(number)}
    return stored.rename_tensors(parts)


def read_contrast(folder: Path, towers: Towers) -> ContrastSpec:
    """Read how the vectors of the two towers are compared; logit_scale is stored as a logarithm. SigLIP adds a bias, as
    do open_clip models trained like it. Raises ModelFileError for weights that are missing or cannot be read."""
    weights = open_tower_weights(folder, towers)
    try:
        scale = math.exp(weights.number("logit_scale"))
    except OverflowError:
        scale = math.inf
    biased = towers.family == "siglip" or (towers.layout == "open_clip" and "logit_bias" in weights)
    bias = weights.number("logit_bias") if biased else 0.0
    if not math.isfinite(scale) or not math.isfinite(bias):
        raise ModelFileError("is implausible; fetch the model again", file=weights.where, key="logit_scale")
    return ContrastSpec(scale=scale, bias=bias, activation="sigmoid" if biased else "softmax")


def _text(towers: Towers, own: str) -> _Parts:
    """Yield the text tower's parts; `own` is the prefix of its names."""
    tower, ours = towers.text, "text_model"
    words = f"{ours}.embeddings"
    yield f"{words}.token_embedding.weight", Part(f"{own}token_embedding.weight", (tower.vocab_size, tower.hidden))
    positions = Part(f"{own}positional_embedding", (tower.max_positions, tower.hidden))
    yield f"{words}.position_embedding.weight", positions
    for layer in range(tower.layers):
        yield from _layer(tower, _BLOCK, f"{own}transformer.resblocks.{layer}", f"{ours}.encoder.layers.{layer}")
    yield from _pair(f"{ours}.final_layer_norm", f"{own}ln_final", tower.hidden)
    if towers.family == "clip":
        yield "text_projection.weight", _transpose(f"{own}text_projection", (tower.hidden, towers.dimension))
    else:
        yield from _pair(f"{ours}.head", f"{own}text_projection", towers.dimension, tower.hidden)


def _clip_image(towers: Towers) -> dict[str, Part]:
    tower, ours, own = towers.image, "vision_model", "visual"
    squares = (tower.hidden, 3, tower.patch, tower.patch)
    made = {
        f"{ours}.embeddings.patch_embedding.weight": Part(f"{own}.conv1.weight", squares),
        f"{ours}.embeddings.class_embedding": Part(f"{own}.class_embedding", (tower.hidden,)),
        f"{ours}.embeddings.position_embedding.weight": Part(
            f"{own}.positional_embedding", (tower.patches + 1, tower.hidden)
        ),
        "visual_projection.weight": _transpose(f"{own}.proj", (tower.hidden, towers.dimension)),
    }
    made |= _pair(f"{ours}.pre_layrnorm", f"{own}.ln_pre", tower.hidden)
    made |= _pair(f"{ours}.post_layernorm", f"{own}.ln_post", tower.hidden)
    for layer in range(tower.layers):
        made |= _layer(tower, _BLOCK, f"{own}.transformer.resblocks.{layer}", f"{ours}.encoder.layers.{layer}")
    return made


def _timm_image(tower: ImageTower) -> dict[str, Part]:
    """Return the parts of SigLIP's image tower. Its pooling query has its own map; key and value share one."""
    hidden, ours, own = tower.hidden, "vision_model", "visual.trunk"
    made = dict(
        _pair(f"{ours}.embeddings.patch_embedding", f"{own}.patch_embed.proj", hidden, 3, tower.patch, tower.patch)
    )
    made[f"{ours}.embeddings.position_embedding.weight"] = Part(
        f"{own}.pos_embed", (1, tower.patches, hidden), lambda stored: stored[0]
    )
    made |= _pair(f"{ours}.post_layernorm", f"{own}.norm", hidden)
    for layer in range(tower.layers):
        made |= _layer(tower, _TIMM, f"{own}.blocks.{layer}", f"{ours}.encoder.layers.{layer}")
    head, pool = f"{ours}.head", f"{own}.attn_pool"
    made[f"{head}.probe"] = Part(f"{pool}.latent", (1, 1, hidden))
    for part, more in (("weight", (hidden,)), ("bias", ())):
        made[f"{head}.attention.in_proj_{part}"] = Part(
            f"{pool}.q.{part}", (hidden, *more), then=((f"{pool}.kv.{part}", (2 * hidden, *more)),)
        )
    made |= _pair(f"{head}.attention.out_proj", f"{pool}.proj", hidden, hidden)
    made |= _pair(f"{head}.layernorm", f"{pool}.norm", hidden)
    made |= _pair(f"{head}.mlp.fc1", f"{pool}.mlp.fc1", tower.intermediate, hidden)
    made |= _pair(f"{head}.mlp.fc2", f"{pool}.mlp.fc2", hidden, tower.intermediate)
    return made


def _layer(tower: TextTower | ImageTower, names: _Names, own: str, ours: str) -> _Parts:
    hidden, inner = tower.hidden, tower.intermediate
    for number, name in enumerate(_MAPS):
        take = partial(_third, number, hidden)
        yield f"{ours}.self_attn.{name}.weight", Part(f"{own}.{names.maps_weight}", (3 * hidden, hidden), take)
        yield f"{ours}.self_attn.{name}.bias", Part(f"{own}.{names.maps_bias}", (3 * hidden,), take)
    yield from _pair(f"{ours}.self_attn.out_proj", f"{own}.{names.out}", hidden, hidden)
    yield from _pair(f"{ours}.layer_norm1", f"{own}.{names.norm1}", hidden)
    yield from _pair(f"{ours}.layer_norm2", f"{own}.{names.norm2}", hidden)
    yield from _pair(f"{ours}.mlp.fc1", f"{own}.{names.up}", inner, hidden)
    yield from _pair(f"{ours}.mlp.fc2", f"{own}.{names.down}", hidden, inner)


def _pair(ours: str, own: str, *shape: int) -> _Parts:
    """Yield a weight of `shape`, and its bias."""
    yield f"{ours}.weight", Part(f"{own}.weight", shape)
    yield f"{ours}.bias", Part(f"{own}.bias", shape[:1])


def _transpose(own: str, shape: tuple[int, int]) -> Part:
    return Part(own, shape, np.transpose)


def _third(number: int, hidden: int, stored: _Stored) -> _Stored:
    return stored[number * hidden : (number + 1) * hidden]
