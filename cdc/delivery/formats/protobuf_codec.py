"""Protobuf: schema and content of values whose type is a schema of Kafka Connect.

A struct is a message, and a field that may be null is `optional`. The number of a row's field is the id of its column,
so that columns can be renamed, dropped and added. Logical types are the type below them: a Decimal is the bytes of its
unscaled value, and a comment has its parameters. Protobuf has neither null in a list nor a list that is null. So an
array is a message with `items`, and an element that may be null is a message with an optional `value`. A map is an
array of messages with `key` and `value`.
"""

from __future__ import annotations

import hashlib
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Final

import pyarrow as pa
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from cdc.delivery.formats.avro_codec import avro_name, field_names
from cdc.delivery.formats.connect_schema import ConnectSchema

Convert = Callable[[Any], Any]
_SCALARS: Final = {
    "boolean": ("bool", FieldDescriptorProto.TYPE_BOOL),
    "int16": ("int32", FieldDescriptorProto.TYPE_INT32),
    "int32": ("int32", FieldDescriptorProto.TYPE_INT32),
    "int64": ("int64", FieldDescriptorProto.TYPE_INT64),
    "float": ("float", FieldDescriptorProto.TYPE_FLOAT),
    "double": ("double", FieldDescriptorProto.TYPE_DOUBLE),
    "string": ("string", FieldDescriptorProto.TYPE_STRING),
    "bytes": ("bytes", FieldDescriptorProto.TYPE_BYTES),
}
"""Type of Connect → its name in a .proto file, and its code."""


class ProtobufCodec:
    """Writes values of one schema in Protobuf."""

    kind: ClassVar[str] = "PROTOBUF"
    #: The path of the message in its file: the first one.
    prefix: ClassVar[bytes] = b"\0"

    def __init__(self, schema: ConnectSchema) -> None:
        file = _ProtoFile(schema)
        self.schema_text = file.text()
        self._convert = file.converter
        pool = DescriptorPool()
        pool.Add(file.descriptor)
        self._message = GetMessageClass(pool.FindMessageTypeByName(file.root))

    def encode_all(self, texts: pa.StringArray, start: bytes) -> pa.Array | None:
        """Return None: every value needs `encode`."""
        del texts, start
        return None

    def encode(self, value: Any) -> bytes:
        """Return a value, parsed from JSON, in Protobuf; equal values have equal content."""
        return bytes(self._message(**self._convert(value)).SerializeToString(deterministic=True))


