"""Creates the messages of a compiled .proto file with protobuf's public interface. Requires protobuf 5 or later."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper


def define_messages(data: bytes, names: dict[str, Any]) -> FileDescriptor:
    """Add a compiled file to the process, and its messages, enums and values of enums to `names`, a module's
    globals."""
    file: FileDescriptor = descriptor_pool.Default().AddSerializedFile(data)
    for enum in file.enum_types_by_name.values():
        names[enum.name] = EnumTypeWrapper(enum)
        names.update((value.name, value.number) for value in enum.values)
    for message in file.message_types_by_name.values():
        names[message.name] = _message_class(message)
    return file


def _message_class(descriptor: Descriptor) -> Any:
    made = message_factory.GetMessageClass(descriptor)
    for nested in descriptor.nested_types:  # protobuf's own Python implementation leaves them out
        if not hasattr(made, nested.name):
            setattr(made, nested.name, _message_class(nested))
    return made
