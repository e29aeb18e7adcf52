"""Compute a described transformer in numpy, one text or image at a time, straight from safetensors.

It shares only the description, the reading of files and the names of tensors with the graphs. Written for comparison
with the papers, not for speed. Texts are never padded here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.models.convert.contract.architecture import (
    Attention,
    Buckets,
    Encoder,
    Experts,
    FeedForward,
    Layer,
    Linear,
    Relative,
    Rotary,
    Shape,
    Slopes,
)
from shoal.models.convert.contract.weights import Weights
from shoal.models.convert.graphs.encoder import tensor_prefix
from shoal.models.convert.graphs.tensors import norm_names

Floats: TypeAlias = npt.NDArray[Any]
"""float32; numpy's types do not track it through arithmetic."""

Ids: TypeAlias = npt.NDArray[np.int64]
Map: TypeAlias = Callable[[Floats], Floats]
NO_BIAS: Floats = np.zeros((), np.float32)

_GRID = np.linspace(0.0, 6.0, 6001)
_ERF = np.array([math.erf(x) for x in _GRID])
"""erf is 1 in float32 beyond 6; interpolating between points 0.001 apart has an error of at most 1.3e-7."""


def encode(
    weights: Weights, encoder: Encoder, texts: Sequence[Ids], segments: Sequence[Ids] | None = None
) -> list[Floats]:
    """Return the token vectors [l, hidden] of texts given as token ids."""
    relative = encoder.distances if isinstance(encoder.distances, Relative) else None
    read = Transformer(weights, encoder.shape, tensor_prefix(encoder, weights), relative)
    types = segments or [np.zeros_like(ids) for ids in texts]
    rows = [_embed(read, encoder, ids, kinds) for ids, kinds in zip(texts, types, strict=True)]
    added = [_distances(read, encoder, len(row)) for row in rows]
    for layer in encoder.layers:
        biases = [bias + _mask(encoder, layer, len(row)) for row, bias in zip(rows, added, strict=True)]
        rows = read.encode(rows, biases, [layer])
    return [read.norm(encoder.final_norm)(row) for row in rows] if encoder.final_norm else rows


