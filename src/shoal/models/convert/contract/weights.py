"""Read tensors of a model's safetensors files as float32 arrays: one file or shards, memory-mapped.

The format (github.com/huggingface/safetensors): eight bytes of header length, a JSON header of name -> dtype, shape and
byte range, then the data, little-endian. Pickled weights are converted before (`convert.pickles`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.decoding import json_decoder
from shoal.errors import ModelFileError
from shoal.models.convert.contract.json_file import is_there, read_object

Floats = npt.NDArray[np.float32]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("<i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("<u1"),
}
_BFLOAT16 = "BF16"
_MAX_HEADER = 16 << 20
_MAX_TENSORS = 100_000
"""Far above any supported model: a transformer's header has about a hundred bytes for each of its hundreds of tensors.
The format itself allows a hundred million bytes, which take seconds and gigabytes."""
_METADATA = "__metadata__"
_ADDRESSABLE = 2**48
_Size = Annotated[int, msgspec.Meta(ge=0, le=_ADDRESSABLE)]


class Entry(msgspec.Struct, frozen=True):
    """A tensor's entry in the header. `data_offsets`: its first byte and the byte after its last, within the data."""

    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Size, _Size]

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def addressable(self) -> bool:
        """Whether an array can have the shape: an empty one may have other sides of any size."""
        return math.prod(max(size, 1) for size in self.shape) <= _ADDRESSABLE


_HEADER = json_decoder(dict[str, msgspec.Raw])
_ENTRY = json_decoder(Entry)


class Header(NamedTuple):
    """A file's header. `start`: where the data begins in the file."""

    entries: dict[str, Entry]
    start: int


class _Tensor(NamedTuple):
    """A tensor in a file. `data` None: of an unsupported type."""

    file: str
    dtype: str
    data: npt.NDArray[Any] | None


class Part(NamedTuple):
    """A tensor derived from stored ones: `take` applied to the one named `stored`, of `shape` (None: any), after
    appending those of `then` along the first axis."""

    stored: str
    shape: tuple[int, ...] | None
    take: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] = np.asarray
    then: tuple[tuple[str, tuple[int, ...]], ...] = ()


class Weights:
    """The tensors of one folder by name, which only their own class reads. `where` names the file for errors."""

    def __init__(self, where: str, tensors: dict[str, _Tensor]) -> None:
        self.where = where
        self.tensors = tensors

    def __contains__(self, name: str) -> bool:
        """Whether there are weights of that name; integers are not weights."""
        return name in self.tensors and _is_float(self.tensors[name].dtype)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name, of any type."""
        return name in self.tensors

    def get(self, name: str, shape: tuple[int, ...]) -> Floats:
        """Return the tensor as float32. Raises ModelFileError if it is absent or of another shape."""
        return _float32(*self._get_floats(name, shape))

    def rows(self, name: str, shape: tuple[int, ...], indices: npt.NDArray[np.int64]) -> Floats:
        """Return `get(name, shape)[indices]`, without reading the other rows."""
        data, dtype = self._get_floats(name, shape)
        return _float32(data[indices], dtype)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise the errors of `get`, without reading the data."""
        self._get_floats(name, shape)

    def table(self, name: str) -> tuple[int, int]:
        """Return rows and columns of a matrix of floats, or of int8 in place of floats. Raises as `get` does."""
        data, dtype = self._get_any(name)
        if not _is_float(dtype) and dtype != "I8":
            raise self._refuse(name, f"must hold floats or int8, not {dtype}")
        shape = data.shape
        if len(shape) != 2 or 0 in shape:
            raise ModelFileError(f"must be a matrix, not of shape {list(shape)}", file=self.where, key=name)
        return shape[0], shape[1]

    def table_rows(self, name: str, indices: npt.NDArray[np.int64] | slice) -> Floats:
        """Return rows of such a matrix as float32."""
        data, dtype = self._get_any(name)
        return _float32(data[indices], dtype)

    def number(self, name: str) -> float:
        """Return the only float of a tensor of any shape. Raises as `get` does."""
        data, dtype = self._get_any(name)
        if not _is_float(dtype) or data.size != 1:
            raise self._refuse(name, f"must hold one float, not {dtype} of shape {list(data.shape)}")
        return float(_float32(data.reshape(1), dtype)[0])

    def integers(self, name: str) -> npt.NDArray[np.int64] | None:
        """Return a list of integers, None if absent. Raises ModelFileError for anything else."""
        if name not in self.tensors:
            return None
        data, dtype = self._get_any(name)
        if _is_float(dtype) or data.ndim != 1:
            raise self._refuse(name, f"must be a list of integers, not {dtype} of shape {list(data.shape)}")
        return data.astype(np.int64)

    def rename_tensors(self, parts: Mapping[str, Part]) -> Weights:
        """Return the same data under other names and in other pieces, reading it only where tensors are joined.

        Raises as `get` does, with the stored names.
        """
        tensors = {}
        for name, part in parts.items():
            data, dtype = (
                self._get_any(part.stored) if part.shape is None else self._get_floats(part.stored, part.shape)
            )
            for more, shape in part.then:
                other, kind = self._get_floats(more, shape)
                if kind != dtype:
                    why = f"is {kind}, but {part.stored} is {dtype}; save the model again in one precision"
                    raise self._refuse(more, why)
                data = np.concatenate([data, other])
            tensors[name] = _Tensor(self.tensors[part.stored].file, dtype, part.take(data))
        return Weights(self.where, tensors)

    def _get_any(self, name: str) -> tuple[npt.NDArray[Any], str]:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError("this tensor is missing", file=self.where, key=name)
        if tensor.data is None:
            known = ", ".join(_DTYPES)
            why = f"has the unsupported type {tensor.dtype}; supported types: {known}; save the model again in float32"
            raise self._refuse(name, why)
        return tensor.data, tensor.dtype

    def _get_floats(self, name: str, shape: tuple[int, ...]) -> tuple[npt.NDArray[Any], str]:
        data, dtype = self._get_any(name)
        if not _is_float(dtype):
            raise ModelFileError("contains integers, which are not weights", file=self.where, key=name)
        if data.shape != shape:
            raise self._refuse(name, f"has shape {list(data.shape)}, but the configuration says {list(shape)}")
        return data, dtype

    def _refuse(self, name: str, why: str) -> ModelFileError:
        return ModelFileError(why, file=self.tensors[name].file, key=name)


