"""Makes the _pb2.py and _pb2.pyi of each backend's .proto: `python -m shoal.backends.base.protocol_compile`.

A step of development (it needs grpcio-tools); the results are committed. protoc's own Python output refuses runtimes
older than itself. Ours holds the same descriptor and makes its classes with `protobuf.define_messages`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

PROTOS = tuple(sorted(Path(__file__).parents[1].glob("*/*.proto")))
"""Of unlike names: one process holds them all."""

WIDTH = 115

MODULE = '''\
"""Made of {proto} by protocol_compile.py: change that file, not this one."""

from shoal.backends.base.protobuf import define_messages

DATA = (
{data}
)
DESCRIPTOR = define_messages(DATA, globals())
'''

STUB = '# mypy: disable-error-code="type-arg, no-untyped-def"\n'  # as protoc writes them


def compile_proto(proto: Path) -> dict[str, str]:
    """The text of each made file by its name, from the .proto as it is now."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        arguments = ["protoc", f"-I{proto.parent}", f"--descriptor_set_out={made / 'set'}", f"--pyi_out={made}"]
        if protoc.main([*arguments, proto.name]) != 0:
            raise SystemExit(f"{proto} does not compile: the lines above say where")
        file = FileDescriptorSet.FromString((made / "set").read_bytes()).file[0]
        stub = STUB + (made / f"{proto.stem}_pb2.pyi").read_text()
    return {f"{proto.stem}_pb2.py": render_module(file), f"{proto.stem}_pb2.pyi": stub}


def render_module(file: FileDescriptorProto) -> str:
    """The Python module for one compiled .proto file."""
    for message in file.message_type:
        _clear_json_names(message)
    data = "\n".join(f"    {line!r}" for line in _pieces(file.SerializeToString(deterministic=True)))
    return MODULE.format(proto=file.name, data=data)


def _clear_json_names(message: DescriptorProto) -> None:
    """Leave out a quarter of the data, which protobuf derives from the names of the fields."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _clear_json_names(nested)


def _pieces(data: bytes) -> Iterator[bytes]:
    """The bytes in literals that fit a line each."""
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
