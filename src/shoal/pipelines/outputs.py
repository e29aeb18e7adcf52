"""Convert rows of a graph's outputs to the vectors an item requested: dense, sparse, late interaction or per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shoal.core.protocols import Prepared, Row, Tensors, VectorSet
from shoal.errors import NotFinite, ShoalError, Unsupported
from shoal.pipelines.vectors import Shape, not_finite_error
from shoal.specs import TextSpec
from shoal.types import Array, SparseVector, VectorKind

PLAIN: tuple[VectorKind, ...] = ("dense",)


class RowOptions(NamedTuple):
    """How to build an item's row. `skip`: leading tokens to exclude from pooling. `tokens`: number of ids that are its
    text and special tokens; any ids after them pad a query. `query`: whether it is a late-interaction query.
    `adapter`: the number of its task's adapter, 0 for none."""

    shape: Shape
    skip: int
    tokens: int
    kinds: tuple[VectorKind, ...]
    query: bool
    adapter: int = 0


def check_kinds(kinds: Sequence[VectorKind], has: Sequence[VectorKind]) -> None:
    """Raises Unsupported if the model lacks a requested kind of vector."""
    for kind in kinds:
        if kind not in has:
            raise Unsupported(f"the model has no {kind} vectors; it has: {', '.join(has)}", param="model")


class Heads:
    """Maps kinds of vectors to the graph outputs that produce them.

    `group` separates items by the large outputs they need: a vector per token, or a weight per vocabulary entry. An
    engine computes an output for all rows of a call. [64, 128, 384] is 12 MB to copy or to transfer from Triton, and
    the head may cost as much as all layers before it, so items that do not need it must not wait for it. The other
    outputs, a vector or a weight per token, are cheap and do not justify a separate call.
    """

    def __init__(self, spec: TextSpec) -> None:
        self._spec = spec
        self._names: dict[VectorKind, str] = {"dense": spec.pooled}
        self._dense_outputs = (spec.pooled,)
        large: set[str] = set()
        if spec.tokens:
            self._names["tokens"] = spec.tokens
            large.add(spec.tokens)
        if spec.multi is not None:
            self._names["multi"] = spec.multi.output
            large.add(spec.multi.output)
            self._skipped_ids = np.array(spec.multi.skipped, dtype=np.int64)
        if spec.sparse is not None:
            self._names["sparse"] = spec.sparse.output
            self._unweighted_ids = np.array(spec.sparse.skipped, dtype=np.int64)
            if spec.sparse.per == "vocabulary":
                large.add(spec.sparse.output)
        self._large_outputs = large - {spec.pooled}

    def outputs(self, kinds: tuple[VectorKind, ...]) -> tuple[str, ...]:
        """Return the names of the outputs that these kinds of vectors are built from."""
        if kinds == PLAIN:
            return self._dense_outputs
        return tuple(sorted({self._names[kind] for kind in kinds}))

    def group(self, kinds: tuple[VectorKind, ...]) -> tuple[str, ...]:
        if kinds == PLAIN:
            return ()
        return tuple(name for name in self.outputs(kinds) if name in self._large_outputs)

    def rows(
        self, outputs: Tensors, batch: Sequence[Prepared], dense: Sequence[Array | ShoalError]
    ) -> list[Row | ShoalError]:
        """Return one row per item, with the kinds of vectors that its `extra` (a RowOptions) names. `dense` holds the
        dense vectors; it is empty if no item needs them. The others are copied, since one request should not keep the
        outputs of a whole batch alive."""
        return [
            dense[place] if item.extra.kinds == PLAIN else self._build_vector_set(outputs, place, item, dense)
            for place, item in enumerate(batch)
        ]

    def _build_vector_set(
        self, outputs: Tensors, place: int, item: Prepared, dense: Sequence[Array | ShoalError]
    ) -> VectorSet | ShoalError:
        options: RowOptions = item.extra
        vector = dense[place] if "dense" in options.kinds else None
        if isinstance(vector, ShoalError):
            return vector
        tokens = sparse = multi = None
        if "tokens" in options.kinds:
            tokens = _copy_rows(outputs[self._names["tokens"]][place, : options.tokens])
        if "sparse" in options.kinds:
            sparse = self._sparse(outputs[self._names["sparse"]][place], item)
        if "multi" in options.kinds:
            multi = self._multi(outputs[self._names["multi"]][place], item)
        return check_finite(VectorSet(dense=vector, tokens=tokens, sparse=sparse, multi=multi))

    def _sparse(self, row: Array, item: Prepared) -> SparseVector:
        assert self._spec.sparse is not None
        weights = row.astype(np.float32, copy=False).reshape(-1)
        if self._spec.sparse.per == "vocabulary":
            indices = np.flatnonzero(weights)
            return SparseVector(indices.astype(np.int32), weights[indices])
        count = item.extra.tokens
        return weights_by_id(item.tensors["input_ids"][:count], weights[:count], self._unweighted_ids)

    def _multi(self, row: Array, item: Prepared) -> Array:
        spec = self._spec.multi
        assert spec is not None
        ids = item.tensors["input_ids"] if item.extra.query else item.tensors["input_ids"][: item.extra.tokens]
        kept = np.ones(len(ids), dtype=bool)
        if not item.extra.query and len(self._skipped_ids):
            kept = ~np.isin(ids, self._skipped_ids)
        if spec.drop_first:
            kept[:1] = False
        return _copy_rows(row[: len(ids)][kept])


def weights_by_id(ids: Array, weights: Array, skipped: Array) -> SparseVector:
    """Return the largest weight of each id with a weight above zero, as FlagEmbedding does for bge-m3. NaN is kept for
    later checks."""
    kept = ~(weights <= 0)
    if len(skipped):
        kept &= ~np.isin(ids, skipped)
    ids, weights = ids[kept], weights[kept]
    order = np.lexsort((weights, ids))  # NaN sorts last
    ids, weights = ids[order], weights[order]
    last = np.append(ids[1:] != ids[:-1], True)[: len(ids)]
    return SparseVector(ids[last].astype(np.int32), weights[last])


def check_finite(vectors: VectorSet) -> VectorSet | NotFinite:
    """Return `vectors`, or NotFinite if any of them holds NaN or infinity."""
    arrays = [vectors.tokens, vectors.multi, vectors.sparse.values if vectors.sparse is not None else None]
    if all(array is None or np.isfinite(array).all() for array in arrays):
        return vectors
    return not_finite_error()


def _copy_rows(rows: Array) -> Array:
    return np.array(rows, dtype=np.float32, order="C")
