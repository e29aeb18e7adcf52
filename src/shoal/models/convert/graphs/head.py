"""Append pooling and the modules after it, from token vectors to a sentence's, ending in the two outputs.

Everything that counts or selects positions uses integers: an engine that runs in bfloat16 cannot tell position 257 from
258.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shoal.models.convert.contract.types import Contract, Dense, LayerNorm, Pooling, PoolingMode, Truncate
from shoal.models.convert.contract.weights import open_file, open_weights
from shoal.models.convert.graphs.builder import Graph
from shoal.models.convert.graphs.tensors import add_matrix, add_tensor, append_layer_norm

SENTENCE = "sentence_embedding"
POOLED = "pooled"
TOKENS = "token_embeddings"
TORCH_NORM_EPS = 1e-5
"""torch.nn.LayerNorm's default, which sentence-transformers' LayerNorm module keeps."""


def pooling_input(pooling: Pooling) -> str:
    """Return the mask that pooling reads: a separate one if the prompt's tokens are excluded."""
    return "attention_mask" if pooling.include_prompt else "pooling_mask"


def build_head(graph: Graph, contract: Contract, folder: Path, tokens: str, *, name: str | None = SENTENCE) -> None:
    """Append pooling and modules after `tokens` [b, l, width], writing POOLED and, unless `name` is None, the final
    vector.

    POOLED is the value before a final Normalize; without one, both outputs are equal.
    """
    append_modules(graph, contract, folder, _pool(graph, contract.pooling, tokens), name=name)


def append_modules(graph: Graph, contract: Contract, folder: Path, pooled: str, *, name: str | None = SENTENCE) -> None:
    """Append only the modules, after one vector per text [b, width]; the outputs are those of `build_head`."""
    modules = contract.modules[:-1] if contract.ends_normalized else contract.modules
    for module in modules:
        if isinstance(module, Dense):
            pooled = append_dense(graph, module, folder, pooled)
        elif isinstance(module, LayerNorm):
            weights = open_weights(folder, module.path)
            pooled = append_layer_norm(graph, weights, pooled, "norm", module.dimension, TORCH_NORM_EPS, module.path)
        elif isinstance(module, Truncate):
            ends = graph.integers(module.dimension)
            pooled = graph.op("Slice", pooled, graph.integers(0), ends, graph.integers(-1))
        else:
            pooled = append_normalize(graph, pooled)
    graph.op("Identity", pooled, name=POOLED)
    if name is not None and contract.ends_normalized:
        append_normalize(graph, POOLED, name)
    elif name is not None:
        graph.op("Identity", pooled, name=name)


def _pool(graph: Graph, pooling: Pooling, tokens: str) -> str:
    mask = pooling_input(pooling)
    parts = [append_pooling(graph, mode, tokens, mask) for mode in pooling.modes]
    return parts[0] if len(parts) == 1 else graph.op("Concat", *parts, axis=-1)


def append_pooling(graph: Graph, mode: PoolingMode, tokens: str, mask: str) -> str:
    """Append one pooling of `tokens` [b, l, width] that `mask`, int64 [b, l], keeps: [b, width]."""
    return _POOLINGS[mode](graph, tokens, mask)


def _cls(graph: Graph, tokens: str, mask: str) -> str:
    """The first token that the mask keeps; token 0 if it keeps none."""
    if mask == "attention_mask":
        return graph.op("Gather", tokens, graph.integer(0), axis=1)
    # Tokens are padded on the right, so the mask's first 1 is the end of the prompt.
    return pick_first(graph, tokens, mask)


def pick_first(graph: Graph, tokens: str, mask: str) -> str:
    """Select the token of each row at the first 1 of an int64 mask [b, l]; token 0 if there is none."""
    steps = graph.steps(mask)
    length = graph.op("Gather", graph.op("Shape", mask), graph.integer(1))
    ahead = graph.reduce("ReduceMax", graph.op("Mul", mask, graph.op("Sub", length, steps)), 1, keep=True)
    first = graph.op("Mod", graph.op("Sub", length, ahead), length)
    return _pick(graph, tokens, graph.op("Equal", steps, first))


