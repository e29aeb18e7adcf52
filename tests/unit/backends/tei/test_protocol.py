"""The wire format: Shoal's .proto compared with the public one, and the code generated from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from shoal.backends.tei import tei_pb2 as pb
from shoal.protobuf.compile import compile_proto
from tests.fakes.tei_wire import PROTO, compile_wire

OURS = Path(pb.__file__).with_name("tei.proto")
AS_BYTES = {"EmbedResponse.embeddings", "TokenEmbedding.embeddings"}
"""Packed floats, which are bytes on the wire."""


def fields(file: FileDescriptorProto) -> Iterator[tuple[str, object]]:
    for enum in file.enum_type:
        yield enum.name, {value.name: value.number for value in enum.value}
    for message in file.message_type:
        for enum in message.enum_type:
            yield f"{message.name}.{enum.name}", {value.name: value.number for value in enum.value}
        for field in message.field:
            kind = FieldDescriptorProto.Type.Name(field.type), field.type_name.removeprefix(f".{file.package}.")
            yield f"{message.name}.{field.name}", (field.number, kind, field.label, field.proto3_optional)


def test_what_is_made_is_of_the_proto_as_it_is() -> None:
    """Run `make proto` after a change."""
    assert OURS.with_name("tei_pb2.py").read_text() == compile_proto(OURS)["tei_pb2.py"]


def test_every_field_is_that_of_the_public_protocol() -> None:
    """The public protocol has more fields, which are skipped; vectors are read as raw bytes."""
    theirs, own = dict(fields(compile_wire(PROTO))), dict(fields(compile_wire(OURS)))
    assert set(own) <= set(theirs)
    assert {name for name in own if own[name] != theirs[name]} == AS_BYTES
    for name in AS_BYTES:
        assert own[name][0] == theirs[name][0]  # type: ignore[index]


def test_the_type_stub_is_complete() -> None:
    """The type stub has every message."""
    stub = OURS.with_name("tei_pb2.pyi").read_text()
    for message in compile_wire(OURS).message_type:
        assert f"class {message.name}(" in stub
