"""A reader of .proto files, as far as the codec writes them: the text becomes a descriptor again."""

from __future__ import annotations

import re

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

_FIELD = re.compile(r"  (?:(repeated|optional) )?(\w+) (\w+) = (\d+);.*")


def parsed_proto(text: str) -> FileDescriptorProto:
    """The descriptor of a .proto file."""
    syntax, package, *lines = [line for line in text.splitlines() if line]
    assert syntax == 'syntax = "proto3";'
    file = FileDescriptorProto(name="parsed.proto", syntax="proto3", package=package.removeprefix("package ")[:-1])
    message = None
    for line in lines:
        if line.startswith("message "):
            message = file.message_type.add(name=line.removeprefix("message ").removesuffix(" {"))
        elif line != "}":
            found = _FIELD.fullmatch(line)
            assert found is not None, line
            assert message is not None
            label, kind, name, number = found.groups()
            field = message.field.add(name=name, number=int(number))
            field.label = (
                FieldDescriptorProto.LABEL_REPEATED if label == "repeated" else FieldDescriptorProto.LABEL_OPTIONAL
            )
            if hasattr(FieldDescriptorProto, f"TYPE_{kind.upper()}"):
                field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
            else:
                field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{file.package}.{kind}"
            if label == "optional":
                field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{name}")
    return file