def _last(graph: Graph, tokens: str, mask: str) -> str:
    """The last token that the mask keeps; zeros if it keeps none."""
    steps = graph.steps(mask)
    last = graph.reduce("ReduceMax", graph.op("Mul", mask, steps), 1, keep=True)
    kept = graph.op("Greater", mask, graph.integer(0))
    return _pick(graph, tokens, graph.op("And", graph.op("Equal", steps, last), kept))


def _max(graph: Graph, tokens: str, mask: str) -> str:
    """The largest value of each dimension; zeros if the mask keeps no token."""
    kept = graph.op("Greater", graph.unsqueeze(mask, -1), graph.integer(0))
    highest = graph.reduce("ReduceMax", graph.op("Where", kept, tokens, graph.number(-1e9)), 1, keep=False)
    some = graph.op("Greater", _count(graph, mask), graph.integer(0))
    return graph.op("Where", some, highest, graph.number(0.0))


def _mean(graph: Graph, tokens: str, mask: str) -> str:
    return graph.op("Div", _sum(graph, tokens, mask), _at_least_one(graph, _count(graph, mask)))


def _mean_sqrt_len(graph: Graph, tokens: str, mask: str) -> str:
    return graph.op("Div", _sum(graph, tokens, mask), graph.op("Sqrt", _at_least_one(graph, _count(graph, mask))))


def _weighted_mean(graph: Graph, tokens: str, mask: str) -> str:
    """Mean with weights 1, 2, 3, ... by position; excluded prompt tokens still count as positions."""
    weights = graph.op("Mul", mask, graph.op("Add", graph.steps(mask), graph.integer(1)))
    return graph.op("Div", _sum(graph, tokens, weights), _at_least_one(graph, _count(graph, weights)))


_POOLINGS: dict[PoolingMode, Callable[[Graph, str, str], str]] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}


def _count(graph: Graph, weights: str) -> str:
    """The sum of int64 weights, [b, 1]."""
    return graph.reduce("ReduceSum", weights, 1, keep=True)


def _at_least_one(graph: Graph, count: str) -> str:
    """As float. A sum over no token is zeros, so any divisor but 0 gives the zeros that 1e-9 gives the reference."""
    return graph.op("Max", graph.cast_float(count), graph.number(1.0))


def _sum(graph: Graph, tokens: str, weights: str) -> str:
    weighted = graph.op("Mul", tokens, graph.unsqueeze(graph.cast_float(weights), -1))
    return graph.reduce("ReduceSum", weighted, 1, keep=False)


def _pick(graph: Graph, tokens: str, where: str) -> str:
    """The sum of the tokens where a bool [b, l] is true: one of them, or none."""
    return _sum(graph, tokens, where)


def append_normalize(graph: Graph, value: str, name: str | None = None) -> str:
    """Scale every vector to unit length, along the last axis."""
    length = graph.op("Max", graph.reduce("ReduceL2", value, -1, keep=True), graph.number(1e-12))
    return graph.op("Div", value, length, name=name)


def append_dense(graph: Graph, dense: Dense, folder: Path, value: str) -> str:
    """Append the layer over vectors [..., in_features]. Raises ModelFileError for weights that do not fit it."""
    weights = open_file(folder, dense.file) if dense.file else open_weights(folder, dense.path)
    shape = (dense.out_features, dense.in_features)
    out = graph.op("MatMul", value, add_matrix(graph, weights, f"{dense.stem}weight", shape, f"{dense.place}.weight"))
    if dense.bias:
        bias = add_tensor(graph, weights, f"{dense.stem}bias", shape[:1], f"{dense.place}.bias")
        out = graph.op("Add", out, bias)
    out = graph.activate(dense.activation, out)
    if not dense.residual:
        return out
    if dense.in_features != dense.out_features:
        residual = add_matrix(graph, weights, "residual.weight", shape, f"{dense.place}.residual")
        value = graph.op("MatMul", value, residual)
    return graph.op("Add", out, value)
