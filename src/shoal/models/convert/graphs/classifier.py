"""Append a sequence classifier's head: from the token vectors to one logit per label."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.models.convert.contract.architecture import Encoder
from shoal.models.convert.contract.types import Classifier
from shoal.models.convert.contract.weights import Floats, Weights
from shoal.models.convert.graphs.builder import Graph
from shoal.models.convert.graphs.encoder import tensor_prefix
from shoal.models.convert.graphs.head import append_pooling
from shoal.models.convert.graphs.tensors import NormWeights, append_linear, append_norm

Ids: TypeAlias = npt.NDArray[np.int64]


def build_classifier(graph: Graph, encoder: Encoder, classifier: Classifier, weights: Weights, tokens: str) -> None:
    """Append the head after `tokens` [b, l, hidden], writing the spec's output, float32 [b, labels].

    Raises ModelFileError, naming file and tensor, for a head that is missing or has another shape.
    """
    width, dense, norm = encoder.hidden, classifier.dense, classifier.norm
    value = append_pooling(graph, classifier.pooling, tokens, _mask(graph, classifier))
    if dense:
        biased = classifier.dense_bias
        value = append_linear(graph, weights, value, dense, (width, width), f"head/{dense}", bias=biased)
    value = graph.activate(classifier.activation, value)
    if norm:
        value = append_norm(graph, weights, value, encoder.shape.norm, NormWeights(norm, width, f"head/{norm}"))
    graph.op("Identity", _logits(graph, encoder, classifier, weights, value), name=classifier.spec.output)


def _mask(graph: Graph, classifier: Classifier) -> str:
    if classifier.unread is None:
        return "attention_mask"
    read = graph.op("Not", graph.op("Equal", "input_ids", graph.integer(classifier.unread)))
    return graph.op("Mul", "attention_mask", graph.cast_int(read))


def _logits(graph: Graph, encoder: Encoder, classifier: Classifier, weights: Weights, value: str) -> str:
    width, answers = encoder.hidden, classifier.answers
    if answers is None:
        out, shape = classifier.out, (len(classifier.spec.labels), width)
        return append_linear(graph, weights, value, out, shape, f"head/{out}", bias=classifier.out_bias)
    matrix, ids = answer_rows(encoder, classifier, weights)

    def load() -> Floats:
        rows = weights.rows(matrix, (encoder.vocab_size, width), ids)
        row: Floats = (rows[0] if answers.false is None else rows[0] - rows[1])[:, None]
        return row

    return graph.op("MatMul", value, graph.weight("head/answers", (width, 1), load))


def answer_rows(encoder: Encoder, classifier: Classifier, weights: Weights) -> tuple[str, Ids]:
    """Return the tensor of a language model's last layer and its rows that are read. Raises ModelFileError if there is
    no such tensor, or no such row."""
    matrix, answers = f"{classifier.out}.weight", classifier.answers
    assert answers is not None
    if matrix not in weights and answers.tied:
        matrix = f"{tensor_prefix(encoder, weights)}{encoder.embeddings.words}.weight"
    weights.check(matrix, (encoder.vocab_size, encoder.hidden))
    return matrix, np.array(answers.ids, np.int64)