class Transformer:
    """The tensors of a transformer, whose names start with `prefix`, and its layers over x [l, hidden]. Every method
    that takes a name loads those tensors and returns the map that they define."""

    def __init__(self, weights: Weights, shape: Shape, prefix: str = "", relative: Relative | None = None) -> None:
        self._weights = weights
        self._shape = shape
        self._prefix = prefix
        self._relative = relative

    def get(self, name: str, *shape: int) -> Floats:
        return self._weights.get(self._prefix + name, shape)

    def rows(self, name: str, count: int, ids: Ids, width: int = 0) -> Floats:
        """Return rows of a table of `count` vectors of `width` (0: the hidden size)."""
        return self._weights.rows(self._prefix + name, (count, width or self._shape.hidden), ids)

    def linear(self, name: str, out: int, into: int, *, bias: bool = True) -> Map:
        return self._map("", Linear(name, out, into, bias))

    def _map(self, stem: str, linear: Linear) -> Map:
        weight = self.get(f"{stem}{linear.name}.weight", *linear.stored)[linear.rows]
        if not linear.bias:
            return lambda x: x @ weight.T
        bias = self.get(f"{stem}{linear.name}.bias", linear.stored[0])[linear.rows]
        return lambda x: affine(x, weight, bias)

    def norm(self, name: str, width: int = 0) -> Map:
        kind, shape = self._shape.norm, (width or self._shape.hidden,)
        weight, bias = norm_names(self._weights, self._prefix + name)
        scale = self._weights.get(weight, shape) + np.float32(kind.offset)
        if kind.kind == "rms":
            return lambda x: rms_norm(x, scale, kind.eps)
        shift = self._weights.get(bias, shape) if kind.bias else np.zeros(shape, np.float32)
        return lambda x: norm(x, scale, shift, kind.eps)

    def feed_forward(self, parts: FeedForward | Experts, stem: str = "") -> Map:
        if isinstance(parts, Experts):
            return self._experts(parts, stem)
        first, second, third = parts.maps(self._shape)
        up, down, kind = self._map(stem, first), self._map(stem, third), self._shape.activation
        if second is None:
            return lambda x: down(activate(kind, up(x)))
        gate = self._map(stem, second)
        return lambda x: down(activate(kind, gate(x)) * up(x))

    def _experts(self, parts: Experts, stem: str) -> Map:
        shape, route = self._shape, self.linear(stem + parts.router, parts.count, self._shape.hidden, bias=False)
        up, down = (
            self.get(stem + name, parts.count * shape.intermediate, shape.hidden) for name in (parts.up, parts.down)
        )
        ups, downs = (tensor.reshape(parts.count, shape.intermediate, shape.hidden) for tensor in (up, down))
        bias = self.get(stem + parts.bias, shape.hidden)

        def run(x: Floats) -> Floats:
            made = np.empty_like(x)
            for row, (token, scores) in enumerate(zip(x, softmax(route(x)), strict=True)):
                chosen = sorted(range(parts.count), key=lambda expert: -scores[expert])[: parts.top]
                results = [
                    scores[each] * (activate(shape.activation, ups[each] @ token) @ downs[each]) for each in chosen
                ]
                made[row] = sum(results) + bias
            return made

        return run

    def layer(self, layer: Layer) -> Callable[[Floats, Floats], Floats]:
        """Load attention and feed-forward, each with its residual and norms. The map takes x and a bias for the scores
        of its attention."""
        norms, stem = layer.norms, layer.stem
        attend = self._attention(layer)
        feed_forward = self.feed_forward(layer.feed_forward, stem)
        before, after, last = (
            [self._maybe_norm(stem, getattr(norms, f"{place}{part}")) for part in ("attention", "feed_forward")]
            for place in ("before_", "", "after_")
        )

        summed = self.norm(stem + norms.summed_attention) if norms.summed_attention else None

        def run(x: Floats, bias: Floats) -> Floats:
            attended = after[0](attend(before[0](x), bias))
            x = last[0](x + (summed(x + attended) if summed is not None else attended))
            return last[1](x + after[1](feed_forward(before[1](x))))

        return run

    def _maybe_norm(self, stem: str, name: str) -> Map:
        return self.norm(stem + name) if name else lambda x: x

    def _attention(self, layer: Layer) -> Callable[[Floats, Floats], Floats]:
        shape, parts, stem = self._shape, layer.attention, layer.stem
        query, key, value, out = (self._map(stem, each) for each in parts.maps(shape))
        first, second = (self._head_norm(parts, stem, name) for name in (parts.query_norm, parts.key_norm))
        positions = self._positions(self._relative, stem) if self._relative is not None else None

        def run(x: Floats, bias: Floats) -> Floats:
            queries, keys = first(_split(query(x), shape)), second(_split(key(x), shape))
            if layer.rotary is not None:
                queries, keys = rotate(queries, layer.rotary), rotate(keys, layer.rotary)
            if positions is not None:
                bias = bias + positions(queries, keys)
            return out(attend(queries, keys, _split(value(x), shape), bias, shape.scale))

        return run

    def _positions(self, relative: Relative, stem: str) -> Callable[[Floats, Floats], Floats]:
        """Return a function of queries and keys [l, heads, size]: their scores with relative positions, [heads, query,
        key]."""
        shape, width = self._shape, self._shape.heads * self._shape.head_size
        table = self._maybe_norm("", relative.norm)(self.get(f"{relative.tensor}.weight", relative.rows, shape.hidden))
        names = (relative.key, relative.query)
        for_queries, for_keys = (
            _split(self.linear(stem + name, width, shape.hidden)(table), shape) if name else None for name in names
        )

        def run(queries: Floats, keys: Floats) -> Floats:
            scores = np.zeros((shape.heads, len(queries), len(keys)), np.float32)
            for i, j in np.ndindex(len(queries), len(keys)):
                row = relative_row(i - j, relative)
                if for_queries is not None:
                    scores[:, i, j] += (queries[i] * for_queries[row]).sum(axis=-1)
                if for_keys is not None:
                    scores[:, i, j] += (keys[j] * for_keys[row]).sum(axis=-1)
            return scores * np.float32(shape.scale)

        return run

    def _head_norm(self, parts: Attention, stem: str, name: str) -> Map:
        """The norm of queries or keys [l, heads, size]."""
        if not name:
            return lambda x: x
        if not parts.norm_whole:
            return self.norm(stem + name, self._shape.head_size)
        whole = self.norm(stem + name, self._shape.heads * self._shape.head_size)
        return lambda x: whole(x.reshape(len(x), -1)).reshape(x.shape)

    def encode(self, rows: list[Floats], biases: Sequence[Floats], layers: Sequence[Layer]) -> list[Floats]:
        """Run each x of `rows`, with its own bias, through the layers."""
        for layer in layers:
            run = self.layer(layer)
            rows = [run(row, bias) for row, bias in zip(rows, biases, strict=True)]
        return rows


def _split(x: Floats, shape: Shape) -> Floats:
    return x.reshape(len(x), -1, shape.head_size)


def _embed(read: Transformer, encoder: Encoder, ids: Ids, types: Ids) -> Floats:
    tables = encoder.embeddings
    x = read.rows(f"{tables.words}.weight", encoder.vocab_size, ids, tables.width) * np.float32(tables.scale)
    if tables.positions:
        rows = token_positions(encoder, ids)
        x = x + read.rows(f"{tables.positions}.weight", tables.position_rows, rows, tables.width)
    if tables.types:
        x = x + read.rows(f"{tables.types}.weight", tables.type_rows, types, tables.width)
    if tables.norm:
        x = read.norm(tables.norm, tables.width)(x)
    if tables.projection:
        x = read.linear(tables.projection, encoder.hidden, tables.width, bias=tables.projection_bias)(x)
    return read.norm(tables.last_norm)(x) if tables.last_norm else x


