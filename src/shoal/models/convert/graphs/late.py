"""Append heads over every token's vector: late-interaction vectors, and one weight per token."""

from __future__ import annotations

from pathlib import Path

from shoal.models.convert.contract.types import Contract
from shoal.models.convert.graphs.builder import Graph
from shoal.models.convert.graphs.head import append_dense, append_normalize


def build_token_heads(
    graph: Graph, contract: Contract, folder: Path, tokens: str
) -> list[tuple[str, tuple[int | str, ...]]]:
    """Append the contract's heads after `tokens` [b, l, width]; return their outputs as (name, axes).

    Padding has vectors and weights too; ignore them. Raises ModelFileError for weights that do not fit.
    """
    outputs: list[tuple[str, tuple[int | str, ...]]] = []
    if contract.token_weights is not None and contract.sparse is not None:
        weighed = append_dense(graph, contract.token_weights.layer, folder, tokens)
        # One number per token; ReduceSum over an axis of one is a Squeeze whose form is the same in all opsets.
        outputs.append((contract.sparse.output, ("l",)))
        graph.op("Identity", graph.reduce("ReduceSum", weighed, -1, keep=False), name=contract.sparse.output)
    if contract.late is not None:
        spec = contract.late.spec
        for layer in contract.late.layers:
            tokens = append_dense(graph, layer, folder, tokens)
        append_normalize(graph, tokens, spec.output)
        outputs.append((spec.output, ("l", spec.dimension)))
    return outputs
