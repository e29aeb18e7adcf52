"""Add stored tensors to a graph, as constants that are checked now and read when the graph is written.

Raises ModelFileError for tensors that are missing or of another shape.
"""

from __future__ import annotations

import numpy as np

from shoal.models.convert.contract.weights import Weights
from shoal.models.convert.graphs.builder import Graph


def add_tensor(graph: Graph, weights: Weights, stored: str, shape: tuple[int, ...], name: str) -> str:
    """Add the tensor `stored` unchanged, as the constant `name`."""
    weights.check(stored, shape)
    return graph.weight(name, shape, lambda: weights.get(stored, shape))


def add_matrix(graph: Graph, weights: Weights, stored: str, shape: tuple[int, int], name: str) -> str:
    """Add a matrix stored as (out, in), transposed for multiplication."""
    weights.check(stored, shape)
    return graph.weight(name, shape[::-1], lambda: np.ascontiguousarray(weights.get(stored, shape).T))


def append_linear(graph: Graph, weights: Weights, value: str, stored: str, shape: tuple[int, int], name: str) -> str:
    """Append value @ weight.T + bias; `shape` is (out, in)."""
    weight = add_matrix(graph, weights, f"{stored}.weight", shape, f"{name}.weight")
    bias = add_tensor(graph, weights, f"{stored}.bias", shape[:1], f"{name}.bias")
    return graph.op("Add", graph.op("MatMul", value, weight), bias)


def append_layer_norm(
    graph: Graph, weights: Weights, value: str, stored: str, width: int, epsilon: float, name: str
) -> str:
    """Append a LayerNorm over the last axis, of `width`."""
    weight, bias = norm_names(weights, stored)
    scale = add_tensor(graph, weights, weight, (width,), f"{name}.weight")
    return graph.layer_norm(value, scale, add_tensor(graph, weights, bias, (width,), f"{name}.bias"), epsilon)


def norm_names(weights: Weights, name: str) -> tuple[str, str]:
    """Return the names of a LayerNorm's tensors; checkpoints from TensorFlow call them gamma and beta."""
    if f"{name}.weight" not in weights and f"{name}.gamma" in weights:
        return f"{name}.gamma", f"{name}.beta"
    return f"{name}.weight", f"{name}.bias"
