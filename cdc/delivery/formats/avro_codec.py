"""Avro: schema and content of values whose type is a schema of Kafka Connect.

Schemas are those that Confluent's Avro converter makes: a named type has the properties `connect.name`,
`connect.version` and `connect.parameters`, and decimals, dates and times of Connect have Avro's logical types. A
character that a name of Avro may not have becomes an underscore (`schema.name.adjustment.mode` = `avro`).
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable
from io import BytesIO
from typing import Any, ClassVar, Final

import pyarrow as pa
from fastavro import parse_schema, schemaless_writer

from cdc.delivery.formats.avro_columns import avro_columns
from cdc.delivery.formats.connect_schema import ConnectSchema

Convert = Callable[[Any], Any]
_TYPES: Final = {"int16": "int", "int32": "int", "int64": "long"}
"""Types whose names differ in Avro."""
_LOGICAL: Final = {
    "org.apache.kafka.connect.data.Date": "date",
    "org.apache.kafka.connect.data.Time": "time-millis",
    "org.apache.kafka.connect.data.Timestamp": "timestamp-millis",
}
_DECIMAL: Final = "org.apache.kafka.connect.data.Decimal"
_DEFAULT_PRECISION: Final = 64
_FEWEST: Final = 50
"""Number of values from which on the encoding of whole columns is faster."""
_BAD_CHARACTER: Final = re.compile(r"[^A-Za-z0-9_]")


class AvroCodec:
    """Writes values of one schema in Avro."""

    kind: ClassVar[str] = "AVRO"
    prefix: ClassVar[bytes] = b""

    def __init__(self, schema: ConnectSchema) -> None:
        self._schema = schema
        definition = _Definitions().type_of(schema)
        self.schema_text = json.dumps(definition, separators=(",", ":"), ensure_ascii=False)
        self._parsed = parse_schema(definition)
        self._convert = _converter(schema) or _unchanged

    def encode_all(self, texts: pa.StringArray, start: bytes) -> pa.Array | None:
        """Return `start` and the content of each JSON text, for many values at once; None if some need `encode`."""
        return avro_columns(texts, self._schema, start) if len(texts) >= _FEWEST else None

    def encode(self, value: Any) -> bytes:
        """Return a value, parsed from JSON, in Avro."""
        output = BytesIO()
        schemaless_writer(output, self._parsed, self._convert(value))
        return output.getvalue()


def avro_name(name: str) -> str:
    """Return a name without the characters that Avro does not allow."""
    changed = _BAD_CHARACTER.sub("_", name)
    return f"_{changed}" if changed[:1].isdigit() or not changed else changed


def field_names(schema: ConnectSchema) -> dict[str, str]:
    """Return name → name in Avro of the fields of a struct; different fields have different names."""
    names: dict[str, str] = {}
    for name, _ in schema.fields:
        changed = avro_name(name)
        while changed in names.values():
            changed += "_"
        names[name] = changed
    return names


def record_name(schema: ConnectSchema) -> str:
    """Return the full name of the record for a struct."""
    return ".".join(avro_name(part) for part in (schema.name or "Record").split("."))


class _Definitions:
    """Types of Avro; a record that was defined before is referred to by its name."""

    def __init__(self) -> None:
        self._defined: set[str] = set()

    def type_of(self, schema: ConnectSchema) -> Any:
        """Return the type of a value that is not null."""
        if schema.type == "struct":
            return self._record(schema)
        found = {"type": _TYPES.get(schema.type, schema.type), **_properties(schema)}
        if schema.type == "int16":
            found["connect.type"] = "int16"
        if schema.items is not None:
            return self._container(schema, found)
        return found["type"] if len(found) == 1 else found

    def _container(self, schema: ConnectSchema, found: dict[str, Any]) -> Any:
        items = schema.items
        if items is None or schema.keys is None:
            return {**found, "type": "array", "items": self._nullable(items or schema)}
        if schema.keys.type == "string":
            return {**found, "type": "map", "values": self._nullable(items)}
        entry = ConnectSchema(
            type="struct", name="io.confluent.connect.avro.MapEntry", fields=(("key", schema.keys), ("value", items))
        )
        return {**found, "type": "array", "items": self._record(entry)}

    def _record(self, schema: ConnectSchema) -> Any:
        full_name = record_name(schema)
        namespace, _, own_name = full_name.rpartition(".")
        if full_name in self._defined:
            return full_name
        self._defined.add(full_name)
        names = field_names(schema)
        fields = [self._field(names[name], field) for name, field in schema.fields]
        record = {"type": "record", "name": own_name, "namespace": namespace, "fields": fields}
        return {key: value for key, value in {**record, **_properties(schema)}.items() if value != ""}

    def _field(self, name: str, schema: ConnectSchema) -> dict[str, Any]:
        kind = self.type_of(schema)
        if schema.default is not None:
            value = json.loads(schema.default)
            if schema.type == "bytes":
                value = b64decode(value).decode("latin-1")
            return {"name": name, "type": [kind, "null"] if schema.optional else kind, "default": value}
        return (
            {"name": name, "type": ["null", kind], "default": None} if schema.optional else {"name": name, "type": kind}
        )

    def _nullable(self, schema: ConnectSchema) -> Any:
        kind = self.type_of(schema)
        return ["null", kind] if schema.optional else kind


def _properties(schema: ConnectSchema) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if schema.version is not None:
        found["connect.version"] = schema.version
    if schema.parameters:
        found["connect.parameters"] = dict(schema.parameters)
    if schema.name is not None:
        found["connect.name"] = schema.name
    if schema.name == _DECIMAL:
        parameters = dict(schema.parameters)
        precision = int(parameters.get("connect.decimal.precision", _DEFAULT_PRECISION))
        scale = int(parameters["scale"])
        if 0 <= scale <= precision:
            found |= {"logicalType": "decimal", "precision": precision, "scale": scale}
    elif schema.name in _LOGICAL:
        found["logicalType"] = _LOGICAL[schema.name]
    return found


def _unchanged(value: Any) -> Any:
    return value


def _converter(schema: ConnectSchema) -> Convert | None:
    """Return the conversion of a value of JSON to what fastavro writes; None if it is the same."""
    convert: Convert | None = None
    if schema.type == "bytes":
        convert = b64decode
    elif schema.type in {"float", "double"}:
        convert = float
    elif schema.type == "struct":
        convert = _struct_converter(schema)
    elif schema.items is not None:
        convert = _container_converter(schema, schema.items)
    if not schema.optional:
        return convert
    if schema.type == "struct":
        return _named(record_name(schema), convert or _unchanged)
    if convert is None:
        return None
    required = convert
    return lambda value: None if value is None else required(value)


def _named(name: str, convert: Convert) -> Convert:
    """Return the conversion of a record that may be null; with its name fastavro need not compare it with the type."""
    return lambda value: None if value is None else (name, convert(value))


def _struct_converter(schema: ConnectSchema) -> Convert | None:
    names = field_names(schema)
    changed = [(name, names[name], convert) for name, field in schema.fields if (convert := _converter(field))]
    is_renamed = any(old != new for old, new in names.items())
    if not changed and not is_renamed:
        return None

    def convert_struct(value: dict[str, Any]) -> dict[str, Any]:
        if is_renamed:
            value = {names[old]: one for old, one in value.items()}
        for _, name, convert in changed:
            value[name] = convert(value[name])
        return value

    return convert_struct


def _container_converter(schema: ConnectSchema, items: ConnectSchema) -> Convert | None:
    convert = _converter(items)
    if schema.keys is not None and schema.keys.type != "string":
        item = convert or _unchanged
        return lambda pairs: [{"key": key, "value": item(value)} for key, value in pairs]
    if convert is None:
        return None
    if schema.keys is not None:
        return lambda value: {key: convert(one) for key, one in value.items()}
    return lambda value: [convert(one) for one in value]