def has_weights(folder: Path, path: str = "") -> bool:
    """Whether the folder holds weights that can be read."""
    prefix = f"{path}/" if path else ""
    return any(is_there(folder, prefix + name) for name in (WEIGHTS, INDEX))


def open_weights(folder: Path, path: str = "") -> Weights:
    """Open the weights in `folder / path`. Raises ModelFileError for missing or broken ones."""
    prefix = f"{path}/" if path else ""
    if is_there(folder, prefix + WEIGHTS):
        return Weights(prefix + WEIGHTS, _read_file(folder, prefix + WEIGHTS))
    index = read_object(folder, prefix + INDEX)
    if index is not None:
        return Weights(index.name, _read_shards(folder, prefix, index.object("weight_map"), index.name))
    raise ModelFileError("is missing; fetch the model again", file=prefix + WEIGHTS)


def open_file(folder: Path, name: str) -> Weights:
    """Open the tensors of one safetensors file. Raises ModelFileError for a missing or broken one."""
    if not is_there(folder, name):
        raise ModelFileError("is missing; fetch the model again", file=name)
    return Weights(name, _read_file(folder, name))


def _read_shards(folder: Path, prefix: str, places: dict[str, Any], where: str) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    for shard in sorted({str(place) for place in places.values()}):
        if "/" in shard or "\\" in shard:
            raise ModelFileError(f"{shard!r} is not a file of this folder", file=where, key="weight_map")
        if not is_there(folder, prefix + shard):
            raise ModelFileError(f"is missing, but {where} lists it; fetch the model again", file=prefix + shard)
        tensors |= _read_file(folder, prefix + shard)
    for name in places:
        if name not in tensors:
            raise ModelFileError("is in no shard", file=where, key=name)
    return tensors


def read_header(path: Path, name: str) -> Header:
    """Read the header of the safetensors file at `path`; `name` is its name in errors.

    Raises ModelFileError for a file that is broken, truncated, or has an oversized header.
    """
    size = path.stat().st_size
    broken = ModelFileError("is not a complete safetensors file; fetch the model again", file=name)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise broken
        if length > _MAX_HEADER:
            raise ModelFileError(f"has a header of {length} bytes, more than the limit of {_MAX_HEADER}", file=name)
        text = file.read(length)
    try:
        raw = _HEADER.decode(text)
        raw.pop(_METADATA, None)
        if len(raw) > _MAX_TENSORS:
            raise ModelFileError(f"has {len(raw)} tensors, more than the limit of {_MAX_TENSORS}", file=name)
        entries = {key: _ENTRY.decode(value) for key, value in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise broken from None
    start = 8 + length
    for entry in entries.values():
        begin, end = entry.data_offsets
        dtype = _DTYPES.get(entry.dtype)
        if not begin <= end <= size - start or not entry.addressable:
            raise broken
        if dtype is not None and end - begin != entry.count * dtype.itemsize:
            raise broken
    return Header(entries, start)


def _read_file(folder: Path, name: str) -> dict[str, _Tensor]:
    path = folder / name
    header, tensors = read_header(path, name), {}
    size = path.stat().st_size
    memory = np.memmap(path, np.uint8, "r", offset=header.start) if size > header.start else np.empty(0, np.uint8)
    for key, entry in header.entries.items():
        begin, end = entry.data_offsets
        dtype, data = _DTYPES.get(entry.dtype), None
        if dtype is not None:
            # A plain view, not np.memmap, whose subclass makes every slice slow. Offsets need no alignment here.
            data = np.asarray(memory[begin:end]).view(dtype).reshape(entry.shape)
        tensors[key] = _Tensor(name, entry.dtype, data)
    return tensors


def _is_float(dtype: str) -> bool:
    return dtype == _BFLOAT16 or (dtype in _DTYPES and _DTYPES[dtype].kind == "f")


def _float32(stored: npt.NDArray[Any], dtype: str) -> Floats:
    if dtype == _BFLOAT16:  # the upper half of a float32
        widened = stored.astype(np.uint32)
        widened <<= np.uint32(16)  # in place: a table of words may have a gigabyte
        return widened.view(np.float32)
    return np.ascontiguousarray(stored, np.float32)
