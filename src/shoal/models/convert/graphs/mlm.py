"""Append a masked language model's head with SPLADE: a weight for each vocabulary entry.

The logits [b, l, vocabulary] are by far the largest tensor of such a model, so only the matrix product creates one.
Padding is removed from the small vectors before it. Bias, relu and logarithm preserve order, so they come after the
maximum over the tokens. Only the sum needs all of them for each token.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.models.convert.contract.architecture import Activation, Encoder, Family
from shoal.models.convert.contract.types import Splade
from shoal.models.convert.contract.weights import Weights
from shoal.models.convert.graphs.builder import Graph
from shoal.models.convert.graphs.encoder import tensor_prefix
from shoal.models.convert.graphs.tensors import NormWeights, add_matrix, add_tensor, append_linear, append_norm

OUTPUT = "sparse_embedding"


class MaskedHead(NamedTuple):
    """Where a family stores its head: a dense layer, a norm, then the last layer. Its `matrix` may not be stored; its
    bias is the first of `biases` that is. `activation` None: the encoder's own."""

    dense: str
    norm: str
    matrix: str
    biases: tuple[str, ...]
    activation: Activation | None


_ROBERTA = MaskedHead(
    "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder.weight", ("lm_head.decoder.bias", "lm_head.bias"), "gelu"
)
HEADS: dict[Family, MaskedHead] = {
    "bert": MaskedHead(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder.weight",
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
        None,
    ),
    "roberta": _ROBERTA,
    "mpnet": _ROBERTA,
    "modernbert": MaskedHead("head.dense", "head.norm", "decoder.weight", ("decoder.bias",), None),
    "distilbert": MaskedHead(
        "vocab_transform", "vocab_layer_norm", "vocab_projector.weight", ("vocab_projector.bias",), None
    ),
}
"""By the layout of each family's ...ForMaskedLM in transformers."""


def last_layer(encoder: Encoder, splade: Splade, weights: Weights) -> tuple[str, str]:
    """Return the tensors of the last layer, matrix and bias: its own, else the word embeddings if they are tied.

    Raises ModelFileError if neither exists.
    """
    head = HEADS[encoder.family]
    matrix = head.matrix
    if matrix not in weights and splade.tied:
        matrix = f"{tensor_prefix(encoder, weights)}{encoder.embeddings.words}.weight"
    bias = next((name for name in head.biases if name in weights), head.biases[-1])
    weights.check(matrix, (encoder.vocab_size, encoder.hidden))
    weights.check(bias, (encoder.vocab_size,))
    return matrix, bias


def inner_activation(encoder: Encoder, splade: Splade) -> Activation:
    """Return the activation after the head's dense layer."""
    return splade.inner or HEADS[encoder.family].activation or encoder.shape.activation


def build_splade(graph: Graph, encoder: Encoder, splade: Splade, weights: Weights, tokens: str) -> None:
    """Append head and pooling after `tokens` [b, l, hidden], writing OUTPUT, float32 [b, vocabulary].

    The first token of a text must be attended. Raises ModelFileError for a head that is missing or has another shape.
    """
    head = HEADS[encoder.family]
    width = encoder.hidden
    name, biased = f"head/{head.dense}", splade.dense_bias
    value = append_linear(graph, weights, tokens, head.dense, (width, width), name, bias=biased)
    value = graph.activate(inner_activation(encoder, splade), value)
    value = append_norm(graph, weights, value, encoder.shape.norm, NormWeights(head.norm, width, f"head/{head.norm}"))
    matrix, bias = last_layer(encoder, splade, weights)
    words = add_matrix(graph, weights, matrix, (encoder.vocab_size, width), "head/matrix")
    shift = add_tensor(graph, weights, bias, (encoder.vocab_size,), "head/bias")
    if splade.strategy == "max":
        kept = graph.op("Greater", graph.unsqueeze("attention_mask", -1), graph.integer(0))
        first = graph.op("Gather", value, graph.integers(0), axis=1)
        logits = graph.op("MatMul", graph.op("Where", kept, value, first), words)
        largest = graph.reduce("ReduceMax", logits, 1, keep=False)
        graph.op("Identity", _weigh(graph, splade, graph.op("Add", largest, shift)), name=OUTPUT)
    else:
        logits = graph.op("Add", graph.op("MatMul", value, words), shift)
        mask = graph.unsqueeze(graph.cast_float("attention_mask"), 1)
        summed = graph.op("MatMul", mask, _weigh(graph, splade, logits))
        graph.op("Identity", graph.reduce("ReduceSum", summed, 1, keep=False), name=OUTPUT)


def append_splade(graph: Graph, splade: Splade, logits: str) -> None:
    """Append only the pooling, after the logits [b, l, vocabulary] of a graph that came with the model, writing
    OUTPUT."""
    weighed = _weigh(graph, splade, logits)
    mask = graph.unsqueeze(graph.cast_float("attention_mask"), -1)
    kind = "ReduceMax" if splade.strategy == "max" else "ReduceSum"
    graph.op("Identity", graph.reduce(kind, graph.op("Mul", weighed, mask), 1, keep=False), name=OUTPUT)


def _weigh(graph: Graph, splade: Splade, logits: str) -> str:
    value = graph.op("Relu", logits)
    for _ in range(2 if splade.activation == "log1p_relu" else 1):
        value = graph.op("Log", graph.op("Add", value, graph.number(1.0)))
    return value
