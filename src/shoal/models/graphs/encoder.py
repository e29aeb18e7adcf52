"""The encoders of the BERT family as ONNX: input_ids and attention_mask in, token vectors [b, l, hidden] out.

What the exported graphs carry and nobody needs is left out: dropout, and where texts are read alone the token types
(row 0 is folded into the positions). The attention scale is folded into the query's weights. Attention stays the plain
MatMul, Add, Softmax, MatMul that engines recognise and fuse.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from shoal.errors import ModelFileError
from shoal.models.contract.types import Encoder
from shoal.models.graphs.builder import Graph
from shoal.models.graphs.weights import Floats, Weights

MASKED = -32768.0
"""Added to the scores of padding: exp() of it is zero, and a row that is all padding gives numbers, not NaN.

A power of two, exact in float16 and bfloat16, because an engine may compute (1 - mask) * M as M - mask * M and round
the product alone: with -1e9 OpenVINO adds 1.8e6 to every score in bfloat16, and float32 then keeps eighths of a score.
"""

MPNET_MAX_DISTANCE = 128
_MPNET_BUCKETS = 32


class _Layer(NamedTuple):
    """Names of a layer's parts, under the layer's own prefix."""

    query: str
    key: str
    value: str
    out: str
    attention_norm: str
    up: str
    down: str
    output_norm: str


_BERT = _Layer(
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
_LAYERS = {
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
        _Layer(
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


def tensor_prefix(encoder: Encoder, weights: Weights) -> str:
    """What stands before every tensor's name: nothing, or the family's prefix when a head was saved with the model."""
    for prefix in ("", encoder.prefix):
        if f"{prefix}embeddings.word_embeddings.weight" in weights:
            return prefix
    raise ModelFileError(
        f"no encoder of the {encoder.family} family is in here",
        file=weights.where,
        key="embeddings.word_embeddings.weight",
    )


def build_encoder(graph: Graph, encoder: Encoder, weights: Weights, *, segments: bool = False) -> str:
    """Append the encoder; answers the name of its token vectors. Raises ModelFileError for missing or odd tensors.

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

    def tokens(self) -> str:
        value = self._norm(self._embeddings(), "embeddings.LayerNorm")
        bias = self._attention_bias()
        stem, names = _LAYERS[self.encoder.family]
        for layer in range(self.encoder.layers):
            value = self._layer(value, bias, f"{stem}.{layer}.", names)
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
        """pad + (1, 2, 3, ... over the tokens that are no padding); padding itself stays at row `pad`."""
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
        """One learned number a head and distance, [1, heads, l, l]: a table over all distances, by key - query."""
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

    def _layer(self, value: str, bias: str, prefix: str, names: _Layer) -> str:
        graph, encoder = self.graph, self.encoder
        hidden, inner = encoder.hidden, encoder.intermediate
        size = hidden // encoder.heads
        split = graph.integers(0, 0, encoder.heads, size)

        def heads(name: str, order: list[int], scale: float = 1.0) -> str:
            projected = self._linear(value, prefix + name, (hidden, hidden), scale)
            return graph.op("Transpose", graph.op("Reshape", projected, split), perm=order)

        query = heads(names.query, [0, 2, 1, 3], 1.0 / math.sqrt(size))
        key = heads(names.key, [0, 2, 3, 1])
        content = heads(names.value, [0, 2, 1, 3])
        scores = graph.op("Add", graph.op("MatMul", query, key), bias)
        mixed = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), content)
        joined = graph.op("Reshape", graph.op("Transpose", mixed, perm=[0, 2, 1, 3]), graph.integers(0, 0, hidden))
        attended = self._linear(joined, prefix + names.out, (hidden, hidden))
        value = self._norm(graph.op("Add", attended, value), prefix + names.attention_norm)
        wide = graph.activate(encoder.activation, self._linear(value, prefix + names.up, (inner, hidden)))
        narrow = self._linear(wide, prefix + names.down, (hidden, inner))
        return self._norm(graph.op("Add", narrow, value), prefix + names.output_norm)

    def _linear(self, value: str, name: str, shape: tuple[int, int], scale: float = 1.0) -> str:
        """value @ weight.T + bias, both times `scale`; `shape` is (out, in) as stored."""
        graph, out = self.graph, shape[0]
        weight, bias = f"{self.prefix}{name}.weight", f"{self.prefix}{name}.bias"
        self.weights.check(weight, shape)
        self.weights.check(bias, (out,))
        factor = np.float32(scale)
        w = graph.weight(
            f"{name}.weight",
            (shape[1], out),
            lambda: np.ascontiguousarray((self.weights.get(weight, shape) * factor).T),
        )
        b = graph.weight(f"{name}.bias", (out,), lambda: self.weights.get(bias, (out,)) * factor)
        return graph.op("Add", graph.op("MatMul", value, w), b)

    def _norm(self, value: str, name: str) -> str:
        encoder = self.encoder
        shape = (encoder.hidden,)
        weight, bias = norm_names(self.weights, self.prefix + name)
        self.weights.check(weight, shape)
        self.weights.check(bias, shape)
        return self.graph.layer_norm(
            value,
            self.graph.weight(f"{name}.weight", shape, lambda: self.weights.get(weight, shape)),
            self.graph.weight(f"{name}.bias", shape, lambda: self.weights.get(bias, shape)),
            encoder.norm_eps,
        )

    def _words(self) -> str:
        name, shape = "embeddings.word_embeddings.weight", (self.encoder.vocab_size, self.encoder.hidden)
        self.weights.check(self.prefix + name, shape)
        return self.graph.weight(name, shape, lambda: self.weights.get(self.prefix + name, shape))

    def _segment_table(self) -> str:
        name, shape = "embeddings.token_type_embeddings.weight", (self.encoder.token_types, self.encoder.hidden)
        self.weights.check(self.prefix + name, shape)
        return self.graph.weight(name, shape, lambda: self.weights.get(self.prefix + name, shape))

    def _position_table(self) -> str:
        """The position table, with row 0 of the token types added where the family has them and no input does."""
        encoder, weights = self.encoder, self.weights
        name, shape = "embeddings.position_embeddings.weight", (encoder.max_positions, encoder.hidden)
        types, types_shape = "embeddings.token_type_embeddings.weight", (encoder.token_types, encoder.hidden)
        weights.check(self.prefix + name, shape)
        if not encoder.token_types or self.segments:
            return self.graph.weight(name, shape, lambda: weights.get(self.prefix + name, shape))
        weights.check(self.prefix + types, types_shape)
        return self.graph.weight(
            name,
            shape,
            lambda: weights.get(self.prefix + name, shape) + weights.get(self.prefix + types, types_shape)[0],
        )


def norm_names(weights: Weights, name: str) -> tuple[str, str]:
    """A LayerNorm's tensors; checkpoints that came from TensorFlow call them gamma and beta."""
    if f"{name}.weight" not in weights and f"{name}.gamma" in weights:
        return f"{name}.gamma", f"{name}.beta"
    return f"{name}.weight", f"{name}.bias"


def relative_buckets(span: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """T5's bucket of each distance key - query in -span..span (Raffel et al. 2020, as MPNet uses it).

    Half of the buckets are for keys after the query; of each half, distances below 8 have one bucket each, the
    others share 8 that grow by the logarithm up to MPNET_MAX_DISTANCE. float32, as the models were trained.
    """
    distance = np.arange(-span, span + 1)
    half, exact = _MPNET_BUCKETS // 2, _MPNET_BUCKETS // 4
    far: Floats = np.maximum(np.abs(distance), 1).astype(np.float32) / np.float32(exact)
    scaled = np.log(far) / np.float32(math.log(MPNET_MAX_DISTANCE / exact)) * np.float32(half - exact)
    logarithmic = np.minimum(exact + scaled.astype(np.int64), half - 1)
    near = np.abs(distance)
    return (distance > 0) * half + np.where(near < exact, near, logarithmic)
