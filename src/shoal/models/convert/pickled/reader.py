"""Find the tensors in a file that `torch.save` wrote, and map them into memory.

Since PyTorch 1.6 it is a zip archive of uncompressed members: `<name>/data.pkl` describes the tensors, and
`<name>/data/<key>` holds each storage. Before, it was a stream: pickles of a magic number, a version, the system, the
tensors and the order of the storages, then each storage after its count of values in eight bytes. Numbers are
little-endian. Only offsets are taken from the archive's directory; its names are keys and never paths.
"""

from __future__ import annotations

import io
import math
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.errors import ModelFileError
from shoal.models.convert.pickled import machine
from shoal.models.convert.pickled.machine import PickleError, Tensor

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of a value, by the types' names in safetensors."""

MAX_READ = 8 << 20
"""Bytes of a file's pickles, and of an archive's directory: a large model takes some hundred for each of its thousands
of tensors."""

MAX_TENSORS = 100_000
MAX_SHARING = 4
"""Bytes of all tensors by those of the file. Tied weights are stored once and read twice."""

_MAGIC = 0x1950A86A20F9469CFC6C
_STREAM_VERSION = 1001
_LOCAL_HEADER = 30
_PICKLE = "data.pkl"
_IS_PICKLE = re.compile(rf"[^/]+/{re.escape(_PICKLE)}")
_Place: TypeAlias = tuple[int, int]
"""First byte of a storage in the file, and how many there are."""


class StoredTensor(NamedTuple):
    """A tensor of type `dtype` (in safetensors' name): `data` are its values as unsigned integers of that width, a view
    of the file with any strides."""

    dtype: str
    data: npt.NDArray[Any]


def read_tensors(path: Path, name: str) -> dict[str, StoredTensor]:
    """Return the tensors of a file that holds a dictionary of them by name, or one under `state_dict`.

    `name` is the file's name in errors. Raises ModelFileError for a file with anything else, and a broken one.
    """
    try:
        with _Bounded(path.open("rb", buffering=0)) as file:
            tensors, places = (_read_archive if zipfile.is_zipfile(file) else _read_stream)(file)
        _check_total(tensors, path.stat().st_size)
        memory = np.memmap(path, np.uint8, "r")
        return {key: _map(tensor, places, memory) for key, tensor in tensors.items()}
    except (PickleError, ValueError, OverflowError) as error:  # numpy's, for shapes that no array can have
        raise ModelFileError(
            f"is not a pickle of tensors only: it {error}; use a revision that has safetensors", file=name
        ) from None


def _named_tensors(state: Any) -> dict[str, Tensor]:
    """Return the tensors of a state dictionary, without the prefix that DataParallel gives to all names."""
    if type(state) is dict and type(state.get("state_dict")) is dict:
        state = state["state_dict"]
    if type(state) is not dict or not state:
        raise PickleError("is not a dictionary of tensors")
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise PickleError(f"has {str(key)[:80]!r}, which is no tensor")
        if not key.isascii():
            raise PickleError(f"has a tensor of the odd name {key[:80]!r}")
    if len(state) > MAX_TENSORS:
        raise PickleError(f"has more than {MAX_TENSORS} tensors")
    wrapped = all(key.startswith("module.") for key in state)
    return {key.removeprefix("module.") if wrapped else key: value for key, value in state.items()}


def _check_total(tensors: Mapping[str, Tensor], size: int) -> None:
    """Reject files whose tensors would take many times the space of the file: converted, each has its own."""
    if sum(math.prod(each.shape) * WIDTHS[each.storage.dtype] for each in tensors.values()) > MAX_SHARING * size:
        raise PickleError("has tensors that share too much memory")