def token_positions(encoder: Encoder, ids: Ids) -> Ids:
    """Return each token's row in the position table."""
    if encoder.position_offset == 0:
        return np.arange(len(ids))
    position, positions = encoder.pad_id, []
    for token in ids:
        position += token != encoder.pad_id
        positions.append(position if token != encoder.pad_id else encoder.pad_id)
    return np.array(positions, np.int64)


def _distances(read: Transformer, encoder: Encoder, length: int) -> Floats:
    """Return what distances add to the scores, [heads, query, key]; 0 for families without it."""
    added = encoder.distances
    if added is None or isinstance(added, Relative):
        return NO_BIAS
    distances = np.array([[key - query for key in range(length)] for query in range(length)])
    if isinstance(added, Slopes):
        penalties: Floats = np.array(added.factors, np.float32)[:, None, None] * np.abs(distances).astype(np.float32)
        return -penalties
    table = read.get(f"{added.tensor}.weight", added.buckets, encoder.shape.heads)
    rows = {distance: bucket(distance, added) for distance in range(1 - length, length)}
    places = np.array([[rows[int(distance)] for distance in row] for row in distances])
    return np.transpose(table[places], (2, 0, 1))


def bucket(distance: int, added: Buckets) -> int:
    """Return the bucket of a distance. In each direction the first half of the buckets is exact; the limits of the
    others grow from there by equal factors up to `maximum`."""
    side = added.buckets // 2
    exact = side // 2
    first = side if distance > 0 else 0
    distance = abs(distance)
    if distance < exact:
        return first + distance
    growth = added.maximum / exact
    limits: list[float] = [exact * growth ** (k / (side - exact)) for k in range(1, side - exact)]
    return first + min(exact + sum(distance >= limit - 1e-9 for limit in limits), side - 1)


def relative_row(distance: int, relative: Relative) -> int:
    """Return the row for a distance query - key."""
    half, middle, place = relative.rows // 2, relative.buckets // 2, abs(distance)
    if relative.buckets and place > middle:
        share = math.log(place / middle) / math.log((relative.maximum - 1) / middle)
        place = middle + math.ceil(share * (middle - 1) - 1e-9)
    return min(max(half + (place if distance > 0 else -place), 0), relative.rows - 1)


def _mask(encoder: Encoder, layer: Layer, length: int) -> Floats:
    """Return minus infinity where a query must not attend to a key, [query, key]."""
    distances = np.arange(length)[None, :] - np.arange(length)[:, None]
    hidden = (distances > 0) & encoder.causal
    if layer.window is not None:
        hidden |= np.abs(distances) > layer.window
    return np.where(hidden, np.float32(-np.inf), np.float32(0))


def rotate(x: Floats, rotary: Rotary) -> Floats:
    """Rotate [l, heads, size] by position: pairs of numbers as complex ones."""
    count = len(rotary.frequencies)
    angles = np.arange(len(x), dtype=np.float32)[:, None] * np.array(rotary.frequencies, np.float32)
    turn = np.float32(rotary.factor) * np.exp(1j * angles.astype(np.float64))[:, None, :]
    turned = (x[..., :count] + 1j * x[..., count : 2 * count]) * turn
    return np.concatenate([turned.real, turned.imag, x[..., 2 * count :]], axis=-1).astype(np.float32)


def affine(x: Floats, weight: Floats, bias: Floats) -> Floats:
    y: Floats = x @ weight.T + bias
    return y


def norm(x: Floats, scale: Floats, shift: Floats, epsilon: float) -> Floats:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    y: Floats = centred / np.sqrt(variance + np.float32(epsilon)) * scale + shift
    return y


def rms_norm(x: Floats, scale: Floats, epsilon: float) -> Floats:
    y: Floats = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(epsilon)) * scale
    return y


def attend(query: Floats, key: Floats, value: Floats, bias: Floats, scale: float) -> Floats:
    """Compute attention over [l, heads, size]; keys and values may have fewer heads. `bias` is added to the scores,
    [query, key] or one for each head. The result is [l, heads * size]."""
    heads, mixed = query.shape[1], np.empty_like(query)
    shared = heads // key.shape[1]
    for head, shift in enumerate(np.broadcast_to(bias, (heads, len(query), len(key)))):
        scores = query[:, head] @ key[:, head // shared].T * np.float32(scale) + shift
        mixed[:, head] = softmax(scores) @ value[:, head // shared]
    return mixed.reshape(len(query), -1)


def softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return shares


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
