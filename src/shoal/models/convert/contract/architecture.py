"""Describe a transformer as data. The graph and the numpy reference are both made from this description.

Names are those of stored tensors, without ".weight" and ".bias"; an empty name means that the part is absent.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import msgspec

Activation: TypeAlias = Literal["identity", "tanh", "relu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid", "silu"]
Family: TypeAlias = str
"""The layout of a model's tensors: XLM-R and CamemBERT are "roberta", ELECTRA is "bert"."""


class Norm(msgspec.Struct, frozen=True, kw_only=True):
    """A normalization over the last axis. "layer": by mean and variance; "rms": by the root of the mean square.
    `offset` is added to the stored weight: Gemma stores weights around 0."""

    eps: float
    kind: Literal["layer", "rms"] = "layer"
    bias: bool = True
    offset: float = 0.0


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and functions that all layers share. `kv_heads`: heads of keys and values, each shared by the same
    number of query heads. `head_size`: numbers of one head. `scale`: factor of the attention scores."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    activation: Activation
    norm: Norm
    scale: float


class Rotary(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embeddings (Su et al. 2021): number i of a head is paired with number i + n, n the count of
    `frequencies`, in radians per position. Numbers from 2 n on stay as they are. `factor` multiplies the rotated
    numbers (YaRN)."""

    frequencies: tuple[float, ...]
    factor: float = 1.0


class Linear(NamedTuple):
    """A linear map: the stored matrix [total, into] and its bias, or only `out` rows of them, from `first` on."""

    name: str
    out: int
    into: int
    bias: bool
    first: int = 0
    total: int = 0

    @property
    def stored(self) -> tuple[int, int]:
        """The shape of the stored matrix."""
        return self.total or self.out, self.into

    @property
    def label(self) -> str:
        """A name that distinguishes several maps in one matrix."""
        return f"{self.name}.{self.first}" if self.total else self.name

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.out)


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Names of an attention's maps. `fused`: one matrix of queries, keys and values, in this order, in place of their
    names. `query_norm`, `key_norm`: norms of each head's numbers, or with `norm_whole` of all heads' numbers."""

    out: str
    query: str = ""
    key: str = ""
    value: str = ""
    fused: str = ""
    bias: bool = True
    out_bias: bool = True
    query_norm: str = ""
    key_norm: str = ""
    norm_whole: bool = False

    def maps(self, shape: Shape) -> tuple[Linear, Linear, Linear, Linear]:
        """Return the maps to queries, keys and values, and the one of the result."""
        into, query, key = shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        out = Linear(self.out, into, query, self.out_bias)
        if self.fused:
            total = query + 2 * key
            return (
                Linear(self.fused, query, into, self.bias, 0, total),
                Linear(self.fused, key, into, self.bias, query, total),
                Linear(self.fused, key, into, self.bias, query + key, total),
                out,
            )
        return (
            Linear(self.query, query, into, self.bias),
            Linear(self.key, key, into, self.bias),
            Linear(self.value, key, into, self.bias),
            out,
        )


class FeedForward(msgspec.Struct, frozen=True, kw_only=True):
    """Names of a feed-forward's maps: `down(activation(up(x)))`, or gated, `down(activation(gate(x)) * up(x))`.
    `fused`: `up` holds both maps, in this order."""

    up: str
    down: str
    gate: str = ""
    fused: Literal["", "gate up", "up gate"] = ""
    up_bias: bool = True
    down_bias: bool = True

    def maps(self, shape: Shape) -> tuple[Linear, Linear | None, Linear]:
        """Return the map up, that of the gate if there is one, and the map down."""
        inner, into = shape.intermediate, shape.hidden
        down = Linear(self.down, into, inner, self.down_bias)
        if self.fused:
            halves = [Linear(self.up, inner, into, self.up_bias, first, 2 * inner) for first in (0, inner)]
            first, second = halves
            return (first, second, down) if self.fused == "up gate" else (second, first, down)
        gate = Linear(self.gate, inner, into, self.up_bias) if self.gate else None
        return Linear(self.up, inner, into, self.up_bias), gate, down


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Names of a feed-forward's parts with `count` experts, of which each token passes `top`: those with the largest
    weights of the softmax of `router`. Their results are added up, times these weights, which are not normalized, and
    `bias` is added. `up` and `down` are whole names of tensors [count * intermediate, hidden], without bias."""

    router: str
    up: str
    down: str
    bias: str
    count: int
    top: int


class Norms(msgspec.Struct, frozen=True, kw_only=True):
    """Names of a layer's norms. Of each of the two parts, attention and feed-forward: before it, of its result alone,
    and after the sum with the residual. `summed_attention`: of the sum of the attention's result and the residual, in
    place of the result: the residual counts twice."""

    before_attention: str = ""
    attention: str = ""
    summed_attention: str = ""
    after_attention: str = ""
    before_feed_forward: str = ""
    feed_forward: str = ""
    after_feed_forward: str = ""


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer; `stem` precedes the names of its tensors. `window`: the largest distance of a key to the query that
    attends to it; None: any."""

    stem: str
    attention: Attention
    feed_forward: FeedForward | Experts
    norms: Norms
    window: int | None = None
    rotary: Rotary | None = None


class Buckets(msgspec.Struct, frozen=True, kw_only=True):
    """A learned score for each head and bucket of the distance key - query (Raffel et al. 2020), in `tensor`
    [buckets, heads]. Distances of `maximum` and more share the last bucket of their direction."""

    tensor: str
    buckets: int
    maximum: int


class Slopes(msgspec.Struct, frozen=True, kw_only=True):
    """A penalty for the distance |key - query|, with a factor per head (ALiBi, Press et al. 2022)."""

    factors: tuple[float, ...]


class Relative(msgspec.Struct, frozen=True, kw_only=True):
    """Vectors of relative positions, to which queries and keys attend (DeBERTa, He et al. 2021): scores of query and
    position, and of key and position, are added.

    `tensor` holds them, [rows, hidden], for the distances query - key from -rows / 2 on; farther ones share the first
    or last row. `buckets`: if not 0, distances beyond half of it share rows, logarithmically, up to `maximum`. `norm`
    is applied to the vectors, and in each layer the map `key` (if queries attend) and `query` (if keys do).
    """

    tensor: str
    rows: int
    key: str
    query: str
    norm: str = ""
    buckets: int = 0
    maximum: int = 0


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The tables that are added up to a token's first vector, of `width` numbers: `words` times `scale`, `positions`
    (the first token's row is `position_offset`) and `types`. Then `norm`, `projection` to the hidden size, and
    `last_norm`."""

    words: str
    width: int
    scale: float = 1.0
    positions: str = ""
    position_rows: int = 0
    position_offset: int = 0
    types: str = ""
    type_rows: int = 0
    norm: str = ""
    projection: str = ""
    projection_bias: bool = True
    last_norm: str = ""


class Adapters(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of low rank to every matrix (LoRA, Hu et al. 2022), one for each of `tasks`: `scale` times the product of
    two matrices of `rank`. `task`: the one to add; None: none."""

    tasks: tuple[str, ...]
    rank: int
    scale: float
    task: str | None = None


class Encoder(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer of a known family, with the numbers of its config.json.

    `prefix` may precede each tensor's name. `max_positions`: rows of the position table, or the longest input in
    tokens. `causal`: a token attends to none after it.
    """

    family: Family
    prefix: str
    vocab_size: int
    max_positions: int
    pad_id: int
    shape: Shape
    embeddings: Embeddings
    layers: tuple[Layer, ...]
    final_norm: str = ""
    causal: bool = False
    distances: Buckets | Slopes | Relative | None = None
    adapters: Adapters | None = None

    @property
    def hidden(self) -> int:
        return self.shape.hidden

    @property
    def position_offset(self) -> int:
        return self.embeddings.position_offset

    @property
    def token_types(self) -> int:
        return self.embeddings.type_rows

    @property
    def usable_positions(self) -> int:
        """The longest input in tokens."""
        return self.max_positions - self.embeddings.position_offset
