"""Build the text towers of CLIP and SigLIP as ONNX: from input_ids to text_embeds [b, dimension], not normalized.

Neither reads an attention mask. CLIP's attention is causal and its vector is taken at the first end of text, so what
follows is never seen. SigLIP attends to its padding and needs the right amount of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.models.convert.contract.architecture import Layer
from shoal.models.convert.contract.tower_types import TEXT_EMBEDS, TextTower, Towers
from shoal.models.convert.contract.tower_weights import open_tower_weights
from shoal.models.convert.graphs.builder import BuiltGraph, Graph, write_graph
from shoal.models.convert.graphs.encoder import signed_distances
from shoal.models.convert.graphs.head import pick_first
from shoal.models.convert.graphs.layers import MASKED, Layers
from shoal.models.convert.graphs.tensors import add_matrix

_IDS = "input_ids"


def build_text_tower(
    folder: Path,
    towers: Towers,
    path: Path,
    *,
    progress: Callable[[float], None] | None = None,
) -> BuiltGraph:
    """Write the text tower's graph to `path`. Raises ModelFileError for weights that are missing or do not fit
    the configuration."""
    graph, weights = Graph(), open_tower_weights(folder, towers)
    layers = Layers(graph, towers.text.shape, weights, "text_model.")
    value = _embeddings(layers, towers.text)
    bias = _causal(graph) if towers.family == "clip" else None
    value = append_layers(layers, value, towers.text.blocks, bias)
    if towers.family == "clip":
        pooled = layers.norm(pick_first(graph, value, _ends(graph, towers.text)), "final_layer_norm")
        embeds = project(layers, pooled, "text_projection", towers.dimension)
    else:
        last = graph.op("Gather", value, graph.integer(-1), axis=1)
        embeds = layers.linear(layers.norm(last, "final_layer_norm"), "head", (towers.dimension, towers.text.hidden))
    graph.op("Identity", embeds, name=TEXT_EMBEDS)
    return write_graph(
        graph,
        path,
        inputs=(_IDS,),
        outputs=[(TEXT_EMBEDS, (towers.dimension,))],
        progress=progress,
    )


def append_layers(layers: Layers, value: str, blocks: Sequence[Layer], bias: str | None = None) -> str:
    """Append a tower's layers."""
    for block in blocks:
        value = layers.layer(value, block, bias)
    return value


def project(layers: Layers, value: str, name: str, dimension: int) -> str:
    """Append CLIP's map into the space of both towers; its weights are beside the towers and have no bias."""
    weight, shape = f"{name}.weight", (dimension, layers.shape.hidden)
    return layers.graph.op("MatMul", value, add_matrix(layers.graph, layers.weights, weight, shape, weight))


def _embeddings(layers: Layers, tower: TextTower) -> str:
    graph = layers.graph
    words = layers.constant("embeddings.token_embedding.weight", (tower.vocab_size, tower.hidden))
    positions = layers.constant("embeddings.position_embedding.weight", (tower.max_positions, tower.hidden))
    length = graph.size(_IDS, 1)
    rows = graph.op("Slice", positions, graph.integers(0), length, graph.integers(0))
    return graph.op("Add", graph.op("Gather", words, _IDS), rows)


def _causal(graph: Graph) -> str:
    """MASKED where a key comes after the query, [l, l]."""
    ahead = graph.op("Greater", signed_distances(graph), graph.integer(0))
    return graph.op("Mul", graph.cast_float(ahead), graph.number(MASKED))


def _ends(graph: Graph, tower: TextTower) -> str:
    """1 where a text may end, int64 [b, l]; the first of these counts."""
    end = graph.reduce("ReduceMax", _IDS, 1, keep=True) if tower.eos_id is None else graph.integer(tower.eos_id)
    return graph.cast_int(graph.op("Equal", _IDS, end))
