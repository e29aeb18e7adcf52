"""Build the text towers of CLIP and SigLIP as ONNX: from input_ids to text_embeds [b, dimension], not normalized.

Neither reads an attention mask. CLIP's attention is causal and its vector is taken at the first end of text, so what
follows is never seen. SigLIP attends to its padding and needs the right amount of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shoal.models.convert.contract.tower_types import TEXT_EMBEDS, TextTower, Towers
from shoal.models.convert.contract.tower_weights import open_tower_weights
from shoal.models.convert.graphs.builder import BuiltGraph, Graph, write_graph
from shoal.models.convert.graphs.head import pick_first
from shoal.models.convert.graphs.layers import MASKED, LayerNames, Layers
from shoal.models.convert.graphs.tensors import add_matrix

TOWER_STEM = "encoder.layers"
TOWER_LAYER = LayerNames(
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.out_proj",
    "layer_norm1",
    "mlp.fc1",
    "mlp.fc2",
    "layer_norm2",
)
_IDS = "input_ids"


def build_text_tower(
    folder: Path,
    towers: Towers,
    path: Path,
    *,
    progress: Callable[[float], None] | None = None,
) -> BuiltGraph:
    """Write the text tower's graph to `path`. Raises ModelFileError for weights that are missing, pickled or do not fit
    the configuration."""
    graph, weights = Graph(), open_tower_weights(folder, towers)
    layers = Layers(graph, towers.text, weights, "text_model.")
    value = _embeddings(layers, towers.text)
    bias = _causal(graph) if towers.family == "clip" else None
    value = append_layers(layers, value, towers.text.layers, bias)
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


def append_layers(layers: Layers, value: str, count: int, bias: str | None = None) -> str:
    """Append a tower's layers, with the norms before each part."""
    for layer in range(count):
        value = layers.layer(value, bias, f"{TOWER_STEM}.{layer}.", TOWER_LAYER, pre_norm=True)
    return value


def project(layers: Layers, value: str, name: str, dimension: int) -> str:
    """Append CLIP's map into the space of both towers; its weights are beside the towers and have no bias."""
    weight, shape = f"{name}.weight", (dimension, layers.sizes.hidden)
    return layers.graph.op("MatMul", value, add_matrix(layers.graph, layers.weights, weight, shape, weight))


def _embeddings(layers: Layers, tower: TextTower) -> str:
    graph = layers.graph
    words = layers.constant("embeddings.token_embedding.weight", (tower.vocab_size, tower.hidden))
    positions = layers.constant("embeddings.position_embedding.weight", (tower.max_positions, tower.hidden))
    length = graph.op("Slice", graph.op("Shape", _IDS), graph.integers(1), graph.integers(2))
    rows = graph.op("Slice", positions, graph.integers(0), length, graph.integers(0))
    return graph.op("Add", graph.op("Gather", words, _IDS), rows)


def _causal(graph: Graph) -> str:
    """MASKED where a key comes after the query, [l, l]."""
    length = graph.op("Gather", graph.op("Shape", _IDS), graph.integer(1))
    steps = graph.op("Range", graph.integer(0), length, graph.integer(1))
    ahead = graph.op("Greater", graph.unsqueeze(steps, 0), graph.unsqueeze(steps, 1))
    return graph.op("Mul", graph.cast_float(ahead), graph.number(MASKED))


def _ends(graph: Graph, tower: TextTower) -> str:
    """1 where a text may end, int64 [b, l]; the first of these counts."""
    end = graph.reduce("ReduceMax", _IDS, 1, keep=True) if tower.eos_id is None else graph.integer(tower.eos_id)
    return graph.cast_int(graph.op("Equal", _IDS, end))
