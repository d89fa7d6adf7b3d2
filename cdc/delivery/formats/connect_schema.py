"""Schemas of Kafka Connect: the type model of Debezium's events, and its text in JSON.

The order of the members is that of Kafka's `org.apache.kafka.connect.json.JsonConverter`. The schema of Avro is built
from the same model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

from cdc.json_arrays import quote

SCALARS: Final = frozenset({"boolean", "int16", "int32", "int64", "float", "double", "string", "bytes"})
"""Types without elements or fields, with the names that the JSON converter writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectSchema:
    """A schema of Kafka Connect."""

    type: str
    """One of SCALARS, or `array`, `map`, `struct`."""
    name: str | None = None
    """Name of a struct or of a logical type."""
    version: int | None = None
    doc: str | None = None
    parameters: tuple[tuple[str, str], ...] = ()
    optional: bool = False
    default: str | None = None
    """JSON value of the default; None if there is none."""
    keys: ConnectSchema | None = None
    """Schema of the keys of a map."""
    items: ConnectSchema | None = None
    """Schema of the elements of an array, or of the values of a map."""
    fields: tuple[tuple[str, ConnectSchema], ...] = ()
    """Fields of a struct: (name, schema) pairs."""
    number: int | None = None
    """Number of a field that has this schema, for Protobuf; None for the place of the field in its struct."""

    def as_optional(self) -> Self:
        """Return the same schema for a value that may be null."""
        return self if self.optional else replace(self, optional=True)

    def to_json(self, field: str | None = None) -> str:
        """Return the schema as the JSON converter writes it; field: name of the field that has this schema."""
        parts = [f'"type":{quote(self.type)}']
        if self.type == "struct":
            parts.append(f'"fields":[{",".join(schema.to_json(name) for name, schema in self.fields)}]')
        if self.keys is not None and self.items is not None:
            parts += [f'"keys":{self.keys.to_json()}', f'"values":{self.items.to_json()}']
        elif self.items is not None:
            parts.append(f'"items":{self.items.to_json()}')
        parts.append(f'"optional":{"true" if self.optional else "false"}')
        if self.name is not None:
            parts.append(f'"name":{quote(self.name)}')
        if self.version is not None:
            parts.append(f'"version":{self.version}')
        if self.doc is not None:
            parts.append(f'"doc":{quote(self.doc)}')
        if self.parameters:
            content = ",".join(f"{quote(name)}:{quote(value)}" for name, value in self.parameters)
            parts.append(f'"parameters":{{{content}}}')
        if self.default is not None:
            parts.append(f'"default":{self.default}')
        if field is not None:
            parts.append(f'"field":{quote(field)}')
        return f"{{{','.join(parts)}}}"


SchemaPair = tuple[ConnectSchema, ConnectSchema]
"""Schemas of key and value."""


def scalar(kind: str) -> ConnectSchema:
    """Return the schema of a type without a name."""
    return ConnectSchema(type=kind)


def logical(kind: str, name: str, **parameters: str) -> ConnectSchema:
    """Return the schema of a logical type of version 1."""
    return ConnectSchema(type=kind, name=name, version=1, parameters=tuple(parameters.items()))


def struct(name: str, fields: tuple[tuple[str, ConnectSchema], ...], version: int | None = None) -> ConnectSchema:
    """Return the schema of a struct."""
    return ConnectSchema(type="struct", name=name, version=version, fields=fields)


def optional(kind: str) -> ConnectSchema:
    """Return the schema of a type without a name whose value may be null."""
    return ConnectSchema(type=kind, optional=True)


_SNAPSHOT: Final = ConnectSchema(
    type="string",
    name="io.debezium.data.Enum",
    version=1,
    parameters=(("allowed", "true,first,first_in_data_collection,last_in_data_collection,last,false,incremental"),),
    optional=True,
    default='"false"',
)
SOURCE: Final = struct(
    "io.debezium.connector.postgresql.Source",
    (
        ("version", scalar("string")),
        ("connector", scalar("string")),
        ("name", scalar("string")),
        ("ts_ms", scalar("int64")),
        ("snapshot", _SNAPSHOT),
        ("db", scalar("string")),
        ("sequence", optional("string")),
        ("ts_us", optional("int64")),
        ("ts_ns", optional("int64")),
        ("schema", scalar("string")),
        ("table", scalar("string")),
        ("txId", optional("int64")),
        ("lsn", optional("int64")),
        ("xmin", optional("int64")),
        ("origin", optional("string")),
        ("origin_lsn", optional("int64")),
    ),
    version=1,
)
"""Schema of the block `source`, as Debezium's Postgres connector 3.6 has it."""
TRANSACTION: Final = struct(
    "event.block",
    (
        ("id", scalar("string")),
        ("total_order", scalar("int64")),
        ("data_collection_order", scalar("int64")),
    ),
    version=1,
).as_optional()
"""Schema of the block `transaction`."""


def key_schema(topic: str, fields: tuple[tuple[str, ConnectSchema], ...]) -> ConnectSchema:
    """Return the schema of the keys of a topic."""
    return struct(f"{topic}.Key", fields)


def row_schema(topic: str, fields: tuple[tuple[str, ConnectSchema], ...]) -> ConnectSchema:
    """Return the schema of the rows of a topic."""
    return struct(f"{topic}.Value", fields)


def envelope_schema(topic: str, row: ConnectSchema) -> ConnectSchema:
    """Return the schema of Debezium's envelope around rows."""
    return struct(
        f"{topic}.Envelope",
        (
            ("before", row.as_optional()),
            ("after", row.as_optional()),
            ("source", SOURCE),
            ("transaction", TRANSACTION),
            ("op", scalar("string")),
            ("ts_ms", optional("int64")),
            ("ts_us", optional("int64")),
            ("ts_ns", optional("int64")),
        ),
        version=2,
    )


MESSAGE_KEY: Final = struct("io.debezium.connector.postgresql.MessageKey", (("prefix", optional("string")),), version=1)
"""Schema of the key of a logical message."""


def message_schema(content: ConnectSchema) -> ConnectSchema:
    """Return the schema of the value of a logical message; content: schema of its content."""
    block = struct(
        "io.debezium.connector.postgresql.Message",
        (("prefix", optional("string")), ("content", content.as_optional())),
        version=1,
    )
    return struct(
        "io.debezium.connector.postgresql.MessageValue",
        (
            ("op", scalar("string")),
            ("ts_ms", optional("int64")),
            ("source", SOURCE),
            ("transaction", TRANSACTION),
            ("message", block),
        ),
        version=1,
    )
