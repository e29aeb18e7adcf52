"""A whole text embedding model as one ONNX graph: encoder, pooling, modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shoal.errors import ModelFileError
from shoal.models.contract import Contract, Normalize
from shoal.models.graphs.builder import INLINE_BYTES, Graph, write_graph
from shoal.models.graphs.encoder import build_encoder
from shoal.models.graphs.head import POOLED, SENTENCE, build_head, pooling_input
from shoal.models.graphs.weights import has_weights, open_weights


class Built(NamedTuple):
    """`files` are the names of what was written: the graph, and its weights where they are a file of their own."""

    parameters: int
    files: tuple[str, ...]


def graph_inputs(contract: Contract) -> tuple[str, ...]:
    """The inputs of a built graph, int64 [b, l]."""
    return tuple(dict.fromkeys(("input_ids", "attention_mask", pooling_input(contract.pooling))))


def can_build(folder: Path, contract: Contract) -> bool:
    """Whether all that a graph is built from is there: a known family, and weights that may be read."""
    paths = [module.path for module in contract.modules if not isinstance(module, Normalize)]
    return contract.encoder is not None and all(has_weights(folder, path) for path in (contract.encoder_path, *paths))


def build_text_graph(
    folder: Path,
    contract: Contract,
    path: Path,
    *,
    inline_bytes: int = INLINE_BYTES,
    progress: Callable[[float], None] | None = None,
) -> Built:
    """Write the model's graph to `path`.

    The graph ends in `sentence_embedding` (all modules) and `pooled` (before a final Normalize), float32
    [b, dimension]. Raises ModelFileError for an unknown family, and for weights that are missing, pickled or do not fit
    the configuration.
    """
    if contract.encoder is None:
        raise ModelFileError("this architecture cannot be built", file=contract.file("config.json"), key="model_type")
    weights = open_weights(folder, contract.encoder_path)
    graph = Graph()
    build_head(graph, contract, folder, build_encoder(graph, contract.encoder, weights))
    outputs = ((SENTENCE, contract.dimension), (POOLED, contract.dimension))
    files = write_graph(
        graph, path, inputs=graph_inputs(contract), outputs=outputs, inline_bytes=inline_bytes, progress=progress
    )
    return Built(graph.parameters(), tuple(file.name for file in files))
