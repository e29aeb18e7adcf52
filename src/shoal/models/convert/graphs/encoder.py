"""Build the encoders of the BERT family as ONNX: from input_ids and attention_mask to token vectors [b, l, hidden].

Leaves out parts of exported graphs that have no use: dropout, and the token types where texts are read alone (row 0 is
folded into the positions).
"""

from __future__ import annotations

import math

import numpy as np

from shoal.errors import ModelFileError
from shoal.models.convert.contract.types import Encoder
from shoal.models.convert.contract.weights import Floats, Weights
from shoal.models.convert.graphs.builder import Graph
from shoal.models.convert.graphs.layers import MASKED, LayerNames, Layers

MPNET_MAX_DISTANCE = 128
_MPNET_BUCKETS = 32


_BERT = LayerNames(
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
LAYERS = {
    "bert": ("encoder.layer", _BERT),
    "roberta": ("encoder.layer", _BERT),
    "mpnet": (
        "encoder.layer",
        _BERT._replace(
            query="attention.attn.q",
            key="attention.attn.k",
            value="attention.attn.v",
            out="attention.attn.o",
            attention_norm="attention.LayerNorm",
        ),
    ),
    "distilbert": (
        "transformer.layer",
        LayerNames(
            "attention.q_lin",
            "attention.k_lin",
            "attention.v_lin",
            "attention.out_lin",
            "sa_layer_norm",
            "ffn.lin1",
            "ffn.lin2",
            "output_layer_norm",
        ),
    ),
}
"""By family: where the layers are, before their numbers, and the names of their parts."""


def tensor_prefix(encoder: Encoder, weights: Weights) -> str:
    """Return the prefix of every tensor's name: empty, or the family's if a head was saved with the model."""
    for prefix in ("", encoder.prefix):
        if f"{prefix}embeddings.word_embeddings.weight" in weights:
            return prefix
    raise ModelFileError(
        f"Shoal has no encoder of the {encoder.family} family",
        file=weights.where,
        key="embeddings.word_embeddings.weight",
    )


def build_encoder(graph: Graph, encoder: Encoder, weights: Weights, *, segments: bool = False) -> str:
    """Append the encoder; return the name of its token vectors. Raises ModelFileError for missing or mismatched
    tensors.

    `segments`: token types are an input, token_type_ids, for texts that are read in pairs.
    """
    return _Builder(graph, encoder, weights, segments).tokens()


class _Builder:
    def __init__(self, graph: Graph, encoder: Encoder, weights: Weights, segments: bool) -> None:
        self.graph = graph
        self.encoder = encoder
        self.weights = weights
        self.segments = segments
        self.prefix = tensor_prefix(encoder, weights)
        self.layers = Layers(graph, encoder, weights, self.prefix)

    def tokens(self) -> str:
        value = self.layers.norm(self._embeddings(), "embeddings.LayerNorm")
        bias = self._attention_bias()
        stem, names = LAYERS[self.encoder.family]
        for layer in range(self.encoder.layers):
            value = self.layers.layer(value, bias, f"{stem}.{layer}.", names)
        return value

    def _embeddings(self) -> str:
        graph, encoder = self.graph, self.encoder
        word = graph.op("Gather", self._words(), "input_ids")
        if self.segments:
            word = graph.op("Add", word, graph.op("Gather", self._segment_table(), "token_type_ids"))
        positions = self._position_table()
        if encoder.position_offset:
            return graph.op("Add", word, graph.op("Gather", positions, self._positions()))
        length = graph.op("Slice", graph.op("Shape", "input_ids"), graph.integers(1), graph.integers(2))
        rows = graph.op("Slice", positions, graph.integers(0), length, graph.integers(0))
        return graph.op("Add", word, rows)

    def _positions(self) -> str:
        """pad + (1, 2, 3, ... over the tokens that are not padding); padding itself stays at row `pad`."""
        graph, pad = self.graph, self.graph.integer(self.encoder.pad_id)
        ones = graph.cast_int(graph.op("Not", graph.op("Equal", "input_ids", pad)))
        counted = graph.op("CumSum", ones, graph.integer(1))
        return graph.op("Add", graph.op("Mul", counted, ones), pad)

    def _attention_bias(self) -> str:
        """0 for tokens and MASKED for padding, [b, 1, 1, l]; with MPNet's relative positions [b, heads, l, l]."""
        graph = self.graph
        mask = graph.unsqueeze(graph.cast_float("attention_mask"), 1, 2)
        bias = graph.op("Mul", graph.op("Sub", graph.number(1.0), mask), graph.number(MASKED))
        return graph.op("Add", bias, self._relative_bias()) if self.encoder.family == "mpnet" else bias

    def _relative_bias(self) -> str:
        """One learned number per head and distance, [1, heads, l, l]: a table over all distances, by key - query."""
        graph, encoder = self.graph, self.encoder
        name = f"{self.prefix}encoder.relative_attention_bias.weight"
        shape = (_MPNET_BUCKETS, encoder.heads)
        self.weights.check(name, shape)
        span = encoder.max_positions - 1
        table = graph.weight(
            "relative_attention_bias",
            (encoder.heads, 2 * span + 1),
            lambda: np.ascontiguousarray(self.weights.get(name, shape)[relative_buckets(span)].T),
        )
        length = graph.op("Gather", graph.op("Shape", "input_ids"), graph.integer(1))
        steps = graph.op("Range", graph.integer(0), length, graph.integer(1))
        distance = graph.op("Sub", graph.unsqueeze(steps, 0), graph.unsqueeze(steps, 1))
        picked = graph.op("Gather", table, graph.op("Add", distance, graph.integer(span)), axis=1)
        return graph.unsqueeze(picked, 0)

    def _words(self) -> str:
        return self.layers.constant("embeddings.word_embeddings.weight", (self.encoder.vocab_size, self.encoder.hidden))

    def _segment_table(self) -> str:
        shape = (self.encoder.token_types, self.encoder.hidden)
        return self.layers.constant("embeddings.token_type_embeddings.weight", shape)

    def _position_table(self) -> str:
        """The position table. Row 0 of the token types is added if the family has them and they are not an input."""
        encoder, weights = self.encoder, self.weights
        name, shape = "embeddings.position_embeddings.weight", (encoder.max_positions, encoder.hidden)
        types, types_shape = "embeddings.token_type_embeddings.weight", (encoder.token_types, encoder.hidden)
        if not encoder.token_types or self.segments:
            return self.layers.constant(name, shape)
        weights.check(self.prefix + name, shape)
        weights.check(self.prefix + types, types_shape)
        return self.graph.weight(
            name,
            shape,
            lambda: weights.get(self.prefix + name, shape) + weights.get(self.prefix + types, types_shape)[0],
        )


def relative_buckets(span: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return T5's bucket of each distance key - query in -span..span (Raffel et al. 2020, as MPNet uses it).

    Half of the buckets are for keys after the query. In each half, distances below 8 have one bucket each; the others
    share 8 that grow logarithmically up to MPNET_MAX_DISTANCE. Computed in float32, as the models were trained.
    """
    distance = np.arange(-span, span + 1)
    half, exact = _MPNET_BUCKETS // 2, _MPNET_BUCKETS // 4
    far: Floats = np.maximum(np.abs(distance), 1).astype(np.float32) / np.float32(exact)
    scaled = np.log(far) / np.float32(math.log(MPNET_MAX_DISTANCE / exact)) * np.float32(half - exact)
    logarithmic = np.minimum(exact + scaled.astype(np.int64), half - 1)
    near = np.abs(distance)
    return (distance > 0) * half + np.where(near < exact, near, logarithmic)
