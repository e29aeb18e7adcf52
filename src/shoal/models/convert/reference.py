"""Reference for verification: the forward pass in numpy, straight from safetensors, one text at a time.

It shares only the reading of files and the names of tensors with the graphs. Texts are never padded here, so agreement
with a padded batch also shows that padding changes nothing. Written for comparison with the papers, not for speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.errors import ModelFileError
from shoal.models.convert.contract import Contract, Dense, Encoder, LayerNorm
from shoal.models.convert.contract.types import Late, Splade, Table, Truncate
from shoal.models.convert.contract.weights import Weights, open_file, open_weights
from shoal.models.convert.graphs.encoder import LAYERS, tensor_prefix
from shoal.models.convert.graphs.layers import LayerNames, Sizes
from shoal.models.convert.graphs.mlm import HEADS, last_layer
from shoal.models.convert.graphs.tensors import norm_names
from shoal.specs import TextSpec

Floats: TypeAlias = npt.NDArray[Any]
"""float32; numpy's types do not track it through arithmetic."""

Ids: TypeAlias = npt.NDArray[np.int64]
Map: TypeAlias = Callable[[Floats], Floats]
NO_BIAS: Floats = np.zeros((), np.float32)

_GRID = np.linspace(0.0, 6.0, 6001)
_ERF = np.array([math.erf(x) for x in _GRID])
"""erf is 1 in float32 beyond 6; interpolating between points 0.001 apart has an error of at most 1.3e-7."""


class Embedding(NamedTuple):
    """Embeddings, one row per text: after all modules, and before a final Normalize; and the token vectors of each
    text."""

    sentence: Floats
    pooled: Floats
    tokens: list[Floats]


def outputs(
    folder: Path, contract: Contract, spec: TextSpec, texts: Sequence[Ids], skips: Sequence[int] | None = None
) -> dict[str, list[Floats]]:
    """Return the outputs of an embedder's graph for texts given as token ids: by name, one array per text."""
    tokens = _tokens(folder, contract, texts)
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
        folder, contract, _encode(open_weights(folder, contract.encoder_path), encoder, texts), skips
    )


def _tokens(folder: Path, contract: Contract, texts: Sequence[Ids]) -> list[Floats]:
    """Return the token vectors of each text. Raises ModelFileError for a model with neither encoder nor table."""
    weights = open_weights(folder, contract.encoder_path)
    if contract.encoder is not None:
        return _encode(weights, contract.encoder, texts)
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
    weights = open_weights(folder, contract.encoder_path)
    read, head = Transformer(weights, encoder), HEADS[encoder.family]
    matrix, bias = last_layer(encoder, splade, weights)
    last = weights.get(matrix, (encoder.vocab_size, encoder.hidden)), weights.get(bias, (encoder.vocab_size,))
    dense, scale = read.linear(head.dense, encoder.hidden, encoder.hidden), read.norm(head.norm)
    made = []
    for row in tokens:
        inner = scale(activate(head.activation or encoder.activation, dense(row)))
        weighed = np.log1p(np.maximum(linear(inner, *last), np.float32(0)))
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
    weights = open_weights(folder, contract.encoder_path)
    first = np.stack([row[0] for row in _encode(weights, encoder, texts, segments if head.segments else None)])
    read = Transformer(weights, encoder)
    inner = activate(head.activation, read.linear(head.dense, encoder.hidden, encoder.hidden)(first))
    return read.linear(head.out, len(head.spec.labels), encoder.hidden)(inner)


def _encode(
    weights: Weights, encoder: Encoder, texts: Sequence[Ids], segments: Sequence[Ids] | None = None
) -> list[Floats]:
    read = Transformer(weights, encoder, tensor_prefix(encoder, weights))
    types = segments or [np.zeros_like(ids) for ids in texts]
    rows = [_embeddings(read, encoder, ids, kinds) for ids, kinds in zip(texts, types, strict=True)]
    return read.encode(rows, [_relative_bias(read, encoder, len(row)) for row in rows], *LAYERS[encoder.family])


