"""Messages of text-embeddings-inference's public gRPC protocol, compiled from tei_wire.proto as this is imported.

from tests.fakes.tei_wire import wire
wire.EmbedRequest(inputs="a")
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

PROTO = Path(__file__).with_name("tei_wire.proto")


def compile_wire(proto: Path) -> FileDescriptorProto:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "set"
        assert protoc.main(["protoc", f"-I{proto.parent}", f"--descriptor_set_out={made}", proto.name]) == 0
        return FileDescriptorSet.FromString(made.read_bytes()).file[0]


def _messages(file: FileDescriptorProto) -> SimpleNamespace:
    found = message_factory.GetMessages([file], pool=descriptor_pool.DescriptorPool())
    return SimpleNamespace(**{name.rpartition(".")[2]: kind for name, kind in found.items()})


wire: Any = _messages(compile_wire(PROTO))
