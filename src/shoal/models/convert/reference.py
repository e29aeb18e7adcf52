"""Reference for verification: the forward pass in numpy, straight from safetensors, one text at a time.

It shares only the reading of files and the names of tensors with the graphs. Texts are never padded here, so agreement
with a padded batch also shows that padding changes nothing. Written for comparison with the papers, not for speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from shoal.errors import ModelFileError
from shoal.models.convert.contract import Contract, Dense, Encoder, LayerNorm
from shoal.models.convert.contract.adapters import open_encoder, set_task
from shoal.models.convert.contract.types import Late, Splade, Table, Truncate
from shoal.models.convert.contract.weights import Weights, open_file, open_weights
from shoal.models.convert.graphs.classifier import answer_rows
from shoal.models.convert.graphs.mlm import HEADS, inner_activation, last_layer
from shoal.models.convert.numpy_transformer import Floats, Ids, Transformer, activate, affine, encode, norm
from shoal.specs import TextSpec


class Embedding(NamedTuple):
    """Embeddings, one row per text: after all modules, and before a final Normalize; and the token vectors of each
    text."""

    sentence: Floats
    pooled: Floats
    tokens: list[Floats]


def outputs(
    folder: Path,
    contract: Contract,
    spec: TextSpec,
    texts: Sequence[Ids],
    skips: Sequence[int] | None = None,
    adapters: Sequence[int] = (),
) -> dict[str, list[Floats]]:
    """Return the outputs of an embedder's graph for texts given as token ids: by name, one array per text. `adapters`:
    the number of each text's adapter, as the graph takes them."""
    tokens = _adapted_tokens(folder, contract, texts, adapters) if len(adapters) else _tokens(folder, contract, texts)
    made: dict[str, list[Floats]] = {}
    if contract.dimension:
        found = _build_embedding(folder, contract, tokens, skips)
        made = {spec.sentence_embedding: list(found.sentence), spec.pooled: list(found.pooled)}
    if spec.tokens:
        made[spec.tokens] = tokens
    if contract.splade is not None and contract.encoder is not None and spec.sparse is not None:
        made[spec.sparse.output] = _splade(folder, contract, contract.encoder, contract.splade, tokens)
    elif contract.token_weights is not None and spec.sparse is not None:
        layer = contract.token_weights.layer
        made[spec.sparse.output] = [_apply(layer, folder, row)[:, 0] for row in tokens]
    if contract.late is not None and spec.multi is not None:
        made[spec.multi.output] = [_late(folder, contract.late, row) for row in tokens]
    return made


def embed(
    folder: Path, contract: Contract, encoder: Encoder, texts: Sequence[Ids], skips: Sequence[int] | None = None
) -> Embedding:
    """Embed texts given as token ids; `skips` is the number of leading tokens to exclude from pooling."""
    return _build_embedding(
        folder, contract, encode(open_encoder(folder, contract.encoder_path, contract.encoder), encoder, texts), skips
    )


def _adapted_tokens(folder: Path, contract: Contract, texts: Sequence[Ids], adapters: Sequence[int]) -> list[Floats]:
    """As `_tokens`, each text with the weights of its own task."""
    encoder = contract.encoder
    assert encoder is not None
    assert encoder.adapters is not None
    names = (None, *encoder.adapters.tasks)
    chosen = {each: replace(contract, encoder=set_task(encoder, names[each])) for each in set(adapters)}
    return [_tokens(folder, chosen[each], [ids])[0] for ids, each in zip(texts, adapters, strict=True)]


def _tokens(folder: Path, contract: Contract, texts: Sequence[Ids]) -> list[Floats]:
    """Return the token vectors of each text. Raises ModelFileError for a model with neither encoder nor table."""
    weights = open_encoder(folder, contract.encoder_path, contract.encoder)
    if contract.encoder is not None:
        return encode(weights, contract.encoder, texts)
    if contract.table is None:
        raise ModelFileError("unknown architecture", file=contract.file("config.json"), key="model_type")
    return [np.stack([_look_up(weights, contract.table, int(token)) for token in ids]) for ids in texts]


def _look_up(weights: Weights, table: Table, token: int) -> Floats:
    """Return the vector of one token id."""
    places = weights.integers(table.mapping) if table.mapping else None
    row = weights.table_rows(table.tensor, np.array([token if places is None else places[token]]))[0]
    weighed: Floats = row * weights.get(table.weights, (table.ids,))[token] if table.weights else row
    return weighed


def _late(folder: Path, late: Late, row: Floats) -> Floats:
    for layer in late.layers:
        row = _apply(layer, folder, row)
    return _unit(row)


