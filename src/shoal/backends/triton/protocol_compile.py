"""Makes the _pb2.py and _pb2.pyi of each .proto here: `python -m shoal.backends.triton.protocol_compile`.

A step of development (it needs grpcio-tools); the results are committed. protoc's own Python output refuses runtimes
older than itself. Ours holds the same descriptor and makes its classes with protobuf's public interface, so that any
protobuf from version 5 on will do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

PROTO = Path(__file__).with_name("protocol.proto")
PROTOS = (PROTO, PROTO.parents[1] / "tei" / "tei.proto")
"""Of unlike names: one process holds them all."""

WIDTH = 96

MODULE = '''\
"""Made of {proto} by protocol_compile.py: change that file, not this one."""

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(
{data}
)


def _message(descriptor):
    made = message_factory.GetMessageClass(descriptor)
    for nested in descriptor.nested_types:  # protobuf's own Python implementation leaves them out
        if not hasattr(made, nested.name):
            setattr(made, nested.name, _message(nested))
    return made


{names}
'''


STUB = '# mypy: disable-error-code="type-arg, no-untyped-def"\n'  # as protoc writes them


def compile_proto(proto: Path = PROTO) -> dict[str, str]:
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
    names = []
    for enum in file.enum_type:
        names.append(f'{enum.name} = EnumTypeWrapper(DESCRIPTOR.enum_types_by_name["{enum.name}"])')
        names += [f"{value.name} = {value.number}" for value in enum.value]
    names += [
        f'{message.name} = _message(DESCRIPTOR.message_types_by_name["{message.name}"])'
        for message in file.message_type
    ]
    data = "\n".join(f"    {line!r}" for line in _pieces(file.SerializeToString(deterministic=True)))
    return MODULE.format(proto=file.name, data=data, names="\n".join(names))


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
