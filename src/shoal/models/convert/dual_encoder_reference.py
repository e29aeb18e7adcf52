"""Reference for verifying dual encoders: forward passes in numpy, one text or image at a time, straight from
safetensors.

It shares only the reading of files and the names of tensors with the graphs. Written for comparison with transformers'
models, not for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shoal.models.convert.contract.tower_types import PROBE_MLP, ImageTower, TextTower, Towers
from shoal.models.convert.contract.tower_weights import open_tower_weights
from shoal.models.convert.contract.weights import Weights
from shoal.models.convert.numpy_transformer import NO_BIAS, Floats, Ids, Transformer, affine, attend


def embed_texts(folder: Path, towers: Towers, texts: Sequence[Ids]) -> Floats:
    """Embed texts given as token ids, with whatever padding the model should see: [texts, dimension]."""
    weights, tower = open_tower_weights(folder, towers), towers.text
    read, clip = Transformer(weights, tower.shape, "text_model."), towers.family == "clip"
    positions = read.get("embeddings.position_embedding.weight", tower.max_positions, tower.hidden)
    rows = [
        read.rows("embeddings.token_embedding.weight", tower.vocab_size, ids) + positions[: len(ids)] for ids in texts
    ]
    biases = [np.triu(np.full((len(ids), len(ids)), -np.inf, np.float32), 1) if clip else NO_BIAS for ids in texts]
    norm = read.norm("final_layer_norm")
    states = map(norm, read.encode(rows, biases, tower.blocks))
    pooled = np.stack([row[_end(tower, ids) if clip else -1] for row, ids in zip(states, texts, strict=True)])
    if clip:
        return _project(weights, "text_projection", pooled, towers.dimension)
    return read.linear("head", towers.dimension, tower.hidden)(pooled)


def embed_images(folder: Path, towers: Towers, pixels: Floats) -> Floats:
    """Embed images, float32 [images, 3, size, size]: [images, dimension]."""
    weights, tower = open_tower_weights(folder, towers), towers.image
    read, clip = Transformer(weights, tower.shape, "vision_model."), towers.family == "clip"
    table = read.get("embeddings.position_embedding.weight", tower.patches + clip, tower.hidden)
    rows = [_patches(read, tower, image, bias=not clip) for image in pixels]
    if clip:
        first = read.get("embeddings.class_embedding", tower.hidden)[None]
        rows = [read.norm("pre_layrnorm")(np.concatenate([first, x]) + table) for x in rows]
    else:
        rows = [x + table for x in rows]
    rows = read.encode(rows, [NO_BIAS] * len(rows), tower.blocks)
    norm = read.norm("post_layernorm")
    if clip:
        pooled = np.stack([norm(x[:1])[0] for x in rows])
        return _project(weights, "visual_projection", pooled, towers.dimension)
    return np.stack([_attend_probe(read, tower, norm(x)) for x in rows])


def _end(tower: TextTower, ids: Ids) -> int:
    """Return the position of the first end of text; 0 if there is none."""
    end = max(ids) if tower.eos_id is None else tower.eos_id
    return [*ids].index(end) if end in ids else 0


def _patches(read: Transformer, tower: ImageTower, image: Floats, *, bias: bool) -> Floats:
    side, count = tower.patch, tower.size // tower.patch
    kernel = read.get("embeddings.patch_embedding.weight", tower.hidden, 3, side, side).reshape(tower.hidden, -1)
    squares = [
        image[:, row * side : (row + 1) * side, column * side : (column + 1) * side].ravel()
        for row in range(count)
        for column in range(count)
    ]
    x: Floats = np.stack(squares) @ kernel.T
    if bias:
        x += read.get("embeddings.patch_embedding.bias", tower.hidden)
    return x


def _attend_probe(read: Transformer, tower: ImageTower, x: Floats) -> Floats:
    """SigLIP's pooling head: the probe is the query over all patches."""
    hidden = tower.hidden
    matrix = read.get("head.attention.in_proj_weight", 3 * hidden, hidden)
    bias = read.get("head.attention.in_proj_bias", 3 * hidden)
    probe = read.get("head.probe", 1, 1, hidden)[0]
    query, key, value = (
        affine(vectors, part, shift).reshape(len(vectors), tower.heads, -1)
        for vectors, part, shift in zip((probe, x, x), np.split(matrix, 3), np.split(bias, 3), strict=True)
    )
    y = read.linear("head.attention.out_proj", hidden, hidden)(attend(query, key, value, NO_BIAS, tower.shape.scale))
    y = y + read.feed_forward(PROBE_MLP)(read.norm("head.layernorm")(y))
    pooled: Floats = y[0]
    return pooled


def _project(weights: Weights, name: str, x: Floats, dimension: int) -> Floats:
    y: Floats = x @ weights.get(f"{name}.weight", (dimension, x.shape[-1])).T
    return y
