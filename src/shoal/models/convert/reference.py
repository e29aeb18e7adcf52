"""Reference for verification: the forward pass in numpy, straight from safetensors, one text at a time.

It shares only the reading of files with the graphs. Texts are never padded here, so agreement with a padded batch also
shows that padding changes nothing. Written for comparison with the papers, not for speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.errors import ModelFileError
from shoal.models.convert.contract import Contract, Dense, Encoder, LayerNorm
from shoal.models.convert.contract.types import Late, Splade, Table, Truncate
from shoal.models.convert.graphs.mlm import HEADS, last_layer
from shoal.models.convert.graphs.weights import Weights, open_file, open_weights
from shoal.specs import TextSpec

Floats: TypeAlias = npt.NDArray[Any]
"""float32; numpy's types do not track it through arithmetic."""

Ids: TypeAlias = npt.NDArray[np.int64]

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
        raise ModelFileError("this architecture is not known", file=contract.file("config.json"), key="model_type")
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
    tensors, head = _Tensors(weights, encoder), HEADS[encoder.family]
    matrix, bias = last_layer(encoder, splade, weights)
    shape = (encoder.vocab_size, encoder.hidden)
    last = weights.get(matrix, shape), weights.get(bias, shape[:1])
    dense, scales = tensors.head(head.dense, (encoder.hidden, encoder.hidden)), tensors.head(head.norm, shape[1:])
    made = []
    for row in tokens:
        inner = activate(head.activation or encoder.activation, linear(row, *dense))
        weighed = np.log1p(np.maximum(linear(norm(inner, *scales, encoder.norm_eps), *last), np.float32(0)))
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
        raise ModelFileError("is of a model without a classifier", file=contract.file("config.json"))
    weights = open_weights(folder, contract.encoder_path)
    first = np.stack([row[0] for row in _encode(weights, encoder, texts, segments if head.segments else None)])
    square, wide = (encoder.hidden, encoder.hidden), (len(head.spec.labels), encoder.hidden)
    inner = linear(first, weights.get(f"{head.dense}.weight", square), weights.get(f"{head.dense}.bias", square[:1]))
    out = weights.get(f"{head.out}.weight", wide), weights.get(f"{head.out}.bias", wide[:1])
    return linear(activate(head.activation, inner), *out)


def _encode(
    weights: Weights, encoder: Encoder, texts: Sequence[Ids], segments: Sequence[Ids] | None = None
) -> list[Floats]:
    tensors = _Tensors(weights, encoder)
    types = segments or [np.zeros_like(ids) for ids in texts]
    rows = [tensors.embeddings(ids, kinds) for ids, kinds in zip(texts, types, strict=True)]
    for layer in range(encoder.layers):
        block = tensors.block(layer)
        rows = [block.run(row, encoder, tensors.relative(len(row))) for row in rows]
    return rows


class _Block(NamedTuple):
    """One layer's weights: (weight [out, in], bias) pairs, and (scale, shift) pairs for the norms."""

    query: tuple[Floats, Floats]
    key: tuple[Floats, Floats]
    value: tuple[Floats, Floats]
    out: tuple[Floats, Floats]
    first_norm: tuple[Floats, Floats]
    up: tuple[Floats, Floats]
    down: tuple[Floats, Floats]
    second_norm: tuple[Floats, Floats]

    def run(self, x: Floats, encoder: Encoder, relative: Floats | None) -> Floats:
        """Run x [l, hidden] through attention and feed-forward, each with its residual and norm."""
        size = encoder.hidden // encoder.heads
        mixed = np.empty_like(x)
        query, key, value = (linear(x, *pair) for pair in (self.query, self.key, self.value))
        for head in range(encoder.heads):
            part = slice(head * size, (head + 1) * size)
            scores = query[:, part] @ key[:, part].T / np.float32(math.sqrt(size))
            if relative is not None:
                scores = scores + relative[head]
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed[:, part] = weights / weights.sum(axis=1, keepdims=True) @ value[:, part]
        x = norm(x + linear(mixed, *self.out), *self.first_norm, encoder.norm_eps)
        inner = linear(activate(encoder.activation, linear(x, *self.up)), *self.down)
        return norm(x + inner, *self.second_norm, encoder.norm_eps)