class _ProtoFile:
    """A .proto file with the message of a schema, as text and as descriptor."""

    def __init__(self, schema: ConnectSchema) -> None:
        *package, _ = [avro_name(part) for part in (schema.name or "cdc.Columns").split(".")]
        self.descriptor = FileDescriptorProto(syntax="proto3", package=".".join(package))
        self._messages: dict[ConnectSchema, tuple[str, Convert]] = {}
        self._comments: dict[tuple[str, str], str] = {}
        name, self.converter = self._message_of(schema)
        self.root = f"{self.descriptor.package}.{name}"
        self.descriptor.name = f"{hashlib.sha256(self.descriptor.SerializeToString()).hexdigest()}.proto"

    def text(self) -> str:
        """Return the content of the file."""
        messages = "\n".join(self._message_text(message) for message in self.descriptor.message_type)
        return f'syntax = "proto3";\npackage {self.descriptor.package};\n\n{messages}'

    def _message_text(self, message: DescriptorProto) -> str:
        lines = [f"message {message.name} {{"]
        for field in message.field:
            kind = field.type_name.rpartition(".")[2] or _names_by_code()[field.type]
            is_repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
            label = "repeated " if is_repeated else "optional " if field.proto3_optional else ""
            comment = self._comments.get((message.name, field.name), "")
            lines.append(f"  {label}{kind} {field.name} = {field.number};{comment and f' // {comment}'}")
        return "\n".join([*lines, "}\n"])

    def _message_of(self, schema: ConnectSchema) -> tuple[str, Convert]:
        """Return the name of the message for a struct, an array or a map, and the conversion of its values."""
        content = replace(schema, optional=False, number=None, default=None)
        found = self._messages.get(content)
        if found is None:
            found = self._messages[content] = self._defined(content)
        return found

    def _defined(self, schema: ConnectSchema) -> tuple[str, Convert]:
        items = schema.items
        if items is None:
            return self._struct(schema)
        if schema.keys is not None:
            return self._map(schema.keys, items)
        message = self._new_message(f"{_title(items)}Array")
        convert = self._element(message, items)
        return message.name, lambda values: {"items": [convert(value) for value in values]}

    def _struct(self, schema: ConnectSchema) -> tuple[str, Convert]:
        message = self._new_message(avro_name((schema.name or "Record").rpartition(".")[2]))
        names = field_names(schema)
        converters = []
        for place, (name, field) in enumerate(schema.fields, start=1):
            converters.append((name, names[name], self._add(message, names[name], field, field.number or place)))

        def convert(value: Any) -> Any:
            return {changed: one(value[name]) for name, changed, one in converters if value[name] is not None}

        return message.name, convert

    def _map(self, keys: ConnectSchema, items: ConnectSchema) -> tuple[str, Convert]:
        message, entry = self._new_message(f"{_title(items)}Map"), self._new_message(f"{_title(items)}Entry")
        key, value = self._add(entry, "key", keys, 1), self._add(entry, "value", items, 2)
        self._append(message, self._reference("items", 1, entry.name), is_repeated=True)

        def convert(pairs: Any) -> Any:
            found = pairs.items() if isinstance(pairs, dict) else pairs
            return {
                "items": [
                    {"key": key(name), "value": value(one)} if one is not None else {"key": key(name)}
                    for name, one in found
                ]
            }

        return message.name, convert

    def _element(self, message: DescriptorProto, items: ConnectSchema) -> Convert:
        """Add the field `items` to the message of an array, and return the conversion of an element."""
        if not items.optional and items.type in _SCALARS:
            field = FieldDescriptorProto(name="items", number=1, type=_SCALARS[items.type][1])
            self._append(message, field, is_repeated=True)
            return _scalar_converter(items)
        element = self._new_message(f"{_title(items)}Element")
        convert = self._add(element, "value", items, 1)
        self._append(message, self._reference("items", 1, element.name), is_repeated=True)
        return lambda value: {} if value is None else {"value": convert(value)}

    def _add(self, message: DescriptorProto, name: str, schema: ConnectSchema, number: int) -> Convert:
        """Add a field to a message, and return the conversion of its values."""
        if schema.parameters or schema.name:
            details = [schema.name or "", *(f"{key}={value}" for key, value in schema.parameters)]
            self._comments[message.name, name] = " ".join(details).replace("\n", " ")
        if schema.type in _SCALARS:
            field = FieldDescriptorProto(name=name, number=number, type=_SCALARS[schema.type][1])
            if schema.optional:
                field.proto3_optional = True
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{name}")
            self._append(message, field)
            return _scalar_converter(schema)
        kind, convert = self._message_of(schema)
        self._append(message, self._reference(name, number, kind))
        return convert

    def _new_message(self, name: str) -> DescriptorProto:
        taken = {message.name for message in self.descriptor.message_type}
        free, number = name, 1
        while free in taken:
            number += 1
            free = f"{name}{number}"
        return self.descriptor.message_type.add(name=free)

    def _reference(self, name: str, number: int, message: str) -> FieldDescriptorProto:
        """Return a field whose value is a message."""
        return FieldDescriptorProto(
            name=name,
            number=number,
            type=FieldDescriptorProto.TYPE_MESSAGE,
            type_name=f".{self.descriptor.package}.{message}",
        )

    def _append(self, message: DescriptorProto, field: FieldDescriptorProto, *, is_repeated: bool = False) -> None:
        field.label = FieldDescriptorProto.LABEL_REPEATED if is_repeated else FieldDescriptorProto.LABEL_OPTIONAL
        message.field.append(field)


def _names_by_code() -> dict[int, str]:
    return {code: name for name, code in _SCALARS.values()}


def _title(schema: ConnectSchema) -> str:
    name = avro_name((schema.name or schema.type).rpartition(".")[2])
    return f"{name[:1].upper()}{name[1:]}"


def _scalar_converter(schema: ConnectSchema) -> Convert:
    if schema.type == "bytes":
        return b64decode
    return float if schema.type in {"float", "double"} else _unchanged


def _unchanged(value: Any) -> Any:
    return value