def _splade(
    folder: Path, contract: Contract, encoder: Encoder, splade: Splade, tokens: Sequence[Floats]
) -> list[Floats]:
    """Return each text's weights over the vocabulary, from the logits of its own tokens."""
    weights = open_encoder(folder, contract.encoder_path, contract.encoder)
    read, head = Transformer(weights, encoder.shape), HEADS[encoder.family]
    matrix, bias = last_layer(encoder, splade, weights)
    last = weights.get(matrix, (encoder.vocab_size, encoder.hidden)), weights.get(bias, (encoder.vocab_size,))
    dense = read.linear(head.dense, encoder.hidden, encoder.hidden, bias=splade.dense_bias)
    scale, inner_kind = read.norm(head.norm), inner_activation(encoder, splade)
    made = []
    for row in tokens:
        inner = scale(activate(inner_kind, dense(row)))
        weighed = np.log1p(np.maximum(affine(inner, *last), np.float32(0)))
        if splade.activation == "log1p_relu":
            weighed = np.log1p(weighed)
        made.append(weighed.max(axis=0) if splade.strategy == "max" else weighed.sum(axis=0))
    return made


def _build_embedding(folder: Path, contract: Contract, tokens: list[Floats], skips: Sequence[int] | None) -> Embedding:
    pooled = np.stack(
        [
            np.concatenate([_pool(mode, row, skip) for mode in contract.pooling.modes])
            for row, skip in zip(tokens, skips or [0] * len(tokens), strict=True)
        ]
    )
    before = pooled
    for module in contract.modules:
        before = pooled
        pooled = _apply(module, folder, pooled)
    return Embedding(pooled, before if contract.ends_normalized else pooled, tokens)


def score(
    folder: Path, contract: Contract, encoder: Encoder, texts: Sequence[Ids], segments: Sequence[Ids] | None = None
) -> Floats:
    """Return the logits [texts, labels] of texts or pairs given as token ids; `segments` says which text of a pair each
    token belongs to, for models that use it. Raises ModelFileError for a model without a classifier."""
    head = contract.classifier
    if head is None:
        raise ModelFileError("belongs to a model without a classifier", file=contract.file("config.json"))
    weights = open_encoder(folder, contract.encoder_path, contract.encoder)
    rows = encode(weights, encoder, texts, segments if head.segments else None)
    pooled = [
        _pool(head.pooling, row[: _read_length(ids, head.unread)], 0) for ids, row in zip(texts, rows, strict=True)
    ]
    read, width, value = Transformer(weights, encoder.shape), encoder.hidden, np.stack(pooled)
    if head.dense:
        value = read.linear(head.dense, width, width, bias=head.dense_bias)(value)
    value = activate(head.activation, value)
    if head.norm:
        value = read.norm(head.norm)(value)
    if head.answers is not None:
        matrix, answers = answer_rows(encoder, head, weights)
        logits = value @ weights.rows(matrix, (encoder.vocab_size, width), answers).T
        return logits if head.answers.false is None else logits[:, :1] - logits[:, 1:]
    return read.linear(head.out, len(head.spec.labels), width, bias=head.out_bias)(value)


def _read_length(ids: Ids, unread: int | None) -> int:
    """Return the number of tokens up to the last one that is read."""
    read = [place for place, token in enumerate(ids) if token != unread]
    return read[-1] + 1 if read else len(ids)


def _pool(mode: str, tokens: Floats, skip: int) -> Floats:
    kept = tokens[skip:]
    pooled: Floats = np.zeros_like(tokens[0])
    if mode == "cls":
        pooled = kept[0] if len(kept) else tokens[0]
    elif not len(kept):
        pass
    elif mode == "max":
        pooled = kept.max(axis=0)
    elif mode == "lasttoken":
        pooled = kept[-1]
    elif mode == "weightedmean":
        positions = np.arange(skip + 1, len(tokens) + 1, dtype=np.float32)
        pooled = positions @ kept / positions.sum()
    else:
        divisor = len(kept) if mode == "mean" else math.sqrt(len(kept))
        pooled = kept.sum(axis=0) / np.float32(divisor)
    return pooled


def _apply(module: object, folder: Path, x: Floats) -> Floats:
    if isinstance(module, Dense):
        return _layer(module, folder, x)
    if isinstance(module, Truncate):
        return x[..., : module.dimension]
    if isinstance(module, LayerNorm):
        weights = open_weights(folder, module.path)
        shape = (module.dimension,)
        return norm(x, weights.get("norm.weight", shape), weights.get("norm.bias", shape), 1e-5)
    return _unit(x)


def _layer(dense: Dense, folder: Path, x: Floats) -> Floats:
    weights = open_file(folder, dense.file) if dense.file else open_weights(folder, dense.path)
    shape = (dense.out_features, dense.in_features)
    none = np.zeros(dense.out_features, np.float32)
    bias = weights.get(f"{dense.stem}bias", shape[:1]) if dense.bias else none
    y = activate(dense.activation, affine(x, weights.get(f"{dense.stem}weight", shape), bias))
    if dense.residual:
        y = y + (x if shape[0] == shape[1] else affine(x, weights.get("residual.weight", shape), none))
    return y


def _unit(x: Floats) -> Floats:
    normalized: Floats = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), np.float32(1e-12))
    return normalized
