"""Build a whole text model as one ONNX graph: an encoder or a table, then pooling and modules, a classifier, or heads
over every token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from shoal.errors import ModelFileError
from shoal.models.convert.contract import Contract, Dense, Encoder, LayerNorm
from shoal.models.convert.contract.adapters import open_encoder, set_task
from shoal.models.convert.contract.spec import ADAPTERS
from shoal.models.convert.contract.weights import has_weights
from shoal.models.convert.graphs.builder import BuiltGraph, Graph, write_graph
from shoal.models.convert.graphs.classifier import build_classifier
from shoal.models.convert.graphs.encoder import build_encoder
from shoal.models.convert.graphs.head import POOLED, SENTENCE, TOKENS, append_modules, build_head, pooling_input
from shoal.models.convert.graphs.late import build_token_heads
from shoal.models.convert.graphs.mlm import OUTPUT as SPARSE
from shoal.models.convert.graphs.mlm import build_splade
from shoal.models.convert.graphs.static import build_table

Outputs: TypeAlias = list[tuple[str, tuple[int | str, ...]]]
"""Outputs of a graph: names, and the axes after the batch."""


def graph_inputs(contract: Contract) -> tuple[str, ...]:
    """Return the inputs of a built graph, int64 [b, l]."""
    if contract.classifier is not None:
        segments = ("token_type_ids",) if contract.classifier.segments else ()
        return ("input_ids", "attention_mask", *segments)
    adapters = (ADAPTERS,) if _has_tasks(contract) else ()
    return tuple(dict.fromkeys(("input_ids", "attention_mask", pooling_input(contract.pooling), *adapters)))


def _has_tasks(contract: Contract) -> bool:
    """Whether each text may have a task of its own. Classifiers were trained for one."""
    encoder = contract.encoder
    return contract.classifier is None and encoder is not None and encoder.adapters is not None


def can_build(folder: Path, contract: Contract) -> bool:
    """Whether a graph can be built: a table or a known family, and weights that may be read."""
    layers = (*contract.modules, *(contract.late.layers if contract.late else ()))
    paths = [
        layer.path for layer in layers if isinstance(layer, LayerNorm) or (isinstance(layer, Dense) and not layer.file)
    ]
    known = contract.encoder is not None or contract.table is not None
    return known and all(has_weights(folder, path) for path in (contract.encoder_path, *paths))


def build_text_graph(
    folder: Path,
    contract: Contract,
    path: Path,
    *,
    progress: Callable[[float], None] | None = None,
) -> BuiltGraph:
    """Write the model's graph to `path`.

    An embedder's graph ends in `sentence_embedding` (all modules) and `pooled` (before a final Normalize), float32 [b,
    dimension], and in `token_embeddings` (before the pooling), float32 [b, l, width]; a classifier's in `logits`,
    float32 [b, labels]; SPLADE's in `sparse_embedding`, float32 [b, vocabulary]. Heads over every token add their own
    outputs. Raises ModelFileError for an unknown family, and for weights that are missing or do not fit the
    configuration.
    """
    graph = Graph()
    outputs: Outputs
    if contract.table is not None:
        append_modules(graph, contract, folder, build_table(graph, contract.table, folder))
        outputs = [(SENTENCE, (contract.dimension,)), (POOLED, (contract.dimension,))]
    elif contract.encoder is not None:
        outputs = _over_encoder(graph, contract, contract.encoder, folder)
    else:
        raise ModelFileError("this architecture cannot be built", file=contract.file("config.json"), key="model_type")
    return write_graph(graph, path, inputs=graph_inputs(contract), outputs=outputs, progress=progress)


def _over_encoder(graph: Graph, contract: Contract, encoder: Encoder, folder: Path) -> Outputs:
    tasks, classifier, splade = _has_tasks(contract), contract.classifier, contract.splade
    weights = open_encoder(folder, contract.encoder_path, set_task(encoder, None) if tasks else encoder)
    segments = classifier is not None and classifier.segments
    tokens = build_encoder(graph, encoder, weights, segments=segments, tasks=tasks)
    if classifier is not None:
        build_classifier(graph, encoder, classifier, weights, tokens)
        return [(classifier.spec.output, (len(classifier.spec.labels),))]
    if splade is not None:
        build_splade(graph, encoder, splade, weights, tokens)
        return [(SPARSE, (encoder.vocab_size,))]
    if not contract.dimension:
        return build_token_heads(graph, contract, folder, tokens)
    return _with_vectors(graph, contract, folder, tokens, encoder.hidden)


def _with_vectors(graph: Graph, contract: Contract, folder: Path, tokens: str, width: int) -> Outputs:
    build_head(graph, contract, folder, tokens)
    graph.op("Identity", tokens, name=TOKENS)
    outputs: Outputs = [(SENTENCE, (contract.dimension,)), (POOLED, (contract.dimension,)), (TOKENS, ("l", width))]
    return outputs + build_token_heads(graph, contract, folder, tokens)
