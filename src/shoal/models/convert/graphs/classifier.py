"""Append a sequence classifier's head: from the first token's vector to one logit per label."""

from __future__ import annotations

import numpy as np

from shoal.models.convert.contract.types import Classifier
from shoal.models.convert.graphs.builder import Graph
from shoal.models.convert.graphs.weights import Weights


def build_classifier(graph: Graph, classifier: Classifier, weights: Weights, tokens: str, width: int) -> None:
    """Append the head after `tokens` [b, l, width], writing the spec's output, float32 [b, labels].

    Raises ModelFileError, naming file and tensor, for a head that is missing or has another shape.
    """
    first = graph.op("Gather", tokens, graph.integer(0), axis=1)
    inner = graph.activate(classifier.activation, _linear(graph, weights, classifier.dense, first, (width, width)))
    logits = _linear(graph, weights, classifier.out, inner, (len(classifier.spec.labels), width))
    graph.op("Identity", logits, name=classifier.spec.output)


def _linear(graph: Graph, weights: Weights, name: str, value: str, shape: tuple[int, int]) -> str:
    """Append value @ weight.T + bias; `shape` is (out, in) as stored."""
    weight, bias = f"{name}.weight", f"{name}.bias"
    weights.check(weight, shape)
    weights.check(bias, shape[:1])
    w = graph.weight(f"head/{weight}", shape[::-1], lambda: np.ascontiguousarray(weights.get(weight, shape).T))
    b = graph.weight(f"head/{bias}", shape[:1], lambda: weights.get(bias, shape[:1]))
    return graph.op("Add", graph.op("MatMul", value, w), b)
