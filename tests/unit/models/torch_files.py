"""Files as `torch.save` writes them, made without PyTorch: its zip archives, and the streams of versions before 1.6."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.types import Array

STORAGES = {
    "f8": "DoubleStorage",
    "f4": "FloatStorage",
    "f2": "HalfStorage",
    "i8": "LongStorage",
    "i4": "IntStorage",
    "u1": "ByteStorage",
    "b1": "BoolStorage",
}
MAGIC, STREAM_VERSION = 0x1950A86A20F9469CFC6C, 1001


class Global(NamedTuple):
    """A function or class by its name."""

    module: str
    name: str


class Call(NamedTuple):
    """What a function returns for its arguments."""

    function: Global
    arguments: tuple[Any, ...]


class Reference(NamedTuple):
    """A reference to something outside the pickle."""

    id: Any


class Raw(NamedTuple):
    """Opcodes as they are."""

    opcodes: bytes


REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
ORDERED = Call(Global("collections", "OrderedDict"), ())


def opcodes(value: Any) -> bytes:
    """Return the opcodes (protocol 2) that put a value on the stack."""
    match value:
        case Raw():
            return value.opcodes
        case Global():
            return f"c{value.module}\n{value.name}\n".encode()
        case Call():
            return opcodes(value.function) + opcodes(value.arguments) + b"R"
        case Reference():
            return opcodes(value.id) + b"Q"
        case tuple():
            return b"(" + b"".join(map(opcodes, value)) + b"t"
        case list():
            return b"](" + b"".join(map(opcodes, value)) + b"e"
        case dict():
            return b"}(" + b"".join(opcodes(part) for item in value.items() for part in item) + b"u"
        case _:  # protocol 2 without its header and STOP
            return pickle.dumps(value, 2)[2:-1]


def pickled(value: Any) -> bytes:
    return b"\x80\x02" + opcodes(value) + b"."


def storage(kind: str, key: str, size: int, *, stream: bool = False) -> Reference:
    more = (None,) if stream else ()
    return Reference(("storage", Global("torch", kind), key, "cpu", size, *more))


def tensor(of: Reference, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Call:
    return Call(REBUILD, (of, offset, shape, strides, False, ORDERED))


def describe(tensors: Mapping[str, Array], *, stream: bool = False) -> dict[str, Call]:
    """Return the state dictionary of tensors, each with a storage of its own, by their order."""
    state = {}
    for number, (name, array) in enumerate(tensors.items()):
        strides = tuple(step // array.itemsize for step in np.ascontiguousarray(array).strides)
        of = storage(STORAGES[array.dtype.str[1:]], str(number), array.size, stream=stream)
        state[name] = tensor(of, 0, array.shape, strides[: array.ndim])
    return state


def save(path: Path, tensors: Mapping[str, Array]) -> Path:
    """Write a state dictionary as PyTorch does since 1.6."""
    return archive(
        path, describe(tensors), {str(number): array.tobytes() for number, array in enumerate(tensors.values())}
    )


def archive(path: Path, state: Any, storages: Mapping[str, bytes], *, root: str = "archive", **more: bytes) -> Path:
    """Write an archive with a description and storages by key; `more` are other members."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{root}/data.pkl", state if isinstance(state, bytes) else pickled(state))
        for name, content in more.items():
            file.writestr(f"{root}/{name}", content)
        for key, content in storages.items():
            file.writestr(f"{root}/data/{key}", content)
        file.writestr(f"{root}/version", b"3\n")
    return path


def save_stream(path: Path, tensors: Mapping[str, Array], *, little: bool = True, keys: Any = None) -> Path:
    """Write a state dictionary as PyTorch did before 1.6."""
    keys = [str(number) for number in range(len(tensors))] if keys is None else keys
    parts = (MAGIC, STREAM_VERSION, {"little_endian": little}, describe(tensors, stream=True), keys)
    content = b"".join(map(pickled, parts))
    content += b"".join(struct.pack("<q", array.size) + array.tobytes() for array in tensors.values())
    path.write_bytes(content)
    return path