def _map(tensor: Tensor, places: Mapping[str, _Place], memory: npt.NDArray[np.uint8]) -> StoredTensor:
    """Return the view of the file that a tensor is. Raises PickleError if it is not inside its storage."""
    storage, shape, strides = tensor.storage, tensor.shape, tensor.strides
    width, count = WIDTHS[storage.dtype], math.prod(shape)
    start, size = places.get(storage.key, (0, -1))
    if size != storage.size * width or start + size > len(memory):  # no overlap of storages can do harm
        raise PickleError(f"has no complete storage {storage.key[:40]!r}")
    last = tensor.offset + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    if count > storage.size or (count and last >= storage.size):
        raise PickleError("has a tensor that is larger than its storage")
    values = np.asarray(memory[start : start + size]).view(f"<u{width}")
    if not count:
        return StoredTensor(storage.dtype, np.empty(shape, values.dtype))
    steps = [step * width for step in strides]
    data = np.lib.stride_tricks.as_strided(values[tensor.offset :], shape, steps, writeable=False)
    return StoredTensor(storage.dtype, data)


class _Bounded(io.BufferedReader):
    """A file of which nothing large is read at once. `zipfile` takes an archive's directory as a whole. `end`: its size
    in bytes."""

    @property
    def end(self) -> int:
        return os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self.end - self.tell())
        size = left if size is None or size < 0 else min(size, left)
        if size > MAX_READ:
            raise PickleError(f"needs more than {MAX_READ} bytes to describe its tensors")
        return super().read(size)


class _Archive:
    """The members of a zip archive of torch.save, by their names in its one folder."""

    def __init__(self, file: _Bounded) -> None:
        try:
            found = zipfile.ZipFile(file).infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError) as error:
            raise PickleError(f"is a broken archive ({error})") from None
        roots = [each.filename.removesuffix(_PICKLE) for each in found if _IS_PICKLE.fullmatch(each.filename)]
        if len(roots) != 1:
            raise PickleError("is an archive, but not one of torch.save")
        self._file = file
        self._members = {each.filename.removeprefix(roots[0]): each for each in found}
        if len(self._members) != len(found):
            raise PickleError("has two parts of one name")

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def read(self, name: str) -> bytes:
        start, size = self.locate(name)
        self._file.seek(start)
        return self._file.read(size)

    def locate(self, name: str) -> _Place:
        """Return where an uncompressed member's bytes are."""
        member = self._members.get(name)
        if member is None:
            raise PickleError(f"has no part {name[:40]!r}")
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise PickleError(f"has a compressed part {name[:40]!r}")
        self._file.seek(max(0, min(member.header_offset, self._file.end)))
        header = self._file.read(_LOCAL_HEADER)
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = member.header_offset + _LOCAL_HEADER + lengths
        if member.header_offset < 0 or header[:4] != b"PK\3\4" or start + member.file_size > self._file.end:
            raise PickleError(f"has no part {name[:40]!r} where its directory says")
        return start, member.file_size


def _read_archive(file: _Bounded) -> tuple[dict[str, Tensor], dict[str, _Place]]:
    archive = _Archive(file)
    if "byteorder" in archive and archive.read("byteorder") != b"little":
        raise PickleError("is from a big-endian machine")
    tensors = _named_tensors(machine.load(io.BytesIO(archive.read(_PICKLE))))
    keys = {tensor.storage.key for tensor in tensors.values()}
    return tensors, {key: archive.locate(f"data/{key}") for key in keys}


def _read_stream(file: _Bounded) -> tuple[dict[str, Tensor], dict[str, _Place]]:
    file.seek(0)
    pickles = io.BytesIO(file.read(MAX_READ))
    if machine.load(pickles) != _MAGIC or machine.load(pickles) != _STREAM_VERSION:
        raise PickleError("is not in a form that torch.save writes")
    system, state, keys = (machine.load(pickles) for _ in range(3))
    if type(system) is not dict or system.get("little_endian") is not True or type(keys) is not list:
        raise PickleError("is from a big-endian machine, or broken")
    tensors = _named_tensors(state)
    storages = {tensor.storage.key: tensor.storage for tensor in tensors.values()}
    places, position = dict[str, _Place](), pickles.tell()
    for key in keys:
        storage = storages.get(key) if type(key) is str else None
        if storage is None or position > file.end:
            raise PickleError("has a storage that belongs to no tensor, or ends before it")
        file.seek(position)
        size = int.from_bytes(file.read(8), "little") * WIDTHS[storage.dtype]
        places[storage.key] = position + 8, size
        position += 8 + size
    return tensors, places
