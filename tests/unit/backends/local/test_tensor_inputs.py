"""Checking inputs against a graph."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.backends.local.tensor_inputs import Port, check_inputs, make_example
from shoal.errors import InputRejected
from shoal.types import Array

INT = np.dtype(np.int64)
PORTS = (Port("ids", INT, (None, None)), Port("mask", INT, (None, None)))


def batch(rows: int = 2, length: int = 3) -> dict[str, Array]:
    return {"ids": np.arange(rows * length).reshape(rows, length), "mask": np.ones((rows, length), dtype=np.int64)}


def test_fitting_arrays_are_not_copied() -> None:
    """Arrays of the right type and layout are passed on unchanged."""
    inputs = batch()
    feeds = check_inputs(inputs, PORTS, 512)
    assert all(feeds[name] is inputs[name] for name in inputs)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_narrower_integers_are_widened(dtype: type[np.generic]) -> None:
    """Ids of a narrower integer type are accepted and widened."""
    feeds = batch() | {"ids": np.array([[1, 2, 3], [4, 5, 6]], dtype=dtype)}
    assert check_inputs(feeds, PORTS, 512)["ids"].dtype == np.int64


def test_views_and_frozen_arrays_are_made_contiguous_and_writeable() -> None:
    """The engine shares the memory, so a strided or read-only array is copied first."""
    frozen = np.ones((2, 3), dtype=np.int64)
    frozen.flags.writeable = False
    feeds = check_inputs({"ids": np.arange(12).reshape(2, 6)[:, ::2], "mask": frozen}, PORTS, 512)
    assert all(array.flags.c_contiguous and array.flags.writeable for array in feeds.values())
    assert feeds["ids"].tolist() == [[0, 2, 4], [6, 8, 10]]


@pytest.mark.parametrize(
    ("changed", "param", "words"),
    [
        ({"mask": None}, "mask", "is missing"),
        ({"extra": np.ones((2, 3), dtype=np.int64)}, "extra", "its inputs are ids, mask"),
        ({"ids": np.ones(3, dtype=np.int64)}, "ids", r"must have the shape \[any, any\] \(got \[3\]\)"),
        ({"ids": np.ones((0, 3), dtype=np.int64)}, "ids", "is empty"),
        ({"ids": np.ones((2, 3))}, "ids", r"must be int64 \(got float64\)"),
        ({"ids": np.array([["a"]])}, "ids", "must be int64"),
        ({"ids": np.ones((1, 3), dtype=np.int64)}, None, "ids 1, mask 2"),
        ({"ids": np.ones((2, 4), dtype=np.int64)}, None, "ids 4, mask 3"),
    ],
)
def test_each_misfit_is_named(changed: dict[str, Array | None], param: str | None, words: str) -> None:
    """The error names the invalid input and what the graph takes."""
    feeds = {name: array for name, array in (batch() | changed).items() if array is not None}
    with pytest.raises(InputRejected, match=words) as caught:
        check_inputs(feeds, PORTS, 512)
    assert caught.value.param == param


def test_inputs_end_at_the_model_s_length() -> None:
    """The maximum length passes; one token more is rejected."""
    assert check_inputs(batch(1, 3), PORTS, 3)["ids"].shape == (1, 3)
    with pytest.raises(InputRejected, match="at most 3 tokens"):
        check_inputs(batch(1, 4), PORTS, 3)


def test_a_fixed_axis_must_match() -> None:
    """A fixed axis of the graph accepts only its own size."""
    port = Port("pixels", np.dtype(np.float32), (None, 3, 4))
    assert check_inputs({"pixels": np.ones((5, 3, 4), dtype=np.float64)}, [port], 512)["pixels"].dtype == np.float32
    with pytest.raises(InputRejected, match=r"\[any, 3, 4\]"):
        check_inputs({"pixels": np.ones((5, 1, 4), dtype=np.float32)}, [port], 512)


def test_examples_fit_their_ports() -> None:
    """Example inputs pass the input check, including fixed axes."""
    ports = (*PORTS, Port("scale", np.dtype(np.float32), (None,)), Port("pixels", INT, (None, 3)))
    feeds = check_inputs(make_example(ports, 4, 7), ports, 7)
    assert [array.shape for array in feeds.values()] == [(4, 7), (4, 7), (4,), (4, 3)]