class _Tensors:
    """Reads tensors by the names that each family uses."""

    def __init__(self, weights: Weights, encoder: Encoder) -> None:
        self._weights = weights
        self._encoder = encoder
        self._prefix = "" if "embeddings.word_embeddings.weight" in weights else encoder.prefix

    def embeddings(self, ids: Ids, types: Ids) -> Floats:
        encoder = self._encoder
        x = self._rows("embeddings.word_embeddings.weight", encoder.vocab_size, ids)
        x = x + self._rows("embeddings.position_embeddings.weight", encoder.max_positions, _positions(encoder, ids))
        if encoder.token_types:
            x = x + self._rows("embeddings.token_type_embeddings.weight", encoder.token_types, types)
        return norm(x, *self._pair("embeddings.LayerNorm", (encoder.hidden,)), encoder.norm_eps)

    def block(self, layer: int) -> _Block:
        hidden, inner = self._encoder.hidden, self._encoder.intermediate
        square, wide, narrow, vector = (hidden, hidden), (inner, hidden), (hidden, inner), (hidden,)
        if self._encoder.family == "distilbert":
            at = f"transformer.layer.{layer}."
            return _Block(
                query=self._pair(f"{at}attention.q_lin", square),
                key=self._pair(f"{at}attention.k_lin", square),
                value=self._pair(f"{at}attention.v_lin", square),
                out=self._pair(f"{at}attention.out_lin", square),
                first_norm=self._pair(f"{at}sa_layer_norm", vector),
                up=self._pair(f"{at}ffn.lin1", wide),
                down=self._pair(f"{at}ffn.lin2", narrow),
                second_norm=self._pair(f"{at}output_layer_norm", vector),
            )
        at = f"encoder.layer.{layer}."
        mpnet = self._encoder.family == "mpnet"
        return _Block(
            query=self._pair(f"{at}attention.{'attn.q' if mpnet else 'self.query'}", square),
            key=self._pair(f"{at}attention.{'attn.k' if mpnet else 'self.key'}", square),
            value=self._pair(f"{at}attention.{'attn.v' if mpnet else 'self.value'}", square),
            out=self._pair(f"{at}attention.{'attn.o' if mpnet else 'output.dense'}", square),
            first_norm=self._pair(f"{at}attention.{'LayerNorm' if mpnet else 'output.LayerNorm'}", vector),
            up=self._pair(f"{at}intermediate.dense", wide),
            down=self._pair(f"{at}output.dense", narrow),
            second_norm=self._pair(f"{at}output.LayerNorm", vector),
        )

    def relative(self, length: int) -> Floats | None:
        """Return MPNet's bias [heads, query, key] by the bucket of key - query; None for other families."""
        if self._encoder.family != "mpnet":
            return None
        table = self._weights.get(f"{self._prefix}encoder.relative_attention_bias.weight", (32, self._encoder.heads))
        buckets = [[_bucket(key - query) for key in range(length)] for query in range(length)]
        return np.transpose(table[np.array(buckets)], (2, 0, 1))

    def head(self, name: str, weight_shape: tuple[int, ...]) -> tuple[Floats, Floats]:
        """Return weight and bias of a layer beside the encoder."""
        return self._read_norm(name, weight_shape)

    def _pair(self, name: str, weight_shape: tuple[int, ...]) -> tuple[Floats, Floats]:
        return self._read_norm(self._prefix + name, weight_shape)

    def _read_norm(self, name: str, weight_shape: tuple[int, ...]) -> tuple[Floats, Floats]:
        old = f"{name}.gamma" in self._weights
        weight, bias = ("gamma", "beta") if old else ("weight", "bias")
        return self._weights.get(f"{name}.{weight}", weight_shape), self._weights.get(
            f"{name}.{bias}", weight_shape[:1]
        )

    def _rows(self, name: str, count: int, wanted: Ids) -> Floats:
        return self._weights.rows(self._prefix + name, (count, self._encoder.hidden), wanted)


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
