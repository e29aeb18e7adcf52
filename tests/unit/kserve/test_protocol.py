"""The wire format: our .proto against tritonclient's descriptors, and the generated code."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from shoal.kserve import protocol_pb2 as pb
from shoal.protobuf import compile as protocol_compile

PROTO = Path(pb.__file__).with_name("protocol.proto")

UNUSED = ("SystemSharedMemory", "CudaSharedMemory", "TraceSetting", "LogSettings")
"""How the names of Triton's calls begin that Shoal does not make."""


def tritonclient() -> Iterator[FileDescriptorProto]:
    """Return the descriptors of its two .proto files, read from the generated source: importing it would need an older
    protobuf."""
    found = find_spec("tritonclient")
    assert found is not None and found.submodule_search_locations
    folder = Path(next(iter(found.submodule_search_locations))) / "grpc"
    for name in ("service_pb2.py", "model_config_pb2.py"):
        for node in ast.walk(ast.parse((folder / name).read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "AddSerializedFile":
                yield FileDescriptorProto.FromString(ast.literal_eval(node.args[0]))


def ours() -> FileDescriptorProto:
    file = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    return file


def fields(message: DescriptorProto, package: str, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Return all wire facts of a message: field, number, type, label, choice, and its enums' values."""
    path = f"{prefix}{message.name}"
    yield path, "message"
    for field in message.field:
        choice = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
        kind = FieldDescriptorProto.Type.Name(field.type), field.type_name.removeprefix(f".{package}.")
        yield f"{path}.{field.name}", (field.number, kind, field.label, choice, field.proto3_optional)
    for enum in message.enum_type:
        yield f"{path}.{enum.name}", {value.name: value.number for value in enum.value}
    for nested in message.nested_type:
        yield from fields(nested, package, f"{path}.")


def everything(file: FileDescriptorProto) -> dict[str, object]:
    found: dict[str, object] = {enum.name: {v.name: v.number for v in enum.value} for enum in file.enum_type}
    for message in file.message_type:
        found.update(fields(message, file.package))
    return found


def test_every_message_field_number_type_and_label_is_tritons() -> None:
    theirs: dict[str, object] = {}
    for file in tritonclient():
        theirs |= everything(file)
    assert len(theirs) > 400
    assert everything(ours()) == {name: what for name, what in theirs.items() if not name.startswith(UNUSED)}


def test_every_rpc_in_use_has_its_types() -> None:
    service = next(service for file in tritonclient() for service in file.service)
    assert service.name == "GRPCInferenceService"
    assert len(service.method) == 20
    for method in service.method:
        if method.name.startswith(UNUSED):
            continue
        assert f"{method.name}Request" in pb.DESCRIPTOR.message_types_by_name or method.name == "ModelStreamInfer"
        if method.name == "ModelStreamInfer":
            assert method.output_type.endswith(".ModelStreamInferResponse") and method.client_streaming
        else:
            assert method.output_type.endswith(f".{method.name}Response")
            assert f"{method.name}Response" in pb.DESCRIPTOR.message_types_by_name
            assert not method.client_streaming and not method.server_streaming


def test_what_is_committed_is_made_of_the_proto() -> None:
    folder = PROTO.parent
    made = protocol_compile.compile_proto(PROTO)
    assert made.keys() == {"protocol_pb2.py", "protocol_pb2.pyi"}
    # The stub differs between protoc versions, the descriptor does not.
    assert (folder / "protocol_pb2.py").read_text() == made["protocol_pb2.py"]
    assert (folder / "protocol_pb2.pyi").is_file()


def test_compiling_writes_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "protocol.proto"
    copy.write_text(PROTO.read_text())
    monkeypatch.setattr(protocol_compile, "PROTOS", (copy,))
    protocol_compile.main()
    assert (tmp_path / "protocol_pb2.py").read_text().startswith('"""Generated from protocol.proto')
    assert "class ModelConfig(" in (tmp_path / "protocol_pb2.pyi").read_text()


def test_a_broken_proto_is_named(tmp_path: Path) -> None:
    copy = tmp_path / "protocol.proto"
    copy.write_text("syntax = 'proto3'; message {")
    with pytest.raises(SystemExit, match="does not compile"):
        protocol_compile.compile_proto(copy)


@pytest.mark.parametrize("implementation", ["upb", "python"])
def test_it_lives_beside_another_inference_package_in_one_process(implementation: str) -> None:
    """tritonclient's descriptors are named `inference.*`; ours must cause neither a clash nor a warning."""
    program = """
import sys
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from shoal.kserve import protocol_pb2 as pb
file = FileDescriptorProto(name="grpc_service.proto", package="inference", syntax="proto3")
file.message_type.add(name="ModelInferRequest")
descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
request = pb.ModelInferRequest(model_name="a", inputs=[pb.ModelInferRequest.InferInputTensor(name="x", shape=[1])])
assert pb.ModelInferRequest.FromString(request.SerializeToString()) == request
assert pb.DataType.Name(pb.TYPE_BF16) == "TYPE_BF16" and pb.ModelInstanceGroup.KIND_CPU == 2
"""
    subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        check=True,
        timeout=50,
        env={"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation},
    )
