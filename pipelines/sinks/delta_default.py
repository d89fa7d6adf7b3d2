"""Defaults of new columns as SQL: what rows older than ADD COLUMN … DEFAULT hold, spelled for DataFusion."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

_SPELLING: Final = {
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


def default_literal(text: str, arrow: pa.DataType) -> str:
    """`Column.missing`, a text as Postgres prints it, as an expression of exactly the type `arrow`."""
    if pa.types.is_boolean(arrow):
        return "true" if text == "t" else "false"
    if pa.types.is_binary(arrow):
        digits = _quoted(text.removeprefix("\\x"))
        return f"arrow_cast(decode({digits}, 'hex'), 'Binary')"
    if pa.types.is_decimal(arrow):
        return f"arrow_cast({_quoted(text)}, 'Decimal128({arrow.precision}, {arrow.scale})')"
    return f"arrow_cast({_quoted(text)}, '{_SPELLING[arrow]}')"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
