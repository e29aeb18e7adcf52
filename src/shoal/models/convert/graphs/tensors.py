"""Add stored tensors to a graph, as constants that are checked now and read when the graph is written.

Raises ModelFileError for tensors that are missing or of another shape.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shoal.models.convert.contract.architecture import Norm
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


def append_linear(
    graph: Graph, weights: Weights, value: str, stored: str, shape: tuple[int, int], name: str, *, bias: bool = True
) -> str:
    """Append value @ weight.T + bias; `shape` is (out, in)."""
    product = graph.op("MatMul", value, add_matrix(graph, weights, f"{stored}.weight", shape, f"{name}.weight"))
    if not bias:
        return product
    return graph.op("Add", product, add_tensor(graph, weights, f"{stored}.bias", shape[:1], f"{name}.bias"))


def append_layer_norm(
    graph: Graph, weights: Weights, value: str, stored: str, width: int, epsilon: float, name: str
) -> str:
    """Append a LayerNorm over the last axis, of `width`."""
    return append_norm(graph, weights, value, Norm(eps=epsilon), NormWeights(stored, width, name))


class NormWeights(NamedTuple):
    """A norm over `width` numbers, `stored` under a name; `name` is that of its constants. Its result is multiplied by
    `scale`."""

    stored: str
    width: int
    name: str
    scale: float = 1.0


def append_norm(graph: Graph, weights: Weights, value: str, norm: Norm, place: NormWeights) -> str:
    """Append a norm over the last axis."""
    weight, bias = norm_names(weights, place.stored)
    shape, offset, factor = (place.width,), np.float32(norm.offset), np.float32(place.scale)
    weights.check(weight, shape)
    scales = graph.weight(f"{place.name}.weight", shape, lambda: (weights.get(weight, shape) + offset) * factor)
    if norm.kind == "rms":
        return graph.rms_norm(value, scales, norm.eps)
    if not norm.bias:
        return graph.layer_norm(value, scales, None, norm.eps)
    weights.check(bias, shape)
    shifts = graph.weight(f"{place.name}.bias", shape, lambda: weights.get(bias, shape) * factor)
    return graph.layer_norm(value, scales, shifts, norm.eps)


def norm_names(weights: Weights, name: str) -> tuple[str, str]:
    """Return the names of a LayerNorm's tensors; checkpoints from TensorFlow call them gamma and beta."""
    if f"{name}.weight" not in weights and f"{name}.gamma" in weights:
        return f"{name}.gamma", f"{name}.beta"
    return f"{name}.weight", f"{name}.bias"
