"""Reference for verifying dual encoders: forward passes in numpy, one text or image at a time, straight from
safetensors.

It shares only the reading of files with the graphs. Written for comparison with transformers' models, not for speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shoal.models.convert.contract.towers import ImageTower, TextTower, Towers
from shoal.models.convert.graphs.tower_weights import open_tower_weights
from shoal.models.convert.graphs.weights import Weights
from shoal.models.convert.reference import Floats, Ids, activate, linear, norm


def embed_texts(folder: Path, towers: Towers, texts: Sequence[Ids]) -> Floats:
    """Embed texts given as token ids, with whatever padding the model should see: [texts, dimension]."""
    weights, tower = open_tower_weights(folder, towers), towers.text
    read = _Tensors(weights, tower, "text_model.")
    words = (tower.vocab_size, tower.hidden)
    rows = []
    for ids in texts:
        positions = read.get("embeddings.position_embedding.weight", tower.max_positions, tower.hidden)[: len(ids)]
        x = weights.rows("text_model.embeddings.token_embedding.weight", words, ids) + positions
        hidden = np.triu(np.full((len(ids), len(ids)), -np.inf, np.float32), 1) if towers.family == "clip" else 0.0
        states = read.norm(read.encode(x, hidden), "final_layer_norm")
        rows.append(states[_end(tower, ids)] if towers.family == "clip" else states[-1])
    pooled = np.stack(rows)
    if towers.family == "clip":
        return _project(weights, "text_projection", pooled, towers.dimension)
    return linear(pooled, *read.pair("head", towers.dimension, tower.hidden))


def embed_pictures(folder: Path, towers: Towers, pixels: Floats) -> Floats:
    """Embed images, float32 [pictures, 3, size, size]: [pictures, dimension]."""
    weights, tower = open_tower_weights(folder, towers), towers.image
    read = _Tensors(weights, tower, "vision_model.")
    clip = towers.family == "clip"
    table = read.get("embeddings.position_embedding.weight", tower.patches + clip, tower.hidden)
    rows = []
    for picture in pixels:
        x = _patches(read, tower, picture, bias=not clip)
        if clip:
            first = read.get("embeddings.class_embedding", tower.hidden)
            x = read.norm(np.concatenate([first[None], x]) + table, "pre_layrnorm")
            rows.append(read.norm(read.encode(x, 0.0)[:1], "post_layernorm")[0])
        else:
            rows.append(_attend_probe(read, tower, read.norm(read.encode(x + table, 0.0), "post_layernorm")))
    pooled = np.stack(rows)
    return _project(weights, "visual_projection", pooled, towers.dimension) if clip else pooled


def _end(tower: TextTower, ids: Ids) -> int:
    """Return the position of the first end of text; 0 if there is none."""
    end = max(ids) if tower.eos_id is None else tower.eos_id
    return [*ids].index(end) if end in ids else 0


def _patches(read: _Tensors, tower: ImageTower, picture: Floats, *, bias: bool) -> Floats:
    side, count = tower.patch, tower.size // tower.patch
    kernel = read.get("embeddings.patch_embedding.weight", tower.hidden, 3, side, side).reshape(tower.hidden, -1)
    squares = [
        picture[:, row * side : (row + 1) * side, column * side : (column + 1) * side].ravel()
        for row in range(count)
        for column in range(count)
    ]
    x: Floats = np.stack(squares) @ kernel.T
    if bias:
        x += read.get("embeddings.patch_embedding.bias", tower.hidden)
    return x


def _attend_probe(read: _Tensors, tower: ImageTower, x: Floats) -> Floats:
    """SigLIP's pooling head: the probe is the query over all patches."""
    hidden = tower.hidden
    matrix = read.get("head.attention.in_proj_weight", 3 * hidden, hidden)
    bias = read.get("head.attention.in_proj_bias", 3 * hidden)
    probe = read.get("head.probe", 1, 1, hidden)[0]
    query, key, value = (
        linear(given, part, shift)
        for given, part, shift in zip((probe, x, x), np.split(matrix, 3), np.split(bias, 3), strict=True)
    )
    y = linear(_attention(query, key, value, tower.heads, 0.0), *read.pair("head.attention.out_proj", hidden, hidden))
    y = y + read.feed_forward(read.norm(y, "head.layernorm"), "head.mlp")
    pooled: Floats = y[0]
    return pooled


def _project(weights: Weights, name: str, x: Floats, dimension: int) -> Floats:
    y: Floats = x @ weights.get(f"{name}.weight", (dimension, x.shape[-1])).T
    return y


def _attention(query: Floats, key: Floats, value: Floats, heads: int, hidden: Floats | float) -> Floats:
    """Compute attention. `hidden` is added to the scores: -inf where a query must not look."""
    size = query.shape[-1] // heads
    mixed = np.empty_like(query)
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        scores = query[:, part] @ key[:, part].T / np.float32(math.sqrt(size)) + hidden
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed[:, part] = weights / weights.sum(axis=1, keepdims=True) @ value[:, part]
    return mixed


class _Tensors:
    """Reads one tower's tensors, under its prefix, and runs its layers."""

    def __init__(self, weights: Weights, tower: TextTower | ImageTower, prefix: str) -> None:
        self._weights = weights
        self._tower = tower
        self._prefix = prefix

    def get(self, name: str, *shape: int) -> Floats:
        return self._weights.get(self._prefix + name, shape)

    def pair(self, name: str, out: int, into: int) -> tuple[Floats, Floats]:
        return self.get(f"{name}.weight", out, into), self.get(f"{name}.bias", out)

    def norm(self, x: Floats, name: str) -> Floats:
        hidden = self._tower.hidden
        return norm(x, self.get(f"{name}.weight", hidden), self.get(f"{name}.bias", hidden), self._tower.norm_eps)

    def encode(self, x: Floats, hidden: Floats | float) -> Floats:
        """Run x [l, hidden] through all layers."""
        width, heads = self._tower.hidden, self._tower.heads
        for layer in range(self._tower.layers):
            at = f"encoder.layers.{layer}"
            read = self.norm(x, f"{at}.layer_norm1")
            query, key, value = (
                linear(read, *self.pair(f"{at}.self_attn.{each}_proj", width, width)) for each in "qkv"
            )
            mixed = _attention(query, key, value, heads, hidden)
            x = x + linear(mixed, *self.pair(f"{at}.self_attn.out_proj", width, width))
            x = x + self.feed_forward(self.norm(x, f"{at}.layer_norm2"), f"{at}.mlp")
        return x

    def feed_forward(self, x: Floats, name: str) -> Floats:
        tower = self._tower
        inner = activate(tower.activation, linear(x, *self.pair(f"{name}.fc1", tower.intermediate, tower.hidden)))
        return linear(inner, *self.pair(f"{name}.fc2", tower.hidden, tower.intermediate))
