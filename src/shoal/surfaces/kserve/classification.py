"""Triton's classification extension: the largest elements of an output as texts `value:index:label`. Pure.

Source: Triton's `classification.cc`: six decimals, the largest first, the label only where the model has one; with a
batch axis each row by itself. Of equal elements the first comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.errors import InvalidValue, TooManyInputs
from shoal.kserve import codec
from shoal.surfaces.kserve.tensors import Tensor
from shoal.surfaces.kserve.wire import MAX_VALUES
from shoal.types import Array

MAX_ELEMENTS = 1_000_000
"""Elements of a row that are sorted, as in Triton."""


def check_type(name: str, datatype: str) -> None:
    """Raise InvalidValue for an output whose elements have no order."""
    if datatype == "BYTES":
        raise InvalidValue(
            f"class result not available for output {name!r} due to unsupported type 'BYTES': leave out "
            "'classification'",
            param=name,
        )


def classify(tensor: Tensor, count: int, labels: Sequence[str], *, batched: bool) -> Tensor:
    """Return the `count` largest elements of a tensor, or of each of its rows, as BYTES.

    Raises InvalidValue and TooManyInputs for more elements and texts than are sensible.
    """
    rows = tensor.array.reshape(len(tensor.array) if batched else 1, -1)
    count = min(count, rows.shape[1])
    if rows.shape[1] > MAX_ELEMENTS:
        raise InvalidValue(
            f"classification output tensor {tensor.name!r} too large: {rows.shape[1]} elements a row, the limit is "
            f"{MAX_ELEMENTS}",
            param=tensor.name,
        )
    if len(rows) * count > MAX_VALUES:
        raise TooManyInputs(
            f"the classification of {tensor.name!r} would have {len(rows) * count} texts; the limit is {MAX_VALUES}: "
            "request fewer classes, or split the request",
            param=tensor.name,
        )
    texts = [text for row in rows for text in _describe_largest(row, count, labels)]
    return Tensor(tensor.name, "BYTES", codec.to_objects(texts, (len(rows), count) if batched else (count,)))


def _describe_largest(row: Array, count: int, labels: Sequence[str]) -> list[str]:
    order = np.argsort(-row if row.dtype.kind == "f" else -row.astype(np.int64), kind="stable")[:count]
    form = "{:f}:{}" if row.dtype.kind == "f" else "{}:{}"
    pairs = zip(row[order].tolist(), order.tolist(), strict=True)
    return [form.format(value, at) + (f":{labels[at]}" if at < len(labels) else "") for value, at in pairs]
