"""Columns of a view in the log: the rows that Spark computed get the types and texts of Postgres.

| Spark | Postgres |
|---|---|
| tinyint, smallint | smallint |
| int, bigint | integer, bigint |
| float, double | real, double precision |
| decimal(p,s) | numeric(p,s) |
| string, char, varchar, NULL | text |
| boolean, binary, date | boolean, bytea, date |
| timestamp, timestamp_ntz | timestamp with time zone, timestamp without time zone |
| struct, array, map with scalar keys | jsonb, as `jsonb_text` prints it |

Everything else is refused: intervals, times, variants, geometries, and maps whose keys are nested. So are values that
Postgres does not have: text with the character U+0000, bytes in a string that are not UTF-8, dates before 4714 BC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from cdc.errors import ValueNotRepresentable, ViewColumnRefused, ViewKeyNull
from cdc.json_arrays import MAX_STRING_BYTES
from cdc.log_row import LOG_SCHEMA
from cdc.table import Column, ReplicaIdentity, TableSchema, split_topic
from pipelines.types.families import NUMERIC_OID, declared_as
from pipelines.types.postgres_text import to_postgres_text
from pipelines.views.jsonb_text import is_nested, jsonb_text

_OID_MASK: Final = (1 << 32) - 1
_JSONB_OID: Final = 3802
_TYPE_NAMES: Final = {
    16: "boolean",
    17: "bytea",
    20: "bigint",
    21: "smallint",
    23: "integer",
    25: "text",
    700: "real",
    701: "double precision",
    1082: "date",
    1114: "timestamp without time zone",
    1184: "timestamp with time zone",
    NUMERIC_OID: "numeric",
    _JSONB_OID: "jsonb",
}
"""OID (pg_type.dat) → name of the type, as `format_type` prints it."""
_NORMAL: Final = {
    pa.int8(): pa.int16(),
    pa.null(): pa.string(),
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
}
"""Type of a result → the type of the same values for which `declared_as` has the Postgres type."""
_MARKED: Final = (b"variant", b"geometry", b"geography")
"""Keys of field metadata by which Spark marks the parts of values that Arrow has no type for."""
_IMAGE: Final = LOG_SCHEMA.field("after").type
_KEY: Final = LOG_SCHEMA.field("key").type
_MOST_ROWS: Final = 1 << 14
"""Number of rows that are converted at once: their texts fit into the processor's cache."""
_MOST_BYTES: Final = 1 << 24
"""Bytes of rows that are converted at once; as JSON they may be much larger."""
Build = Callable[[pa.Array, int], pa.Array]
"""Function that makes an array of one value per row of the texts of the rows, row by row, and the number of rows."""
_CORRECT: Final = "correct the SQL of the view, for example by a cast or a condition"


def view_schema(
    relation: int, topic: str, key: Sequence[str], fields: pa.Schema, earlier: Iterable[TableSchema] = ()
) -> TableSchema:
    """Return the version of a view's table that its result columns give.

    relation: the log's number of the view. topic: its `schema.table`. key: names of the key columns, in key order.
    earlier: the versions before this one, oldest first. A column has the id that a column of its name had in the latest
    of them; another column gets an unused id, from 1 by its place. Whether Spark knows that a column has no NULL
    depends on its plan, so only key columns are NOT NULL.

    Raises ViewColumnRefused for a column without a type for the log, for two columns of one name, and for a key column
    that the result does not have.
    """
    _check_names(topic, key, fields.names)
    versions = tuple(earlier)
    kept = {column.name: column.id for column in versions[-1].columns} if versions else {}
    unused = max((column.id for version in versions for column in version.columns), default=0) + 1
    columns = []
    for field in fields:
        type_name, oid, typmod = _postgres_type(topic, field)
        id_ = kept.get(field.name, unused)
        unused = max(unused, id_ + 1)
        place = key.index(field.name) if field.name in key else None
        columns.append(
            Column(
                id=id_,
                name=field.name,
                type_oid=oid,
                type_name=type_name,
                typmod=typmod,
                key=place,
                not_null=place is not None,
            )
        )
    schema, name = split_topic(topic)
    return TableSchema(
        relation=relation,
        oid=relation & _OID_MASK,
        schema=schema,
        name=name,
        replica_identity=ReplicaIdentity.FULL,
        columns=tuple(columns),
    )


