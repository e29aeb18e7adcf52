"""Tiny random models in the folders that open_clip and timm themselves write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIZE = 32
TEXT: dict[str, Any] = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
VIT: dict[str, Any] = {"image_size": SIZE, "patch_size": 8, "width": 32, "head_width": 16, "layers": 2}
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]

CASES: dict[str, dict[str, Any]] = {
    "vit": {"embed_dim": 24, "vision_cfg": VIT, "text_cfg": TEXT, "quick_gelu": True},
    "convnext": {
        "embed_dim": 24,
        "vision_cfg": {"timm_model_name": "test_convnext", "timm_pool": "", "timm_proj": "linear", "image_size": 64},
        "text_cfg": TEXT,
    },
    "eva": {
        "embed_dim": 24,
        "vision_cfg": {"timm_model_name": "eva02_tiny_patch14_224", "timm_pool": "token", "timm_proj": None},
        "text_cfg": TEXT,
        "custom_text": True,
    },
    "mobileclip": {
        "embed_dim": 24,
        "vision_cfg": {"timm_model_name": "test_byobnet", "timm_pool": "avg", "timm_proj": None, "image_size": 64},
        "text_cfg": TEXT | {"no_causal_mask": True},
        "custom_text": True,
    },
    "coca": {
        "embed_dim": 24,
        "vision_cfg": VIT | {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
        "text_cfg": TEXT | {"context_length": 15, "embed_cls": True, "output_tokens": True},
        "multimodal_cfg": TEXT | {"context_length": 15, "attn_pooler_heads": 2},
        "custom_text": True,
    },
    "clipa": {
        "embed_dim": 24,
        "vision_cfg": VIT | {"no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True},
        "text_cfg": TEXT
        | {"vocab_size": 300, "pool_type": "last", "no_causal_mask": True, "hf_tokenizer_name": "somewhere/else"}
        | {"tokenizer_kwargs": {"strip_sep_token": True}},
    },
    "siglip": {
        "embed_dim": 24,
        "init_logit_bias": -10,
        "custom_text": True,
        "vision_cfg": VIT,
        "text_cfg": TEXT
        | {"vocab_size": 300, "pool_type": "last", "no_causal_mask": True, "hf_tokenizer_name": "somewhere/else"}
        | {"tokenizer_kwargs": {"clean": "canonicalize"}, "proj_bias": True},
    },
}


def open_clip_folder(name: str, folder: Path, **changes: Any) -> Path:
    """One of CASES as open_clip pushes it to a hub; `changes` are laid over its preprocess_cfg."""
    import open_clip
    import torch
    from safetensors.torch import save_file

    config = json.loads(json.dumps(CASES[name]))
    folder.mkdir(parents=True, exist_ok=True)
    preprocess = {"mean": MEAN, "std": STD, "interpolation": "bicubic", "resize_mode": "shortest"} | changes
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": preprocess}))
    if "hf_tokenizer_name" in config["text_cfg"]:
        wordpiece(folder)
    torch.manual_seed(3)
    model = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # else all texts and all images come out nearly alike
                parameter.add_(torch.randn_like(parameter) * 0.05)
    save_file({key: each.contiguous().clone() for key, each in model.state_dict().items()}, weights(folder))
    return folder


def weights(folder: Path) -> Path:
    return folder / "open_clip_model.safetensors"


def wordpiece(folder: Path) -> None:
    """A tokenizer of BERT's kind over letters."""
    import string

    import transformers

    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [*string.printable.strip(), *"éàçöüß"]
    words = [*marks, *letters, *(f"##{each}" for each in letters)]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=True).save_pretrained(folder)


def timm_folder(name: str, folder: Path, *, config: dict[str, Any] | None = None, **options: Any) -> Path:
    """A model of timm with random weights, as timm pushes it to a hub; `config` is laid over its config.json."""
    import timm
    import torch
    from timm.models import save_for_hf

    torch.manual_seed(5)
    model = timm.create_model(name, pretrained=False, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    save_for_hf(model, str(folder), safe_serialization=True)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    return folder
