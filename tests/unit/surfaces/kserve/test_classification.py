"""Triton's classification of outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.errors import InvalidValue, TooManyInputs
from shoal.surfaces.kserve import classification
from shoal.surfaces.kserve.classification import classify
from shoal.surfaces.kserve.tensors import Tensor
from shoal.types import Array


def describe(array: Array, count: int, *labels: str, batched: bool = True, datatype: str = "FP32") -> Any:
    found = classify(Tensor("x", datatype, array), count, labels, batched=batched)
    assert (found.name, found.datatype) == ("x", "BYTES")
    return found.array.tolist()


def test_format() -> None:
    """As std::to_string writes floats and integers; of equal elements the first comes first."""
    scores = np.array([[0.25, 1e-7, 0.25, 12345.678]], np.float32)
    assert describe(scores, 4, "a", "b") == [["12345.677734:3", "0.250000:0:a", "0.250000:2", "0.000000:1:b"]]
    counts = np.array([[0], [3_000_000_000]], np.uint32)
    assert describe(counts, 2, datatype="UINT32") == [["0:0"], ["3000000000:0"]]
    assert describe(np.array([[-5, 2]], np.int32), 1, datatype="INT32") == [["2:1"]]


def test_axes() -> None:
    """All axes but that of the batch are one row."""
    cube = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    assert describe(cube, 2) == [["5.000000:5", "4.000000:4"], ["11.000000:5", "10.000000:4"]]
    assert describe(np.arange(3, dtype=np.float32), 2, batched=False) == ["2.000000:2", "1.000000:1"]


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classification, "MAX_ELEMENTS", 4)
    monkeypatch.setattr(classification, "MAX_VALUES", 6)
    assert describe(np.zeros((3, 4), np.float32), 2)
    with pytest.raises(TooManyInputs, match="9 texts"):
        describe(np.zeros((3, 4), np.float32), 3)
    with pytest.raises(InvalidValue, match="too large"):
        describe(np.zeros((1, 5), np.float32), 1)
