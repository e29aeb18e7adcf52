"""Models of open_clip that Shoal builds itself, without PyTorch, against the library that wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.models.convert.convert_dual_encoder import convert_towers
from shoal.models.open_clip_tokenizer import byte_pairs
from tests.convert.models import CASES, SIZE, TEXT, open_clip_folder
from tests.convert.test_towers import close
from tests.unit.models.checkpoints import write_json
from tests.unit.models.engines import RUNS
from tests.unit.models.tower_checkpoints import tokenizer

pytestmark = [pytest.mark.convert, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

SIGLIP: dict[str, Any] = {
    "embed_dim": 768,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": {"timm_model_name": "vit_base_patch32_siglip_256", "timm_pool": "map", "timm_proj": "none"}
    | {"image_size": 256},
    "text_cfg": TEXT
    | {"vocab_size": 40, "pool_type": "last", "no_causal_mask": True, "proj_bias": True, "norm_kwargs": {"eps": 1e-6}}
    | {"hf_tokenizer_name": "somewhere/else", "tokenizer_kwargs": {"clean": "canonicalize"}},
}


def with_tokenizer(name: str, folder: Path) -> Path:
    """Add the files of a repository that Shoal reads beside the weights."""
    if name == "siglip":
        tokenizer("siglip").save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "GemmaTokenizer", "padding_side": "right"})
        return folder
    from open_clip import SimpleTokenizer

    theirs = SimpleTokenizer()
    merges = sorted(theirs.bpe_ranks, key=theirs.bpe_ranks.__getitem__)
    made = byte_pairs(theirs.encoder, merges, ["<start_of_text>", "<end_of_text>"])
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", ["vit", "siglip"])
def test_built_models_embed_as_open_clip_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of real checkpoints: names and shapes of tensors, activations, projections, and the pooling of both towers."""
    import open_clip
    import torch

    if name == "siglip":
        monkeypatch.setitem(CASES, "siglip", SIGLIP)
        monkeypatch.setattr("tests.convert.models.wordpiece", lambda folder: None)
    folder = with_tokenizer(name, open_clip_folder(name, tmp_path / "model", resize_mode="squash"))
    target = tmp_path / "into"
    target.mkdir()
    built = convert_towers(folder, target)
    model = open_clip.create_model(f"local-dir:{folder}").eval()
    draw = np.random.default_rng(1)
    ids = draw.integers(4, 30, (3, TEXT["context_length"]))
    if name == "vit":
        ids[:, 0], ids[0, 5], ids[1:, -1] = 49406, 49407, 49407
    size = 256 if name == "siglip" else SIZE
    pixels = draw.standard_normal((2, 3, size, size)).astype(np.float32)
    with torch.inference_mode():
        texts = model.encode_text(torch.from_numpy(ids)).numpy()
        images = model.encode_image(torch.from_numpy(pixels)).numpy()
    for open_run in RUNS.values():
        close(open_run(target / built.graph)({"input_ids": ids}, ("text_embeds",))["text_embeds"], texts)
        run = open_run(target / built.image_graph)
        close(run({"pixel_values": pixels}, ("image_embeds",))["image_embeds"], images)
    assert built.contrast.scale == pytest.approx(float(model.logit_scale.exp()), rel=1e-5)
    assert (built.contrast.bias, built.contrast.activation) == (
        (-10, "sigmoid") if name == "siglip" else (0, "softmax")
    )
