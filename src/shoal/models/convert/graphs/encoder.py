"""Build a described encoder as ONNX: from input_ids and attention_mask to token vectors [b, l, hidden].

Leaves out parts of exported graphs that have no use: dropout, and the token types where texts are read alone (row 0 is
folded into the positions, or into the words).
"""

from __future__ import annotations

import math

import numpy as np

from shoal.errors import ModelFileError
from shoal.models.convert.contract.architecture import Encoder, Relative, Slopes
from shoal.models.convert.contract.weights import Floats, Weights
from shoal.models.convert.graphs.adapters import AdapterMaps
from shoal.models.convert.graphs.builder import Graph
from shoal.models.convert.graphs.layers import MASKED, Layers
from shoal.models.convert.graphs.relative import RelativeScores, RelativeWeights

LARGEST_TABLES = 2**28
"""Numbers, of four bytes each."""


def tensor_prefix(encoder: Encoder, weights: Weights) -> str:
    """Return the prefix of every tensor's name: empty, or the family's if a head was saved with the model."""
    words = f"{encoder.embeddings.words}.weight"
    for prefix in ("", encoder.prefix):
        if f"{prefix}{words}" in weights:
            return prefix
    raise ModelFileError(f"Shoal has no encoder of the {encoder.family} family", file=weights.where, key=words)


def build_encoder(
    graph: Graph, encoder: Encoder, weights: Weights, *, segments: bool = False, tasks: bool = False
) -> str:
    """Append the encoder; return the name of its token vectors. Raises ModelFileError for missing or mismatched
    tensors.

    `segments`: token types are an input, token_type_ids, for texts that are read in pairs. `tasks`: the adapter of each
    text is an input, adapter_ids, and `weights` are those without one.
    """
    _check_tables(encoder)
    builder = _Builder(graph, encoder, weights, segments)
    if tasks and encoder.adapters is not None:
        builder.layers.adapters = AdapterMaps(graph, weights, builder.prefix, encoder.adapters)
    return builder.tokens()


def _check_tables(encoder: Encoder) -> None:
    """Tables of rotations and distances grow with the longest input, whatever the weights: bound them."""
    rotations = {layer.rotary for layer in encoder.layers if layer.rotary is not None}
    each = sum(4 * len(rotary.frequencies) for rotary in rotations)
    each += 2 * encoder.shape.heads if encoder.distances is not None else 0
    if each * encoder.max_positions > LARGEST_TABLES:
        raise ModelFileError(
            f"inputs of {encoder.max_positions} tokens need tables of more than {LARGEST_TABLES} numbers: state a "
            "smaller max_seq_length or model_max_length",
            file="config.json",
            key="max_position_embeddings",
        )


class _Builder:
    def __init__(self, graph: Graph, encoder: Encoder, weights: Weights, segments: bool) -> None:
        self.graph = graph
        self.encoder = encoder
        self.weights = weights
        self.segments = segments
        self.prefix = tensor_prefix(encoder, weights)
        self.layers = Layers(graph, encoder.shape, weights, self.prefix, encoder.max_positions)
        if isinstance(encoder.distances, Relative):
            source = RelativeWeights(weights, self.prefix, encoder.shape, encoder.distances)
            self.layers.relative = RelativeScores(graph, source, encoder.max_positions)

    def tokens(self) -> str:
        encoder, value = self.encoder, self._embeddings()
        masks = Masks(self.graph, causal=encoder.causal)
        added = self._distances()
        biases = {window: masks.bias(window, added) for window in dict.fromkeys(each.window for each in encoder.layers)}
        for layer in encoder.layers:
            value = self.layers.layer(value, layer, biases[layer.window])
        return self.layers.norm(value, encoder.final_norm) if encoder.final_norm else value

    def _embeddings(self) -> str:
        tables = self.encoder.embeddings
        value = self._add_positions(self._words())
        if tables.norm:
            value = self.layers.norm(value, tables.norm, tables.width)
        if tables.projection:
            shape = (self.encoder.hidden, tables.width)
            value = self.layers.linear(value, tables.projection, shape, bias=tables.projection_bias)
        if tables.last_norm:
            value = self.layers.norm(value, tables.last_norm)
        return value

    def _words(self) -> str:
        graph, tables = self.graph, self.encoder.embeddings
        word = self._change_words(graph.op("Gather", self._word_table(), "input_ids"))
        if not self.segments or not tables.types:
            return word
        types = self.layers.constant(f"{tables.types}.weight", (tables.type_rows, tables.width))
        return graph.op("Add", word, graph.op("Gather", types, "token_type_ids"))

    def _change_words(self, word: str) -> str:
        """Add what adapters change of the words, and of row 0 of the token types."""
        tables, adapters = self.encoder.embeddings, self.layers.adapters
        if adapters is None:
            return word
        word = adapters.add_rows(word, tables.words, (self.encoder.vocab_size, tables.width), "input_ids")
        if not tables.types:
            return word
        return adapters.add_rows(word, tables.types, (tables.type_rows, tables.width), self.graph.integers(0))

    def _word_table(self) -> str:
        """The word table, times its factor. Row 0 of the token types is added if they are not an input and there are
        no positions that it could be added to."""
        tables, weights, prefix = self.encoder.embeddings, self.weights, self.prefix
        name, shape = f"{tables.words}.weight", (self.encoder.vocab_size, tables.width)
        types, types_shape = f"{tables.types}.weight", (tables.type_rows, tables.width)
        folded = bool(tables.types) and not self.segments and not tables.positions
        if not folded and tables.scale == 1:
            return self.layers.constant(name, shape)
        weights.check(prefix + name, shape)
        if folded:
            weights.check(prefix + types, types_shape)

        def load() -> Floats:
            scaled = weights.get(prefix + name, shape) * np.float32(tables.scale)
            return scaled + weights.get(prefix + types, types_shape)[0] if folded else scaled

        return self.graph.weight(name, shape, load)

    def _add_positions(self, word: str) -> str:
        graph, tables = self.graph, self.encoder.embeddings
        if not tables.positions:
            return word
        positions = self._position_table()
        if tables.position_offset:
            return graph.op("Add", word, graph.op("Gather", positions, self._positions()))
        length = graph.size("input_ids", 1)
        rows = graph.op("Slice", positions, graph.integers(0), length, graph.integers(0))
        return graph.op("Add", word, rows)

    def _positions(self) -> str:
        """pad + (1, 2, 3, ... over the tokens that are not padding); padding itself stays at row `pad`."""
        graph, pad = self.graph, self.graph.integer(self.encoder.pad_id)
        ones = graph.cast_int(graph.op("Not", graph.op("Equal", "input_ids", pad)))
        counted = graph.op("CumSum", ones, graph.integer(1))
        return graph.op("Add", graph.op("Mul", counted, ones), pad)

    def _position_table(self) -> str:
        """The position table. Row 0 of the token types is added if the family has them and they are not an input."""
        tables, weights, prefix = self.encoder.embeddings, self.weights, self.prefix
        name, shape = f"{tables.positions}.weight", (tables.position_rows, tables.width)
        types, types_shape = f"{tables.types}.weight", (tables.type_rows, tables.width)
        if not tables.types or self.segments:
            return self.layers.constant(name, shape)
        weights.check(prefix + name, shape)
        weights.check(prefix + types, types_shape)
        return self.graph.weight(
            name, shape, lambda: weights.get(prefix + name, shape) + weights.get(prefix + types, types_shape)[0]
        )

    def _distances(self) -> str | None:
        """What the distance of key and query adds to a score, [1, heads, l, l]: a table over all distances, by key -
        query."""
        encoder, distances, span = self.encoder, self.encoder.distances, self.encoder.max_positions - 1
        if distances is None or isinstance(distances, Relative):
            return None
        heads = encoder.shape.heads
        if isinstance(distances, Slopes):
            load = lambda: slope_table(distances, span)  # noqa: E731
        else:
            name, shape = f"{self.prefix}{distances.tensor}.weight", (distances.buckets, heads)
            self.weights.check(name, shape)
            load = lambda: np.ascontiguousarray(  # noqa: E731
                self.weights.get(name, shape)[relative_buckets(span, distances.buckets, distances.maximum)].T
            )
        graph = self.graph
        table = graph.weight("distances", (heads, 2 * span + 1), load)
        picked = graph.op("Gather", table, graph.op("Add", signed_distances(graph), graph.integer(span)), axis=1)
        return graph.unsqueeze(picked, 0)