def result_fields(topic: str, result: StructType) -> pa.Schema:
    """Return the fields of `result_rows` for `view_schema`, without computing the rows; result: `DataFrame.schema`.

    Raises ViewColumnRefused for a type that Spark does not convert to Arrow.
    """
    return pa.schema([_arrow_field(topic, field) for field in result])


def result_rows(frame: DataFrame) -> pa.Table:
    """Compute a result, as `DataFrame.toArrow()` does.

    In Spark 4.2 that fails if a NULL struct has a field that is never NULL, as after an outer join: Arrow refuses NULL
    in the field. So every field becomes nullable first.
    """
    return frame.to(frame.schema.toNullable()).toArrow()


def view_images(rows: pa.Table, schema: TableSchema, limit: int = MAX_STRING_BYTES) -> pa.ChunkedArray:
    """Return the row image of each row, for the columns `before` and `after` of LOG_SCHEMA.

    rows: what `result_rows` returns, or Arrow batches of an executor; they have the columns of the schema. An image has
    every column, in their order. limit: bytes of the texts of one chunk, at most. Raises ValueNotRepresentable for a
    value that Postgres does not have, and for a row with more bytes than the limit.
    """
    columns = schema.columns
    ids = pa.array([column.id for column in columns], pa.int32())

    def images(texts: pa.Array, count: int) -> pa.Array:
        keys = ids.take(pa.array(np.tile(np.arange(len(ids)), count)))
        return pa.MapArray.from_arrays(_offsets(count, len(ids)), keys, texts, type=_IMAGE)

    return _by_row(rows, schema, columns, images, limit)


def view_keys(rows: pa.Table, schema: TableSchema) -> pa.ChunkedArray:
    """Return the key of each row, for the columns `key` and `old_key` of LOG_SCHEMA; rows: as in `view_images`.

    Raises ValueNotRepresentable for a value that Postgres does not have, and ViewKeyNull.
    """
    columns = schema.key

    def keys(texts: pa.Array, count: int) -> pa.Array:
        if texts.null_count:
            name = columns[texts.is_null().index(True).as_py() % len(columns)].name
            raise ViewKeyNull(f"view {schema.topic!r} has a row in which its key column {name!r} is NULL")
        return pa.ListArray.from_arrays(_offsets(count, len(columns)), texts, type=_KEY)

    return _by_row(rows, schema, columns, keys, MAX_STRING_BYTES)


def _offsets(count: int, width: int) -> pa.Array:
    return pa.array(np.arange(count + 1, dtype=np.int32) * width, pa.int32())


