"""Reading safetensors: the same numbers as the format's own library, shards, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shoal.errors import ModelFileError
from shoal.models.graphs.weights import has_weights, open_weights
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
    """float32 to the bit, float16 widened; integer buffers are no weights."""
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
    """Widening adds zeros and nothing else."""
    save_bfloat16({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    got = open_weights(tmp_path).get("a", (3, 4))
    assert np.array_equal(got.view(np.uint32), TENSORS["a"].view(np.uint32) & 0xFFFF0000)


def test_shards_are_one_set_of_weights(tmp_path: Path) -> None:
    """The index says which file has which tensor."""
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
    """A missing shard, a shard elsewhere, a tensor in no shard."""
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelFileError) as caught:
        open_weights(tmp_path)
    assert (caught.value.file, caught.value.key) == (file, key)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    """The message says what to use instead."""
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert not has_weights(tmp_path, "2_Dense")
    with pytest.raises(ModelFileError, match=r"never read here; use a revision with model\.safetensors") as caught:
        open_weights(tmp_path, "2_Dense")
    assert caught.value.file == "2_Dense/pytorch_model.bin"


def test_no_weights_at_all(tmp_path: Path) -> None:
    """The file that should be there is named."""
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
    """A tensor's bytes are inside the file and as many as its shape says."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [3, 4], "data_offsets": offsets}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(48)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelFileError, match="not a complete safetensors file"):
        open_weights(tmp_path)


def test_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    """The message holds both shapes."""
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"\[3, 4\].*\[4, 3\]") as caught:
        open_weights(tmp_path).get("a", (4, 3))
    assert caught.value.key == "a"
