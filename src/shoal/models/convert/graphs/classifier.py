"""Append a sequence classifier's head: from the first token's vector to one logit per label."""

from __future__ import annotations

from shoal.models.convert.contract.types import Classifier
from shoal.models.convert.contract.weights import Weights
from shoal.models.convert.graphs.builder import Graph
from shoal.models.convert.graphs.tensors import append_linear


def build_classifier(graph: Graph, classifier: Classifier, weights: Weights, tokens: str, width: int) -> None:
    """Append the head after `tokens` [b, l, width], writing the spec's output, float32 [b, labels].

    Raises ModelFileError, naming file and tensor, for a head that is missing or has another shape.
    """
    first = graph.op("Gather", tokens, graph.integer(0), axis=1)
    dense, out, labels = classifier.dense, classifier.out, len(classifier.spec.labels)
    inner = append_linear(graph, weights, first, dense, (width, width), f"head/{dense}")
    inner = graph.activate(classifier.activation, inner)
    logits = append_linear(graph, weights, inner, out, (labels, width), f"head/{out}")
    graph.op("Identity", logits, name=classifier.spec.output)
