"""Generates _pb2.py and _pb2.pyi from each .proto of the package: `python -m shoal.protobuf.compile`.

A development step that needs grpcio-tools; the results are committed. protoc's own Python output rejects older
protobuf runtimes. This output has the same descriptor and creates its classes with `protobuf.define_messages`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

PROTOS = tuple(sorted(Path(__file__).parents[1].rglob("*.proto")))
"""File names must differ, because one process loads all of them."""

WIDTH = 115

MODULE = '''\
"""Generated from {proto} by shoal.protobuf.compile: edit that file, not this one."""

from shoal.protobuf import define_messages

DATA = (
{data}
)
DESCRIPTOR = define_messages(DATA, globals())
'''

STUB = '# mypy: disable-error-code="type-arg, no-untyped-def"\n'  # protoc's stubs do not pass these checks


def compile_proto(proto: Path) -> dict[str, str]:
    """Return the text of each generated file by name, from the current .proto."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        arguments = ["protoc", f"-I{proto.parent}", f"--descriptor_set_out={made / 'set'}", f"--pyi_out={made}"]
        if protoc.main([*arguments, proto.name]) != 0:
            raise SystemExit(f"{proto} does not compile: see the errors above")
        file = FileDescriptorSet.FromString((made / "set").read_bytes()).file[0]
        stub = STUB + (made / f"{proto.stem}_pb2.pyi").read_text()
    return {f"{proto.stem}_pb2.py": render_module(file), f"{proto.stem}_pb2.pyi": stub}


def render_module(file: FileDescriptorProto) -> str:
    """Return the Python module for one compiled .proto file."""
    for message in file.message_type:
        _clear_json_names(message)
    data = "\n".join(f"    {line!r}" for line in _pieces(file.SerializeToString(deterministic=True)))
    return MODULE.format(proto=file.name, data=data)


def _clear_json_names(message: DescriptorProto) -> None:
    """Remove the JSON names, a quarter of the data: protobuf derives them from the field names."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _clear_json_names(nested)


def _pieces(data: bytes) -> Iterator[bytes]:
    """Split the bytes into literals that each fit on one line."""
    start = 0
    while start < len(data):
        stop = start + 1
        while stop < len(data) and len(repr(data[start : stop + 1])) <= WIDTH:
            stop += 1
        yield data[start:stop]
        start = stop


def main() -> None:
    for proto in PROTOS:
        for name, text in compile_proto(proto).items():
            proto.with_name(name).write_text(text)


if __name__ == "__main__":
    main()
