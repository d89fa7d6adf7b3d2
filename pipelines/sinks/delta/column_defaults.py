"""Column defaults: the default of a new column as a SQL expression for delta-rs, for rows older than the column."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pyarrow as pa

from cdc.array_literal import parse_array
from cdc.errors import ValueNotRepresentable
from cdc.table import Column
from cdc.target_names import column_name
from pipelines.sinks.delta.target_columns import RowShape
from pipelines.types import Policy, family_of

_SPELLING: Final = {
    pa.bool_(): "Boolean",
    pa.binary(): "Binary",
    pa.int16(): "Int16",
    pa.int32(): "Int32",
    pa.int64(): "Int64",
    pa.float32(): "Float32",
    pa.float64(): "Float64",
    pa.date32(): "Date32",
    pa.string(): "Utf8",
    pa.timestamp("us"): "Timestamp(Microsecond, None)",
    pa.timestamp("us", tz="UTC"): 'Timestamp(Microsecond, Some("UTC"))',
}


def new_defaults(shape: RowShape, known: Iterable[Column]) -> dict[str, str]:
    """Return Delta column → SQL expression of its default, for the new columns of a table that have a default.

    known: the columns that the target already has.
    """
    ids = {column.id for column in known}
    return {
        column_name(column.name): default_expression(column, shape.default_of(column) or "", shape.policy)
        for column in shape.schema.sent
        if column.missing is not None and column.id not in ids
    }


def default_expression(column: Column, text: str, policy: Policy) -> str:
    """Return the default `text` of a new column as a SQL expression of the column's Delta type.

    Raises ValueNotRepresentable if the type cannot represent the default.
    """
    family = family_of(column, policy)
    try:
        family.convert(pa.array([text], pa.string()))
    except pa.ArrowInvalid:
        pass
    else:
        return default_literal(text, family.arrow)
    # raised outside of the handler, because Arrow's message contains the value
    raise ValueNotRepresentable(
        f"the default of column {column.name!r} of type {column.type_name!r} cannot be represented as {family.arrow!s}"
    )


def default_literal(text: str, arrow: pa.DataType) -> str:
    """Return a SQL expression with exactly the type `arrow` for a value that Postgres printed as `text`."""
    if pa.types.is_list(arrow):
        inner = [_literal(element, arrow.value_type) for element in parse_array(text)]
        return f"arrow_cast(make_array({', '.join(inner)}), 'List({_spelling(arrow.value_type)})')"
    if pa.types.is_boolean(arrow):
        return "true" if text == "t" else "false"
    if pa.types.is_binary(arrow):
        digits = _quoted(text.removeprefix("\\x"))
        return f"arrow_cast(decode({digits}, 'hex'), 'Binary')"
    return f"arrow_cast({_quoted(text)}, '{_spelling(arrow)}')"


def _literal(text: str | None, arrow: pa.DataType) -> str:
    return "NULL" if text is None else default_literal(text, arrow)


def _spelling(arrow: pa.DataType) -> str:
    if pa.types.is_decimal(arrow):
        return f"Decimal128({arrow.precision}, {arrow.scale})"
    return _SPELLING[arrow]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
