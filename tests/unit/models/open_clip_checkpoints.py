"""Tiny random models of two towers as open_clip saves them; no PyTorch.

They are those of `tower_checkpoints` under open_clip's names, so that both layouts must give the same vectors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from shoal.types import Array
from tests.unit.models.checkpoints import write_json
from tests.unit.models.tower_checkpoints import (
    CONTEXT,
    HEADS,
    IMAGE_HIDDEN,
    INNER,
    LAYERS,
    MEAN,
    PATCH,
    SIZE,
    STD,
    TEXT_HIDDEN,
    WORDS,
    tensors,
    tokenizer,
)

CONFIG = "open_clip_config.json"
WEIGHTS = "open_clip_model.safetensors"


def open_clip(
    folder: Path,
    *,
    model: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    preprocess: dict[str, Any] | None = None,
    custom: bool = False,
) -> Path:
    """Write a whole CLIP; the dictionaries override its settings, and None removes a key. `custom` puts the text
    tower's names under `text.`."""
    towers = {
        "vision_cfg": _over(
            {
                "image_size": SIZE,
                "layers": LAYERS,
                "width": IMAGE_HIDDEN,
                "head_width": IMAGE_HIDDEN // HEADS,
                "mlp_ratio": INNER / IMAGE_HIDDEN,
                "patch_size": PATCH,
            },
            vision,
        ),
        "text_cfg": _over(
            {
                "context_length": CONTEXT,
                "vocab_size": len(WORDS["clip"]),
                "width": TEXT_HIDDEN,
                "heads": HEADS,
                "layers": LAYERS,
                "mlp_ratio": INNER / TEXT_HIDDEN + 1e-9,
            },
            text,
        ),
    }
    config = {
        "model_cfg": _over({"embed_dim": 8, "quick_gelu": True} | towers, model),
        "preprocess_cfg": _over({"mean": MEAN, "std": STD}, preprocess),
    }
    write_json(folder / CONFIG, config)
    tokenizer("clip").save(str(folder / "tokenizer.json"))
    save_file(clip_names(tensors("clip"), custom=custom), folder / WEIGHTS)
    return folder


def _over(data: dict[str, Any], changes: dict[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (data | (changes or {})).items() if value is not None}


def clip_names(tensors: dict[str, Array], *, custom: bool = False) -> dict[str, Array]:
    """Convert a CLIP's tensors from transformers' names to open_clip's."""
    left = dict(tensors)
    own = "text." if custom else ""
    renamed = {
        f"{own}token_embedding.weight": left.pop("text_model.embeddings.token_embedding.weight"),
        f"{own}positional_embedding": left.pop("text_model.embeddings.position_embedding.weight"),
        f"{own}text_projection": left.pop("text_projection.weight").T,
        "visual.conv1.weight": left.pop("vision_model.embeddings.patch_embedding.weight"),
        "visual.class_embedding": left.pop("vision_model.embeddings.class_embedding"),
        "visual.positional_embedding": left.pop("vision_model.embeddings.position_embedding.weight"),
        "visual.proj": left.pop("visual_projection.weight").T,
        "logit_scale": left.pop("logit_scale"),
    }
    norms = {
        "text_model.final_layer_norm": f"{own}ln_final",
        "vision_model.pre_layrnorm": "visual.ln_pre",
        "vision_model.post_layernorm": "visual.ln_post",
    }
    for kind in ("weight", "bias"):
        renamed |= {f"{theirs}.{kind}": left.pop(f"{ours}.{kind}") for ours, theirs in norms.items()}
        for ours, theirs in (("text_model", f"{own}transformer"), ("vision_model", "visual.transformer")):
            renamed |= _blocks(left, f"{ours}.encoder.layers", f"{theirs}.resblocks", kind)
    assert not left, sorted(left)
    return {name: np.ascontiguousarray(values) for name, values in renamed.items()}


def _blocks(left: dict[str, Array], ours: str, theirs: str, kind: str) -> dict[str, Array]:
    parts = {
        "self_attn.out_proj": "attn.out_proj",
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    }
    renamed, layer = {}, 0
    while f"{ours}.{layer}.mlp.fc1.{kind}" in left:
        maps = [left.pop(f"{ours}.{layer}.self_attn.{each}_proj.{kind}") for each in "qkv"]
        renamed[f"{theirs}.{layer}.attn.in_proj_{kind}"] = np.concatenate(maps)
        renamed |= {f"{theirs}.{layer}.{b}.{kind}": left.pop(f"{ours}.{layer}.{a}.{kind}") for a, b in parts.items()}
        layer += 1
    return renamed


def siglip_names(tensors: dict[str, Array]) -> dict[str, Array]:
    """Convert a SigLIP's tensors from transformers' names to open_clip's: timm's names in the image tower."""
    left = dict(tensors)
    head, pool = "vision_model.head", "visual.trunk.attn_pool"
    renamed = {
        "text.token_embedding.weight": left.pop("text_model.embeddings.token_embedding.weight"),
        "text.positional_embedding": left.pop("text_model.embeddings.position_embedding.weight"),
        "visual.trunk.pos_embed": left.pop("vision_model.embeddings.position_embedding.weight")[None],
        f"{pool}.latent": left.pop(f"{head}.probe"),
        **{name: left.pop(name) for name in ("logit_scale", "logit_bias")},
    }
    pairs = {
        "text_model.final_layer_norm": "text.ln_final",
        "text_model.head": "text.text_projection",
        "vision_model.embeddings.patch_embedding": "visual.trunk.patch_embed.proj",
        "vision_model.post_layernorm": "visual.trunk.norm",
        f"{head}.attention.out_proj": f"{pool}.proj",
        f"{head}.layernorm": f"{pool}.norm",
        f"{head}.mlp.fc1": f"{pool}.mlp.fc1",
        f"{head}.mlp.fc2": f"{pool}.mlp.fc2",
    }
    for kind in ("weight", "bias"):
        renamed |= {f"{theirs}.{kind}": left.pop(f"{ours}.{kind}") for ours, theirs in pairs.items()}
        maps = left.pop(f"{head}.attention.in_proj_{kind}")
        width = len(maps) // 3
        renamed |= {f"{pool}.q.{kind}": maps[:width], f"{pool}.kv.{kind}": maps[width:]}
        renamed |= _blocks(left, "text_model.encoder.layers", "text.transformer.resblocks", kind)
        timm = _blocks(left, "vision_model.encoder.layers", "visual.trunk.blocks", kind)
        named = (
            ("attn.in_proj_", "attn.qkv."),
            ("out_proj", "proj"),
            ("ln_", "norm"),
            ("c_fc", "fc1"),
            ("c_proj", "fc2"),
        )
        for name, values in timm.items():
            for before, after in named:
                name = name.replace(before, after)  # noqa: PLW2901
            renamed[name] = values
    assert not left, sorted(left)
    return {name: np.ascontiguousarray(values) for name, values in renamed.items()}
