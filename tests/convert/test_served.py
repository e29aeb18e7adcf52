"""From a folder that only open_clip or timm knows to answers: fetched, exported, stored and served."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from shoal.app import open_models
from shoal.config import load
from shoal.pipelines.image.pixels import decode
from shoal.types import BatchTask, Classify, Context, Embed, Embedded, Image, Result, Scored
from tests.convert.models import open_clip_folder, timm_folder
from tests.unit.pipelines.image.image_kit import drawn, saved

IMAGE = saved(drawn(90, 70), "PNG")


async def serve_and_run(home: Path, folder: Path, *tasks: BatchTask) -> list[Result]:
    async with open_models(load({"home": str(home), "precision": "f32"}, {}), [f"m=file:{folder}"]) as running:
        await running.wait_until_loaded()
        card = running.gateway.model("m")
        assert card.facts is not None, card.error
        assert "PyTorch" in card.facts.verified
        context = Context(id="r", deadline=time.monotonic() + 30)
        return [await running.gateway.run(task, context) for task in tasks]


@pytest.mark.parametrize("name", ["convnext", "coca"])
def test_towers_of_open_clip(tmp_path: Path, name: str) -> None:
    """Texts and an image in one request, as open_clip embeds each."""
    import open_clip
    import torch

    folder = open_clip_folder(name, tmp_path / "model")
    texts = ["a cat", "two dogs on a hill"]
    task = Embed(model="m", inputs=[texts[0], Image(IMAGE), texts[1]])
    (found,) = asyncio.run(serve_and_run(tmp_path / "home", folder, task))
    assert isinstance(found, Embedded)
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    with torch.inference_mode():
        seen = transform(Pillow.fromarray(decode(IMAGE)))[None]
        rows = torch.cat([model.eval().encode_text(tokenizer(texts)), model.encode_image(seen)]).numpy()[[0, 2, 1]]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    assert float((found.vectors * rows).sum(axis=1).min()) > 0.9999


def test_a_classifier_of_timm(tmp_path: Path) -> None:
    """The scores of an image by its labels, and raw."""
    import timm
    import torch

    folder = timm_folder("test_vit", tmp_path / "model", num_classes=3, config={"label_names": ["cat", "dog", "cow"]})
    tasks = [Classify(model="m", inputs=[Image(IMAGE)], raw_scores=raw) for raw in (False, True)]
    scores, logits = asyncio.run(serve_and_run(tmp_path / "home", folder, *tasks))
    assert isinstance(scores, Scored)
    assert isinstance(logits, Scored)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    with torch.inference_mode():
        right = model(transform(Pillow.fromarray(decode(IMAGE)))[None])
    np.testing.assert_allclose(logits.scores, right.numpy(), atol=2e-3)
    np.testing.assert_allclose(scores.scores, right.softmax(dim=1).numpy(), atol=2e-3)
