"""Protobuf schemas of our own, wire- and text-compatible with Triton's.

After an edit of a .proto: `python -m shmserve.proto.compile` (needs grpcio-tools).
"""

from __future__ import annotations

import importlib
from pathlib import Path, PurePath
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

_POOL = descriptor_pool.DescriptorPool()


def load(path: Path) -> dict[str, Any]:
    """Return a schema's message classes, enums and enum values by name, and its `DESCRIPTOR`.

    Args:
        path: The file with the schema's serialized FileDescriptorProto.
    """
    serialized_file = path.read_bytes()
    file_description = descriptor_pb2.FileDescriptorProto.FromString(serialized_file)
    for imported_file in file_description.dependency:
        importlib.import_module(f"shmserve.proto.{PurePath(imported_file).stem}_pb2")
    _POOL.AddSerializedFile(serialized_file)
    file = _POOL.FindFileByName(file_description.name)
    names: dict[str, Any] = {"DESCRIPTOR": file}
    for message in file.message_types_by_name.values():
        names[message.name] = _message_class(message)
    for enum in file.enum_types_by_name.values():
        names[enum.name] = EnumTypeWrapper(enum)
        names.update({value.name: value.number for value in enum.values})
    return names


def _message_class(descriptor: Any) -> Any:
    message_class: Any = message_factory.GetMessageClass(descriptor)
    # protobuf's C runtime shows nested types as attributes by itself, its pure Python one does not.
    for nested_type in descriptor.nested_types:
        if not hasattr(message_class, nested_type.name):
            setattr(message_class, nested_type.name, _message_class(nested_type))
    for enum in descriptor.enum_types:
        if not hasattr(message_class, enum.name):
            setattr(message_class, enum.name, EnumTypeWrapper(enum))
    return message_class
