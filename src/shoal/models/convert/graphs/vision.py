"""Build the image towers of CLIP and SigLIP as ONNX: from pixel_values [b, 3, size, size] to image_embeds [b,
dimension], not normalized."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shoal.models.convert.contract.tower_types import IMAGE_EMBEDS, PIXELS, PROBE_MLP, ImageTower, Towers
from shoal.models.convert.contract.tower_weights import open_tower_weights
from shoal.models.convert.contract.weights import Floats
from shoal.models.convert.graphs.builder import BuiltGraph, Graph, write_graph
from shoal.models.convert.graphs.layers import KEY_ORDER, QUERY_ORDER, Layers
from shoal.models.convert.graphs.towers import append_layers, project


def build_image_tower(
    folder: Path,
    towers: Towers,
    path: Path,
    *,
    progress: Callable[[float], None] | None = None,
) -> BuiltGraph:
    """Write the image tower's graph to `path`. Raises ModelFileError for weights that are missing or do not
    fit the configuration."""
    graph, tower = Graph(), towers.image
    layers = Layers(graph, tower.shape, open_tower_weights(folder, towers), "vision_model.")
    embeds = _clip(layers, tower, towers.dimension) if towers.family == "clip" else _siglip(layers, tower)
    graph.op("Identity", embeds, name=IMAGE_EMBEDS)
    return write_graph(
        graph,
        path,
        inputs=[(PIXELS, (3, tower.size, tower.size))],
        outputs=[(IMAGE_EMBEDS, (towers.dimension,))],
        progress=progress,
    )


def _clip(layers: Layers, tower: ImageTower, dimension: int) -> str:
    """Append CLIP's tower: the class token precedes the patches, and its last state is the image's."""
    graph, weights = layers.graph, layers.weights
    patches = _patches(layers, tower, bias=False)
    table, shape = "vision_model.embeddings.position_embedding.weight", (tower.patches + 1, tower.hidden)
    own = "vision_model.embeddings.class_embedding"
    weights.check(table, shape)
    weights.check(own, shape[1:])
    rows = graph.weight("positions", (tower.patches, tower.hidden), lambda: weights.get(table, shape)[1:])
    first = graph.weight(
        "class_token",
        (1, 1, tower.hidden),
        lambda: (weights.get(own, shape[1:]) + weights.get(table, shape)[0])[None, None],
    )
    many = graph.size(PIXELS, 0)
    firsts = graph.op("Expand", first, graph.op("Concat", many, graph.integers(1, tower.hidden), axis=0))
    value = graph.op("Concat", firsts, graph.op("Add", patches, rows), axis=1)
    value = append_layers(layers, layers.norm(value, "pre_layrnorm"), tower.blocks)
    pooled = layers.norm(graph.op("Gather", value, graph.integer(0), axis=1), "post_layernorm")
    return project(layers, pooled, "visual_projection", dimension)


def _siglip(layers: Layers, tower: ImageTower) -> str:
    """Append SigLIP's tower: a learned query, the probe, attends to all patches, followed by its own feed-forward."""
    graph = layers.graph
    rows = layers.constant("embeddings.position_embedding.weight", (tower.patches, tower.hidden))
    value = graph.op("Add", _patches(layers, tower, bias=True), rows)
    value = layers.norm(append_layers(layers, value, tower.blocks), "post_layernorm")
    value = _attend_probe(layers, tower, value)
    inner = layers.feed_forward(layers.norm(value, "head.layernorm"), PROBE_MLP)
    return graph.op("Gather", graph.op("Add", inner, value), graph.integer(0), axis=1)


def _attend_probe(layers: Layers, tower: ImageTower, value: str) -> str:
    """torch's MultiheadAttention of the probe over `value`: [b, 1, hidden]. Its three maps are one matrix, query first.
    The query is the same for every image and is computed here."""
    weights, hidden, size = layers.weights, tower.hidden, tower.hidden // tower.heads
    matrix, bias = (f"vision_model.head.attention.in_proj_{part}" for part in ("weight", "bias"))
    shape, square, probe = (3 * hidden, hidden), (hidden, hidden), "vision_model.head.probe"
    weights.check(matrix, shape)
    weights.check(bias, shape[:1])
    weights.check(probe, (1, 1, hidden))

    def query() -> Floats:
        projected = weights.get(matrix, shape)[:hidden] @ weights.get(probe, (1, 1, hidden))[0, 0]
        scaled = (projected + weights.get(bias, shape[:1])[:hidden]) / np.float32(math.sqrt(size))
        return np.ascontiguousarray(scaled.reshape(1, tower.heads, 1, size), np.float32)

    def map_value(name: str, order: list[int], part: slice) -> str:
        projected = layers.affine(
            value, name, square, lambda: weights.get(matrix, shape)[part], lambda: weights.get(bias, shape[:1])[part]
        )
        return layers.split(projected, order)

    key = map_value("head.attention.key", KEY_ORDER, slice(hidden, 2 * hidden))
    content = map_value("head.attention.value", QUERY_ORDER, slice(2 * hidden, 3 * hidden))
    head_query = layers.graph.weight("head.query", (1, tower.heads, 1, size), query)
    return layers.attend(head_query, key, content, None, "head.attention.out_proj")


def _patches(layers: Layers, tower: ImageTower, *, bias: bool) -> str:
    """Append one vector per square of `patch` pixels a side, row by row: [b, patches, hidden]."""
    graph, side = layers.graph, tower.patch
    name = "embeddings.patch_embedding"
    inputs = [layers.constant(f"{name}.weight", (tower.hidden, 3, side, side))]
    if bias:
        inputs.append(layers.constant(f"{name}.bias", (tower.hidden,)))
    squares = graph.op("Conv", PIXELS, *inputs, kernel_shape=[side, side], strides=[side, side])
    flat = graph.op("Reshape", squares, graph.integers(0, 0, -1))
    return graph.op("Transpose", flat, perm=[0, 2, 1])