class Transformer:
    """The tensors of a transformer, whose names start with `prefix`, and its layers over x [l, hidden]. Every method
    that takes a name loads those tensors and returns the map that they define."""

    def __init__(self, weights: Weights, sizes: Sizes, prefix: str = "") -> None:
        self._weights = weights
        self._sizes = sizes
        self._prefix = prefix

    def get(self, name: str, *shape: int) -> Floats:
        return self._weights.get(self._prefix + name, shape)

    def rows(self, name: str, count: int, ids: Ids) -> Floats:
        """Return rows of a table of `count` vectors."""
        return self._weights.rows(self._prefix + name, (count, self._sizes.hidden), ids)

    def linear(self, name: str, out: int, into: int) -> Map:
        weight, bias = self.get(f"{name}.weight", out, into), self.get(f"{name}.bias", out)
        return lambda x: linear(x, weight, bias)

    def norm(self, name: str) -> Map:
        shape = (self._sizes.hidden,)
        scale, shift = (self._weights.get(each, shape) for each in norm_names(self._weights, self._prefix + name))
        return lambda x: norm(x, scale, shift, self._sizes.norm_eps)

    def feed_forward(self, up: str, down: str) -> Map:
        hidden, inner = self._sizes.hidden, self._sizes.intermediate
        widen, narrow = self.linear(up, inner, hidden), self.linear(down, hidden, inner)
        return lambda x: narrow(activate(self._sizes.activation, widen(x)))

    def layer(self, prefix: str, names: LayerNames, *, pre_norm: bool = False) -> Callable[[Floats, Floats], Floats]:
        """Load attention and feed-forward, each with its residual and norm (`pre_norm`: before it, else after the sum).
        The map takes x and a bias for the scores of its attention."""
        hidden, named = self._sizes.hidden, LayerNames._make(prefix + name for name in names)
        query, key, value, out = (self.linear(name, hidden, hidden) for name in named[:4])
        first_norm, second_norm = self.norm(named.attention_norm), self.norm(named.output_norm)
        feed_forward = self.feed_forward(named.up, named.down)

        def run(x: Floats, bias: Floats) -> Floats:
            read = first_norm(x) if pre_norm else x
            x = x + out(attention(query(read), key(read), value(read), self._sizes.heads, bias))
            x = x if pre_norm else first_norm(x)
            x = x + feed_forward(second_norm(x) if pre_norm else x)
            return x if pre_norm else second_norm(x)

        return run

    def encode(
        self, rows: list[Floats], biases: Sequence[Floats], stem: str, names: LayerNames, *, pre_norm: bool = False
    ) -> list[Floats]:
        """Run each x of `rows`, with its own bias, through all layers."""
        for layer in range(self._sizes.layers):
            run = self.layer(f"{stem}.{layer}.", names, pre_norm=pre_norm)
            rows = [run(row, bias) for row, bias in zip(rows, biases, strict=True)]
        return rows


def _embeddings(read: Transformer, encoder: Encoder, ids: Ids, types: Ids) -> Floats:
    x = read.rows("embeddings.word_embeddings.weight", encoder.vocab_size, ids)
    x = x + read.rows("embeddings.position_embeddings.weight", encoder.max_positions, _positions(encoder, ids))
    if encoder.token_types:
        x = x + read.rows("embeddings.token_type_embeddings.weight", encoder.token_types, types)
    return read.norm("embeddings.LayerNorm")(x)


def _relative_bias(read: Transformer, encoder: Encoder, length: int) -> Floats:
    """Return MPNet's bias [heads, query, key] by the bucket of key - query; 0 for other families."""
    if encoder.family != "mpnet":
        return NO_BIAS
    table = read.get("encoder.relative_attention_bias.weight", 32, encoder.heads)
    buckets = [[_bucket(key - query) for key in range(length)] for query in range(length)]
    return np.transpose(table[np.array(buckets)], (2, 0, 1))


def _positions(encoder: Encoder, ids: Ids) -> Ids:
    if encoder.position_offset == 0:
        return np.arange(len(ids))
    position, positions = encoder.pad_id, []
    for token in ids:
        position += token != encoder.pad_id
        positions.append(position if token != encoder.pad_id else encoder.pad_id)
    return np.array(positions, np.int64)


def _bucket(distance: int) -> int:
    """Return one of 16 buckets per side: 0..7 exact, then 8 more with limits that grow as 8 * 16 ** (k / 8) up to
    128."""
    side = 16 if distance > 0 else 0
    distance = abs(distance)
    if distance < 8:
        return side + distance
    return side + min(8 + sum(distance >= 8 * 2 ** (k / 2) for k in range(1, 8)), 15)


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
    y = activate(dense.activation, linear(x, weights.get(f"{dense.stem}weight", shape), bias))
    if dense.residual:
        y = y + (x if shape[0] == shape[1] else linear(x, weights.get("residual.weight", shape), none))
    return y


def _unit(x: Floats) -> Floats:
    normalized: Floats = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), np.float32(1e-12))
    return normalized


def linear(x: Floats, weight: Floats, bias: Floats) -> Floats:
    y: Floats = x @ weight.T + bias
    return y


def norm(x: Floats, scale: Floats, shift: Floats, epsilon: float) -> Floats:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    y: Floats = centred / np.sqrt(variance + np.float32(epsilon)) * scale + shift
    return y


def attention(query: Floats, key: Floats, value: Floats, heads: int, bias: Floats) -> Floats:
    """Compute attention. `bias` is added to the scores, [query, key] or one for each head."""
    size = query.shape[-1] // heads
    mixed = np.empty_like(query)
    for head, shift in enumerate(np.broadcast_to(bias, (heads, len(query), len(key)))):
        part = slice(head * size, (head + 1) * size)
        scores = query[:, part] @ key[:, part].T / np.float32(math.sqrt(size)) + shift
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed[:, part] = weights / weights.sum(axis=1, keepdims=True) @ value[:, part]
    return mixed


def activate(name: str, x: Floats) -> Floats:
    half, one = np.float32(0.5), np.float32(1)
    y: Floats = x
    if name == "gelu":
        erf = np.sign(x) * np.interp(np.abs(x) / math.sqrt(2.0), _GRID, _ERF).astype(np.float32)
        y = x * half * (one + erf)
    elif name == "gelu_tanh":
        y = x * half * (one + np.tanh(np.float32(math.sqrt(2.0 / math.pi)) * (x + np.float32(0.044715) * x**3)))
    elif name == "relu":
        y = np.maximum(x, np.float32(0))
    elif name == "tanh":
        y = np.tanh(x)
    elif name in ("sigmoid", "silu", "quick_gelu"):
        sigmoid = half * (one + np.tanh((x * np.float32(1.702) if name == "quick_gelu" else x) * half))
        y = sigmoid if name == "sigmoid" else x * sigmoid
    return y
