"""Expected vectors of a tiny dual encoder, computed with numpy, and a tiny model in the shape of ViT-B-32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from shoal.models.convert.contract.towers import read_towers
from shoal.models.convert.dual_encoder_reference import embed_images, embed_texts
from shoal.pipelines.image import ImagePipeline
from shoal.pipelines.text.tokenizer import TextTokenizer
from shoal.types import Array, Image, Item
from tests.unit.models.open_clip_checkpoints import WEIGHTS, open_clip
from tests.unit.models.tower_checkpoints import IMAGE_HIDDEN, TEXT_HIDDEN

_CONTEXT, _SIZE, _PATCH = 77, 224, 32


def expected(folder: Path, inputs: Sequence[Item]) -> Array:
    """Return normalized vectors from the numpy forward passes, one input at a time."""
    read = read_towers(folder)
    tokenizer = TextTokenizer(folder, "tokenizer.json", cleaning=read.text_spec.cleaning)
    pipeline = ImagePipeline(read.image_spec)
    rows = []
    for item in inputs:
        if isinstance(item, Image):
            values = pipeline._preprocessing.values(pipeline._preprocessing.pixels(item.data))
            rows.append(embed_images(folder, read, values[None])[0])
            continue
        assert isinstance(item, str)
        (fitted,) = tokenizer.fit([item], ["right"], read.text_spec.max_tokens)
        ids = list(fitted.ids)
        ids += [read.text_spec.pad_id] * (read.text_spec.pad_to - len(ids))
        rows.append(embed_texts(folder, read, [np.array(ids, np.int64)])[0])
    vectors = np.stack(rows)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def vit_b_32(folder: Path) -> Path:
    """Write an open_clip model with ViT-B-32's context, image size and patches; all else is tiny."""
    folder.mkdir()
    open_clip(folder, text={"context_length": _CONTEXT}, vision={"image_size": _SIZE, "patch_size": _PATCH})
    random = np.random.default_rng(32)
    tensors = load_file(folder / WEIGHTS)
    for name, scale, shape in (
        ("positional_embedding", 0.4, (_CONTEXT, TEXT_HIDDEN)),
        ("visual.positional_embedding", 0.4, ((_SIZE // _PATCH) ** 2 + 1, IMAGE_HIDDEN)),
        ("visual.conv1.weight", 0.02, (IMAGE_HIDDEN, 3, _PATCH, _PATCH)),
    ):
        tensors[name] = (random.standard_normal(shape) * scale).astype(np.float32)
    save_file(tensors, folder / WEIGHTS)
    return folder
