"""Reading safetensors: values equal the library's, shards, and refusals by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from shoal.errors import ModelFileError
from shoal.models.convert.contract.weights import _MAX_HEADER, _MAX_TENSORS, Weights, open_weights
from shoal.types import Array
from tests.unit.models.checkpoints import save_bfloat16

RANDOM = np.random.default_rng(1)
TENSORS: dict[str, Array] = {
    "a": RANDOM.standard_normal((3, 4)).astype(np.float32),
    "b": RANDOM.standard_normal(5).astype(np.float32),
    "half": RANDOM.standard_normal((2, 2)).astype(np.float16),
    "position_ids": np.arange(4),
}


def test_values_equal_those_of_the_safetensors_library(tmp_path: Path) -> None:
    """float32 is exact, float16 is widened; integer buffers are not weights."""
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "np"})
    expected = load_file(tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    assert "position_ids" not in weights
    for name in ("a", "b", "half"):
        got = weights.get(name, expected[name].shape)
        assert got.dtype == np.float32
        assert np.array_equal(got, expected[name].astype(np.float32))
    assert np.array_equal(weights.rows("a", (3, 4), np.array([2, 0])), expected["a"][[2, 0]])


def test_bfloat16_is_the_upper_half_of_float32(tmp_path: Path) -> None:
    """Widening only adds zero bits."""
    save_bfloat16({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    got = open_weights(tmp_path).get("a", (3, 4))
    assert np.array_equal(got.view(np.uint32), TENSORS["a"].view(np.uint32) & 0xFFFF0000)


def test_shards_are_one_set_of_weights(tmp_path: Path) -> None:
    """The index maps tensors to files."""
    save_file({"a": TENSORS["a"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "model-00002-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    weights = open_weights(tmp_path)
    assert np.array_equal(weights.get("a", (3, 4)), TENSORS["a"])
    assert np.array_equal(weights.get("b", (5,)), TENSORS["b"])


@pytest.mark.parametrize(
    ("places", "file", "key"),
    [
        ({"a": "gone.safetensors"}, "gone.safetensors", None),
        ({"a": "../other.safetensors"}, "model.safetensors.index.json", "weight_map"),
        ({"a": "one.safetensors", "c": "one.safetensors"}, "model.safetensors.index.json", "c"),
    ],
)
def test_broken_indexes_are_refused(tmp_path: Path, places: dict[str, str], file: str, key: str | None) -> None:
    """A missing shard, a shard outside the folder, a tensor in no shard."""
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelFileError) as caught:
        open_weights(tmp_path)
    assert (caught.value.file, caught.value.key) == (file, key)


def test_no_weights_at_all(tmp_path: Path) -> None:
    """The error names the missing file."""
    with pytest.raises(ModelFileError, match="is missing") as caught:
        open_weights(tmp_path)
    assert caught.value.file == "model.safetensors"


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_a_file_cut_short_is_refused(tmp_path: Path, keep: int) -> None:
    """An interrupted download is never read as a shorter model."""
    path = tmp_path / "model.safetensors"
    save_file({"a": TENSORS["a"]}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match="not a complete safetensors file"):
        open_weights(tmp_path)


@pytest.mark.parametrize("offsets", [[0, 40], [0, 4096], [48, 0], [-48, 0]])
def test_offsets_that_lie_are_refused(tmp_path: Path, offsets: list[int]) -> None:
    """A tensor's bytes lie inside the file and match its shape."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [3, 4], "data_offsets": offsets}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(48)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelFileError, match="not a complete safetensors file"):
        open_weights(tmp_path)


def test_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    """The message has both shapes."""
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"\[3, 4\].*\[4, 3\]") as caught:
        open_weights(tmp_path).get("a", (4, 3))
    assert caught.value.key == "a"


def stored(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def described(shape: Any, begin: int, end: int, dtype: str = "F32") -> bytes:
    return json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}).encode()


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (described([2**32, 2**32], 0, 0), 0),
        (described([2**62, 4], 0, 0), 0),
        (described([2**70], 0, 0), 0),
        (described([-1, -4], 0, 16), 16),
        (described([4], -16, 0), 16),
        (described([1] * 70, 0, 4), 4),
        (described([0, 2**40, 2**40], 0, 0), 0),
        (described([], 0, 0), 4),
        (described([4], 0, 2**70), 16),
        (described([[4]], 0, 16), 16),
        (b'{"\xff": 1}', 0),
        (b'{"a": ' + b"[" * 100_000 + b"}", 0),
        (b"[1, 2]", 0),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, header: bytes, data: int) -> None:
    """Shapes whose product overflows, impossible shapes, and invalid headers."""
    (tmp_path / "model.safetensors").write_bytes(stored(header, bytes(data)))
    with pytest.raises(ModelFileError, match="not a complete safetensors file"):
        open_weights(tmp_path)


def test_a_header_out_of_all_proportion(tmp_path: Path) -> None:
    """It is refused by its length and its number of tensors before it is parsed."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(stored(b" " * (_MAX_HEADER + 1)))
    with pytest.raises(ModelFileError, match="has a header of"):
        open_weights(tmp_path)
    one = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    path.write_bytes(stored(b"{" + b",".join(one % index for index in range(_MAX_TENSORS + 1)) + b"}"))
    with pytest.raises(ModelFileError, match=f"has {_MAX_TENSORS + 1} tensors"):
        open_weights(tmp_path)


@given(st.binary(max_size=80))
def test_no_header_fails_otherwise(tmp_path_factory: pytest.TempPathFactory, header: bytes) -> None:
    """Any bytes give tensors or a ModelFileError."""
    folder = tmp_path_factory.mktemp("any")
    (folder / "model.safetensors").write_bytes(stored(header))
    try:
        weights = open_weights(folder)
    except ModelFileError:
        return
    assert isinstance(weights, Weights) and isinstance(json.loads(header), dict)


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"])
def test_integers_are_lists_and_no_weights(tmp_path: Path, dtype: str) -> None:
    """Unsigned 16-bit integers are not bfloat16."""
    save_file({"a": np.arange(5).astype(dtype)}, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    integers = weights.integers("a")
    assert integers is not None and integers.tolist() == [0, 1, 2, 3, 4]
    assert "a" not in weights and weights.has("a")
    with pytest.raises(ModelFileError, match="not weights"):
        weights.get("a", (5,))
    assert weights.integers("b") is None and not weights.has("b")


def test_a_tensor_of_another_type(tmp_path: Path) -> None:
    """It is refused only when it is read, by its type and not as missing."""
    save_file({"a": TENSORS["a"], "b": np.ones(3, np.bool_)}, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    assert "a" in weights and "b" not in weights and weights.has("b")
    reads: list[Callable[[], Any]] = [lambda: weights.integers("b"), lambda: weights.get("b", (3,))]
    for ask in reads:
        with pytest.raises(ModelFileError, match="has the unsupported type BOOL"):
            ask()