class Masks:
    """Appends what is added to the attention's scores: 0 where a token attends, MASKED where it does not."""

    def __init__(self, graph: Graph, *, causal: bool) -> None:
        self._graph = graph
        self._causal = causal

    def bias(self, window: int | None, added: str | None) -> str:
        """Return the bias of attention within `window`, plus `added`: [b, 1 or heads, 1 or l, l]."""
        graph = self._graph
        bias = self._padding() if window is None and not self._causal else self._near(window)
        return bias if added is None else graph.op("Add", bias, added)

    def _padding(self) -> str:
        graph = self._graph
        mask = graph.unsqueeze(graph.cast_float("attention_mask"), 1, 2)
        return graph.op("Mul", graph.op("Sub", graph.number(1.0), mask), graph.number(MASKED))

    def _near(self, window: int | None) -> str:
        """Never the sum of two masks: its exp() would be undefined in float16."""
        graph, distance = self._graph, signed_distances(self._graph)
        kept = graph.op("Greater", graph.unsqueeze("attention_mask", 1, 2), graph.integer(0))
        if self._causal:
            kept = graph.op("And", kept, graph.op("LessOrEqual", distance, graph.integer(0)))
        if window is not None:
            near = graph.op("LessOrEqual", graph.op("Abs", distance), graph.integer(window))
            kept = graph.op("And", kept, near)
        return graph.op("Where", kept, graph.number(0.0), graph.number(MASKED))


def signed_distances(graph: Graph) -> str:
    """Append key - query as int64 [l, l]."""
    steps = graph.steps("input_ids")
    return graph.op("Sub", graph.unsqueeze(steps, 0), graph.unsqueeze(steps, 1))


def slope_table(slopes: Slopes, span: int) -> Floats:
    """Return each head's penalty at the distances -span..span, [heads, 2 span + 1]."""
    distances = np.abs(np.arange(-span, span + 1)).astype(np.float32)
    table: Floats = -np.array(slopes.factors, np.float32)[:, None] * distances
    return table


def relative_buckets(span: int, buckets: int = 32, maximum: int = 128) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return T5's bucket of each distance key - query in -span..span (Raffel et al. 2020; MPNet uses it too).

    Half of the buckets are for keys after the query. Half of each of these are for one short distance each; the others
    grow logarithmically up to `maximum`. Computed in float32, as the models were trained.
    """
    distance = np.arange(-span, span + 1)
    half, exact = buckets // 2, buckets // 4
    far: Floats = np.maximum(np.abs(distance), 1).astype(np.float32) / np.float32(exact)
    scaled = np.log(far) / np.float32(math.log(maximum / exact)) * np.float32(half - exact)
    logarithmic = np.minimum(exact + scaled.astype(np.int64), half - 1)
    near = np.abs(distance)
    return (distance > 0) * half + np.where(near < exact, near, logarithmic)
