"""How Debezium's Postgres connector represents the values of a column: schema, conversion and placeholders.

`column_encoding` chooses by the column's type, as `PostgresValueConverter` of Debezium 3.6 does. A type that Debezium
does not know is omitted there, unless `include.unknown.datatypes` is set. Here such a column is sent as the text that
Postgres prints, because no change may be lost; `is_known` is False then.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import md5
from typing import Final
from uuid import UUID

import pyarrow as pa

from cdc.array_literal import BOX_ARRAY_OID, ELEMENT_BY_OID, TEXT_ELEMENT_BY_OID
from cdc.config.deliveries import DebeziumSettings
from cdc.delivery.formats import json_values, temporal_values
from cdc.delivery.formats.connect_schema import ConnectSchema, logical, optional, scalar
from cdc.delivery.formats.json_values import Convert
from cdc.json_arrays import quote, quoted
from cdc.table import Column

UNAVAILABLE: Final = "__debezium_unavailable_value"
"""Placeholder of an unsent value (`unavailable.value.placeholder`)."""
_UNAVAILABLE_TEXT: Final = quote(UNAVAILABLE)
_UNAVAILABLE_BYTES: Final = quote(b64encode(UNAVAILABLE.encode()).decode())
_UNAVAILABLE_NUMBERS: Final = f"[{','.join(str(byte) for byte in UNAVAILABLE.encode())}]"
_UNAVAILABLE_UUID: Final = quote(str(UUID(bytes=md5(UNAVAILABLE.encode(), usedforsecurity=False).digest(), version=3)))
_VARBIT_LENGTH: Final = (1 << 31) - 1
"""Length of a bit string type without a declared length, as the JDBC driver reports it."""
_HEADER: Final = 4
"""VARHDRSZ of Postgres, which is added to the type modifier of a numeric."""
_MILLIS: Final = range(4)
"""Numbers of digits of the second's fraction that milliseconds represent."""
_MONEY_SCALE: Final = 2
"""`money.fraction.digits`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnEncoding:
    """Representation of the values of one column."""

    schema: ConnectSchema
    convert: Convert
    """Texts to JSON values; null for null, and for a text that cannot be represented."""
    fallback: str
    """JSON value of a NOT NULL column that was not sent in `before`."""
    unavailable: str | None = None
    """JSON value of an unsent column in `after`; None if the type has no such value."""
    is_known: bool = True
    """False for a type that Debezium omits."""


def column_encoding(column: Column, settings: DebeziumSettings) -> ColumnEncoding:
    """Return the representation of a column; its schema is optional and has a default as the column has them."""
    encoding = _typed(column, settings)
    schema = replace(encoding.schema, optional=not column.not_null)
    return replace(encoding, schema=replace(schema, default=_default(column, encoding)))


def is_array(column: Column) -> bool:
    """Return whether the values of a column are arrays of one dimension with commas between the elements."""
    oid = column.value_type[0]
    return (column.type_name.endswith("[]") or oid in _ARRAYS) and oid != BOX_ARRAY_OID


def _typed(column: Column, settings: DebeziumSettings) -> ColumnEncoding:
    oid, typmod = column.value_type
    if is_array(column):
        return _array(column, settings)
    if column.labels:
        return _text(logical("string", "io.debezium.data.Enum", allowed=",".join(column.labels)))
    if (build := _BY_OID.get(oid)) is not None:
        return build(typmod, settings)
    return _extension_type(column.type_name, settings)


def _text(schema: ConnectSchema, fallback: str = '""') -> ColumnEncoding:
    return ColumnEncoding(schema=schema, convert=quoted, fallback=fallback, unavailable=_UNAVAILABLE_TEXT)


def _fixed(schema: ConnectSchema, convert: Convert, fallback: str) -> ColumnEncoding:
    """Return the encoding of a type whose values are never stored out of line, so they are never unsent."""
    return ColumnEncoding(schema=schema, convert=convert, fallback=fallback)


def _constant(encoding: ColumnEncoding) -> Callable[[int, DebeziumSettings], ColumnEncoding]:
    return lambda _typmod, _settings: encoding


def _named_text(name: str, fallback: str = '""') -> Callable[[int, DebeziumSettings], ColumnEncoding]:
    return _constant(_text(logical("string", name), fallback))


def _numeric(typmod: int, settings: DebeziumSettings) -> ColumnEncoding:
    declared = _precision_and_scale(typmod)
    places = max(declared[1], 0) if declared else 0
    zero = f"0.{'0' * places}" if places else "0"
    if settings.decimal == "double":
        return _fixed(scalar("double"), json_values.numeric_floats, "0.0")
    if settings.decimal == "string":
        return ColumnEncoding(
            schema=scalar("string"),
            convert=json_values.numeric_texts,
            fallback=quote(zero),
            unavailable=_UNAVAILABLE_TEXT,
        )
    if declared is None:
        return _fixed(
            ConnectSchema(
                type="struct",
                name="io.debezium.data.VariableScaleDecimal",
                version=1,
                doc="Variable scaled decimal",
                fields=(("scale", scalar("int32")), ("value", scalar("bytes"))),
            ),
            json_values.variable_decimals,
            '{"scale":0,"value":"AA=="}',
        )
    precision, scale = declared
    return _fixed(_decimal_schema(scale, precision), json_values.decimals(precision, scale), '"AA=="')


def _decimal_schema(scale: int, precision: int | None = None) -> ConnectSchema:
    schema = logical("bytes", "org.apache.kafka.connect.data.Decimal", scale=str(scale))
    if precision is None:
        return schema
    return replace(schema, parameters=(*schema.parameters, ("connect.decimal.precision", str(precision))))


def _precision_and_scale(typmod: int) -> tuple[int, int] | None:
    """Return (precision, scale) of a numeric with this modifier; None if it declares no precision."""
    if typmod < _HEADER:
        return None
    scale = (typmod - _HEADER) & 0x7FF
    return (typmod - _HEADER) >> 16 & 0xFFFF, scale - 0x800 if scale & 0x400 else scale


def _money(_typmod: int, settings: DebeziumSettings) -> ColumnEncoding:
    if settings.decimal == "double":
        return _fixed(scalar("double"), json_values.money_floats, "0.0")
    if settings.decimal == "string":
        return _fixed(scalar("string"), json_values.money(None), '"0.00"')
    return _fixed(_decimal_schema(_MONEY_SCALE), json_values.money(_MONEY_SCALE), '"AA=="')


def _date(_typmod: int, settings: DebeziumSettings) -> ColumnEncoding:
    if settings.time == "isostring":
        return _fixed(logical("string", "io.debezium.time.IsoDate"), temporal_values.iso_dates, '"1970-01-01Z"')
    name = "org.apache.kafka.connect.data.Date" if settings.time == "connect" else "io.debezium.time.Date"
    return _fixed(logical("int32", name), temporal_values.epoch_days, "0")


def _time(typmod: int, settings: DebeziumSettings) -> ColumnEncoding:
    if settings.time == "isostring":
        return _fixed(logical("string", "io.debezium.time.IsoTime"), temporal_values.iso_times, '"00:00:00Z"')
    if settings.time == "connect":
        return _fixed(logical("int32", "org.apache.kafka.connect.data.Time"), temporal_values.millis_of_day, "0")
    if settings.time == "adaptive" and typmod in _MILLIS:
        return _fixed(logical("int32", "io.debezium.time.Time"), temporal_values.millis_of_day, "0")
    return _fixed(logical("int64", "io.debezium.time.MicroTime"), temporal_values.micros_of_day, "0")


def _timestamp(typmod: int, settings: DebeziumSettings) -> ColumnEncoding:
    if settings.time == "isostring":
        schema = logical("string", "io.debezium.time.IsoTimestamp")
        return _fixed(schema, temporal_values.iso_timestamps, '"1970-01-01T00:00:00Z"')
    if settings.time == "connect":
        schema = logical("int64", "org.apache.kafka.connect.data.Timestamp")
        return _fixed(schema, temporal_values.epoch_millis, "0")
    if typmod in _MILLIS:
        return _fixed(logical("int64", "io.debezium.time.Timestamp"), temporal_values.epoch_millis, "0")
    return _fixed(logical("int64", "io.debezium.time.MicroTimestamp"), temporal_values.epoch_micros, "0")


def _zoned_timestamp(typmod: int, _settings: DebeziumSettings) -> ColumnEncoding:
    convert = temporal_values.zoned_timestamps(typmod if typmod >= 0 else 6)
    return _fixed(logical("string", "io.debezium.time.ZonedTimestamp"), convert, '"1970-01-01T00:00:00Z"')


def _interval(_typmod: int, settings: DebeziumSettings) -> ColumnEncoding:
    if settings.interval == "string":
        schema = logical("string", "io.debezium.time.Interval")
        return _fixed(schema, temporal_values.iso_intervals, '"P0Y0M0DT0H0M0S"')
    return _fixed(logical("int64", "io.debezium.time.MicroDuration"), temporal_values.interval_micros, "0")


def _bytea(_typmod: int, settings: DebeziumSettings) -> ColumnEncoding:
    is_bytes = settings.bytes == "bytes"
    return ColumnEncoding(
        schema=scalar("bytes" if is_bytes else "string"),
        convert=json_values.encoded_bytes(settings.bytes),
        fallback='""',
        unavailable=_UNAVAILABLE_BYTES if is_bytes else _UNAVAILABLE_TEXT,
    )


def _bit(typmod: int, _settings: DebeziumSettings) -> ColumnEncoding:
    if typmod == 1:
        return _fixed(scalar("boolean"), json_values.single_bits, "false")
    length = typmod if typmod > 0 else _VARBIT_LENGTH
    return ColumnEncoding(
        schema=logical("bytes", "io.debezium.data.Bits", length=str(length)),
        convert=json_values.bits,
        fallback='""',
        unavailable=_UNAVAILABLE_BYTES,
    )


_POINT: Final = _fixed(
    ConnectSchema(
        type="struct",
        name="io.debezium.data.geometry.Point",
        version=1,
        doc="Geometry (POINT)",
        fields=(
            ("x", scalar("double")),
            ("y", scalar("double")),
            ("wkb", optional("bytes")),
            ("srid", optional("int32")),
        ),
    ),
    json_values.points,
    '{"x":0.0,"y":0.0,"wkb":"AQEAAAAAAAAAAAAAAAAAAAAAAAAA","srid":null}',
)

_INTEGER = {kind: _fixed(scalar(kind), json_values.integers, "0") for kind in ("int16", "int32", "int64")}
_FLOAT = {kind: _fixed(scalar(kind), json_values.floats, "0.0") for kind in ("float", "double")}
_STRING: Final = _text(scalar("string"))
_JSON: Final = _named_text("io.debezium.data.Json")
_ZONED_TIME: Final = _fixed(logical("string", "io.debezium.time.ZonedTime"), temporal_values.zoned_times, '"00:00:00Z"')
_STRING_OIDS: Final = (18, 19, 25, 1042, 1043, 869, 650, 829, 774, 3904, 3906, 3908, 3910, 3912, 3926)
""""char", name, text, char(n), varchar, inet, cidr, macaddr, macaddr8 and the ranges (pg_type.dat)."""
_BY_OID: Final[Mapping[int, Callable[[int, DebeziumSettings], ColumnEncoding]]] = {
    **dict.fromkeys(_STRING_OIDS, _constant(_STRING)),
    16: _constant(_fixed(scalar("boolean"), json_values.booleans, "false")),
    17: _bytea,
    20: _constant(_INTEGER["int64"]),
    21: _constant(_INTEGER["int16"]),
    23: _constant(_INTEGER["int32"]),
    26: _constant(_INTEGER["int64"]),
    114: _JSON,
    142: _named_text("io.debezium.data.Xml"),
    600: _constant(_POINT),
    700: _constant(_FLOAT["float"]),
    701: _constant(_FLOAT["double"]),
    790: _money,
    1082: _date,
    1083: _time,
    1114: _timestamp,
    1184: _zoned_timestamp,
    1186: _interval,
    1266: _constant(_ZONED_TIME),
    1560: _bit,
    1562: _bit,
    1700: _numeric,
    2950: _named_text("io.debezium.data.Uuid"),
    3614: _named_text("io.debezium.data.Tsvector"),
    3802: _JSON,
}
"""Type OID (pg_type.dat) → builder of the encoding from type modifier and settings."""
_UNKNOWN: Final = replace(_STRING, is_known=False)


def _extension_type(type_name: str, settings: DebeziumSettings) -> ColumnEncoding:
    """Return the encoding of a type of an extension, whose OID differs between databases, or of an unknown type."""
    name = re.sub(r'.*\.|"', "", type_name)
    if name == "hstore":
        return _hstore(settings)
    return _EXTENSION_TYPES.get(name, _UNKNOWN)


def _hstore(settings: DebeziumSettings) -> ColumnEncoding:
    unavailable = f"{{{_UNAVAILABLE_TEXT}:{_UNAVAILABLE_TEXT}}}"
    if settings.hstore == "json":
        return ColumnEncoding(
            schema=logical("string", "io.debezium.data.Json"),
            convert=json_values.hstore_texts,
            fallback='"{}"',
            unavailable=quote(unavailable),
        )
    return ColumnEncoding(
        schema=ConnectSchema(type="map", keys=scalar("string"), items=optional("string")),
        convert=json_values.hstore_objects,
        fallback="{}",
        unavailable=unavailable,
    )


def _geometry(name: str) -> ColumnEncoding:
    return ColumnEncoding(
        schema=ConnectSchema(
            type="struct",
            name=f"io.debezium.data.geometry.{name}",
            version=1,
            doc=name,
            fields=(("wkb", scalar("bytes")), ("srid", optional("int32"))),
        ),
        convert=json_values.geometries,
        fallback='{"wkb":"AQcAAAAAAAAA","srid":null}',
        unavailable=f'{{"wkb":{_UNAVAILABLE_BYTES},"srid":null}}',
    )


def _vector(kind: str, name: str) -> ColumnEncoding:
    return ColumnEncoding(
        schema=ConnectSchema(type="array", name=name, version=1, items=scalar(kind)),
        convert=json_values.vectors,
        fallback="[]",
        unavailable=_UNAVAILABLE_NUMBERS,
    )


_EXTENSION_TYPES: Final = {
    "citext": _STRING,
    "isbn": _STRING,
    "ltree": _text(logical("string", "io.debezium.data.Ltree")),
    "geometry": _geometry("Geometry"),
    "geography": _geometry("Geography"),
    "vector": _vector("double", "io.debezium.data.DoubleVector"),
    "halfvec": _vector("float", "io.debezium.data.FloatVector"),
    "sparsevec": _fixed(
        ConnectSchema(
            type="struct",
            name="io.debezium.data.SparseDoubleVector",
            version=1,
            doc="Sparse double vector",
            fields=(
                ("dimensions", scalar("int16")),
                ("vector", ConnectSchema(type="map", keys=scalar("int16"), items=scalar("double"))),
            ),
        ),
        json_values.sparse_vectors,
        '{"dimensions":0,"vector":[]}',
    ),
}

_ARRAYS: Final[Mapping[int, int]] = {
    **ELEMENT_BY_OID,
    **TEXT_ELEMENT_BY_OID,
    199: 114, 3807: 3802, 1183: 1083, 1270: 1266, 1041: 869, 651: 650, 1040: 829, 775: 774,
    3905: 3904, 3907: 3906, 3909: 3908, 3911: 3910, 3913: 3912, 3927: 3926,
}  # fmt: skip
"""OID of an array type → OID of its element type, for the arrays that Debezium sends."""
_NUMBER_ELEMENTS: Final = frozenset({"int16", "int32", "int64", "float", "double"})


def _array(column: Column, settings: DebeziumSettings) -> ColumnEncoding:
    oid, typmod = column.value_type
    if (element_oid := _ARRAYS.get(oid)) is not None:
        element = _BY_OID[element_oid](typmod, settings)
    elif column.labels:
        element = _text(logical("string", "io.debezium.data.Enum", allowed=",".join(column.labels)))
    else:
        element = _extension_type(column.type_name.removesuffix("[]"), settings)
    return ColumnEncoding(
        schema=ConnectSchema(type="array", items=element.schema.as_optional()),
        convert=json_values.arrays(element.convert),
        fallback="[]",
        unavailable=_unavailable_array(element),
        is_known=element.is_known,
    )


def _unavailable_array(element: ColumnEncoding) -> str | None:
    """Return the placeholder of an array: the text as its element, or the bytes of the text as numbers."""
    if element.schema.name == "io.debezium.data.Uuid":
        return f"[{_UNAVAILABLE_UUID}]"
    if element.schema.type in _NUMBER_ELEMENTS:
        return _UNAVAILABLE_NUMBERS
    if element.schema.type == "string":
        return f"[{_UNAVAILABLE_TEXT}]"
    return None if element.unavailable is None else f"[{element.unavailable}]"


_LITERAL: Final = re.compile(r"'((?:[^']|'')*)'")
_CALL: Final = re.compile(r"\(?[A-Za-z0-9_.]+\(.*\)")
_UNEVALUATED: Final = frozenset({"current_timestamp", "current_time", "current_date", "localtime", "localtimestamp"})
_DEFAULT_OIDS: Final = frozenset(
    {16, 20, 21, 23, 25, 114, 142, 700, 701, 1042, 1043, 1082, 1083, 1114, 1184, 1186, 1700, 2950, 3802}
)
"""Types whose defaults Debezium puts into the schema."""
_EMPTY_DEFAULTS: Final = {114: '"{}"', 3802: '"{}"', 2950: '"00000000-0000-0000-0000-000000000000"'}


def _default(column: Column, encoding: ColumnEncoding) -> str | None:
    """Return the JSON value of a column's default, as far as Debezium propagates it.

    The default of a column that a function computes is the zero of its type.
    """
    oid = column.value_type[0]
    text = column.default
    if text is None or encoding.schema.type == "struct" or not (oid in _DEFAULT_OIDS or column.labels):
        return None
    if is_array(column) or column.generated or text.startswith("NULL::"):
        return None
    if _CALL.match(text) or text.lower() in _UNEVALUATED:
        return None if column.labels else _EMPTY_DEFAULTS.get(oid, encoding.fallback)
    literal = _LITERAL.match(text)
    if literal is None and "'" in text:
        return None
    value = literal[1].replace("''", "'") if literal else {"true": "t", "false": "f"}.get(text, text)
    converted = encoding.convert(pa.array([value], pa.string()))[0].as_py()
    return None if converted is None else str(converted)
