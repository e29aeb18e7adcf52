"""Tensors of a model's safetensors files as float32 arrays: one file or shards, read where they lie (memory-mapped).

The format (github.com/huggingface/safetensors): eight bytes of header length, a JSON header of name -> dtype, shape and
byte range, then the data, little-endian. Pickled weights (pytorch_model.bin) are never read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.errors import ModelFileError
from shoal.models.contract.json_file import read_object

Floats = npt.NDArray[np.float32]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("<i1"),
}
_MAX_HEADER = 100_000_000
"""The format's own bound on its header."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Tensor(NamedTuple):
    file: str
    data: npt.NDArray[Any]


class Weights:
    """The tensors of one folder by name. `where` names the file for errors."""

    def __init__(self, where: str, tensors: dict[str, _Tensor]) -> None:
        self.where = where
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        """Whether there are weights of that name: integers are no weights."""
        return name in self._tensors and self._tensors[name].data.dtype.kind != "i"

    def get(self, name: str, shape: tuple[int, ...]) -> Floats:
        """The tensor as float32. Raises ModelFileError when it is absent or of another shape."""
        return _float32(self._stored(name, shape).data)

    def rows(self, name: str, shape: tuple[int, ...], wanted: npt.NDArray[np.int64]) -> Floats:
        """`get(name, shape)[wanted]`, without reading the other rows."""
        return _float32(self._stored(name, shape).data[wanted])

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise what `get` would, without reading the data."""
        self._stored(name, shape)

    def table(self, name: str) -> tuple[int, int]:
        """Rows and columns of a matrix of floats, or of the int8 that stand for them. Raises as `get` does."""
        shape = self._any(name).data.shape
        if len(shape) != 2 or 0 in shape:
            raise ModelFileError(f"must be a matrix, not of shape {list(shape)}", file=self.where, key=name)
        return shape[0], shape[1]

    def table_rows(self, name: str, wanted: npt.NDArray[np.int64] | slice) -> Floats:
        """Rows of such a matrix as float32."""
        return _float32(self._any(name).data[wanted])

    def integers(self, name: str) -> npt.NDArray[np.int64] | None:
        """A list of integers, None where there is none of that name."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.data.dtype.kind != "i" or tensor.data.ndim != 1:
            return None
        return tensor.data.astype(np.int64)

    def _any(self, name: str) -> _Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelFileError("this tensor is missing", file=self.where, key=name)
        return tensor

    def _stored(self, name: str, shape: tuple[int, ...]) -> _Tensor:
        tensor = self._any(name)
        if tensor.data.dtype.kind == "i":
            raise ModelFileError("holds integers, which are no weights", file=self.where, key=name)
        if tensor.data.shape != shape:
            raise ModelFileError(
                f"has shape {list(tensor.data.shape)}, but the configuration says {list(shape)}",
                file=tensor.file,
                key=name,
            )
        return tensor


def has_weights(folder: Path, path: str = "") -> bool:
    """Whether the folder holds weights that can be read."""
    return any((folder / path / name).is_file() for name in (WEIGHTS, INDEX))


def open_weights(folder: Path, path: str = "") -> Weights:
    """The weights in `folder / path`. Raises ModelFileError for missing, pickled or broken ones."""
    prefix = f"{path}/" if path else ""
    if (folder / prefix / WEIGHTS).is_file():
        return Weights(prefix + WEIGHTS, _read_file(folder, prefix + WEIGHTS))
    index = read_object(folder, prefix + INDEX)
    if index is not None:
        return Weights(index.name, _read_shards(folder, prefix, index.object("weight_map"), index.name))
    for name in PICKLES:
        if (folder / prefix / name).is_file():
            raise ModelFileError(
                "holds pickled weights, which can run code and are never read here; use a revision with "
                "model.safetensors, save the model again with safe_serialization=True, or install the 'convert' extra",
                file=prefix + name,
            )
    raise ModelFileError(
        "is missing; fetch the model again, or where its author published only pickled weights (.bin), which are never "
        "read, use a revision with safetensors",
        file=prefix + WEIGHTS,
    )


def open_file(folder: Path, name: str) -> Weights:
    """The tensors of one safetensors file. Raises ModelFileError for a missing or broken one."""
    if not (folder / name).is_file():
        raise ModelFileError("is missing; fetch the model again", file=name)
    return Weights(name, _read_file(folder, name))


def _read_shards(folder: Path, prefix: str, places: dict[str, Any], where: str) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    for shard in sorted({str(place) for place in places.values()}):
        if "/" in shard or "\\" in shard:
            raise ModelFileError(f"{shard!r} is not a file of this folder", file=where, key="weight_map")
        if not (folder / prefix / shard).is_file():
            raise ModelFileError(f"is missing, but {where} names it; fetch the model again", file=prefix + shard)
        tensors |= _read_file(folder, prefix + shard)
    for name in places:
        if name not in tensors:
            raise ModelFileError("is in no shard", file=where, key=name)
    return tensors


def _read_file(folder: Path, name: str) -> dict[str, _Tensor]:
    path = folder / name
    size = path.stat().st_size
    broken = ModelFileError("is not a complete safetensors file; fetch the model again", file=name)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise broken
        try:
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            entries = {key: msgspec.json.decode(raw, type=_Entry) for key, raw in header.items()}
        except msgspec.DecodeError:
            raise broken from None
    start, tensors = 8 + length, {}
    memory = np.memmap(path, np.uint8, "r", offset=start) if size > start else np.empty(0, np.uint8)
    for key, entry in entries.items():
        begin, end = entry.data_offsets
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            # Booleans and what newer versions of the format know; asked for, they are missing.
            continue
        count = int(np.prod(entry.shape, dtype=np.int64))
        if not 0 <= begin <= end <= size - start or end - begin != count * dtype.itemsize:
            raise broken
        # A plain view, not np.memmap, whose subclass makes every slice slow. Offsets need no alignment in this format.
        data = np.asarray(memory[begin:end]).view(dtype).reshape(entry.shape)
        tensors[key] = _Tensor(name, data)
    return tensors


def _float32(stored: npt.NDArray[Any]) -> Floats:
    if stored.dtype == np.uint16:  # bfloat16 is the upper half of a float32
        widened: Floats = (stored.astype(np.uint32) << 16).view(np.float32)
        return widened
    return np.ascontiguousarray(stored, np.float32)