def _by_row(
    rows: pa.Table, schema: TableSchema, columns: Sequence[Column], build: Build, limit: int
) -> pa.ChunkedArray:
    size = max(1, rows.nbytes // max(1, rows.num_rows))
    batches = rows.select([column.name for column in columns]).to_batches(max(1, min(_MOST_ROWS, _MOST_BYTES // size)))
    built = []
    for batch in batches:
        texts = [_texts(values, schema, column) for values, column in zip(batch.columns, columns, strict=True)]
        built += [build(flat, len(flat) // len(columns)) for flat in _interleaved(texts, schema, limit)]
    return pa.chunked_array(built, build(pa.array([], pa.string()), 0).type)


def _interleaved(texts: Sequence[pa.Array], schema: TableSchema, limit: int) -> Iterator[pa.Array]:
    """Return the texts of columns row by row, in arrays of at most `limit` bytes."""
    count, width = len(texts[0]), len(texts)
    if sum(text.nbytes for text in texts) <= limit:
        # at index `row * width + column` is what was at index `column * count + row`
        places = np.arange(count * width).reshape(width, count).T.reshape(-1)
        yield pa.concat_arrays([text.cast(pa.string()) for text in texts]).take(pa.array(places))
    elif count > 1:
        yield from _interleaved([text.slice(0, count // 2) for text in texts], schema, limit)
        yield from _interleaved([text.slice(count // 2) for text in texts], schema, limit)
    else:
        raise ValueNotRepresentable(f"view {schema.topic!r} has a row with more than {limit} bytes", remedy=_CORRECT)


def _texts(values: pa.Array, schema: TableSchema, column: Column) -> pa.Array:
    try:
        return jsonb_text(values) if is_nested(values.type) else to_postgres_text(values)
    except pa.ArrowInvalid:
        pass  # raised outside of the handler, because Arrow's message may contain the value
    raise ValueNotRepresentable(
        f"column {column.name!r} of view {schema.topic!r}: a value cannot be represented as {column.type_name!r}",
        remedy=_CORRECT,
    )


def _check_names(topic: str, key: Sequence[str], names: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        if name.casefold() in seen:
            raise ViewColumnRefused(
                f"the result of view {topic!r} has the columns {seen[name.casefold()]!r} and {name!r}, "
                "whose names do not differ, or differ only in case",
                remedy="give one of them another name with AS in the SQL of the view",
            )
        seen[name.casefold()] = name
    for name in key:
        if name not in names:
            raise ViewColumnRefused(
                f"the result of view {topic!r} has no column {name!r}, which its key names",
                remedy="name the key columns as the SQL of the view does",
            )


def _postgres_type(topic: str, field: pa.Field) -> tuple[str, int, int]:
    """Return name, OID and modifier of the Postgres type of a result column."""
    refused = next(_refused_types(field, field.name), None)
    if refused is not None:
        raise _refusal(topic, *refused)
    kind = field.type
    if is_nested(kind):
        oid, typmod = _JSONB_OID, -1
    else:
        oid, typmod = declared_as(_NORMAL.get(kind, kind))
    return _TYPE_NAMES[oid], oid, typmod


def _refusal(topic: str, place: str, type_name: str) -> ViewColumnRefused:
    return ViewColumnRefused(
        f"column {place!r} of view {topic!r} has the type {type_name!r}, for which the log has no type of Postgres"
    )


def _arrow_field(topic: str, field: StructField) -> pa.Field:
    result = StructType([field])
    try:
        (arrow,) = to_arrow_schema(result, error_on_duplicated_field_names_in_struct=True, timezone="UTC")
    except (PySparkException, ValueError) as error:
        raise _refusal(topic, field.name, field.dataType.simpleString()) from error
    return arrow


def _refused_types(field: pa.Field, place: str) -> Iterator[tuple[str, str]]:
    """Return place and type of what has no Postgres type: of the column, or of values inside of it."""
    kind = field.type
    if pa.types.is_struct(kind):
        yield from ((place, mark.decode()) for child in kind for mark in _MARKED if mark in (child.metadata or {}))
        for child in kind:
            yield from _refused_types(child, f"{place}.{child.name}")
    elif pa.types.is_list(kind):
        yield from _refused_types(kind.value_field, place)
    elif pa.types.is_map(kind):
        if is_nested(kind.key_type):
            yield place, f"map with keys of type {kind.key_type}"
        yield from _refused_types(kind.key_field, place)
        yield from _refused_types(kind.item_field, place)
    elif not _is_scalar(kind):
        yield place, "interval" if pa.types.is_duration(kind) else "time" if pa.types.is_time(kind) else str(kind)


def _is_scalar(kind: pa.DataType) -> bool:
    try:
        declared_as(_NORMAL.get(kind, kind))
    except KeyError:
        return False
    return not pa.types.is_decimal256(kind)
