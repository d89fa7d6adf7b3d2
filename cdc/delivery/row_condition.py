"""The condition `when` of a rule: Spark SQL over `before`, `after` and `op`, which DuckDB evaluates over whole columns.

sqlglot translates the expression. A column has the DuckDB type that is nearest to its Postgres type; a column of any
other type is text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import sqlglot
from sqlglot import exp

from cdc.delivery.formats.table_changes import Image, TableChanges
from cdc.errors import EventNotEncodable, TransformFailed
from cdc.table import Column, ReplicaIdentity, TableSchema

_TYPES: Final = {
    16: "BOOLEAN",
    20: "BIGINT",
    21: "SMALLINT",
    23: "INTEGER",
    26: "BIGINT",
    700: "FLOAT",
    701: "DOUBLE",
    1082: "DATE",
    1083: "TIME",
    1114: "TIMESTAMP",
    1184: "TIMESTAMPTZ",
    2950: "UUID",
}
"""OID of a Postgres type → type of DuckDB with the same values."""
_NUMERIC: Final = 1700
_MOST_DIGITS: Final = 38
_OP: Final = "op"
_SIDES: Final = ("before", "after")


@dataclass(frozen=True, slots=True)
class Matches:
    """Result of a condition. A change that is in neither array does not match."""

    kept: np.ndarray
    """Numbers of the changes for which the condition is true, or unknown because a column was not sent."""
    failed: np.ndarray
    """Numbers of the changes with a value that the condition cannot read."""


class RowCondition:
    """A condition over the changes of one version of a table. Raises TransformFailed if it does not fit the table."""

    def __init__(self, text: str, schema: TableSchema) -> None:
        self._topic = schema.topic
        tree = sqlglot.parse_one(text, read="spark")
        columns = {self._column(one, schema) for one in tree.find_all(exp.Column)}
        self._columns = {name: found for name, found in sorted(columns) if found is not None}
        flat = tree.transform(
            lambda one: exp.column(self._name(one), quoted=True) if isinstance(one, exp.Column) else one
        )
        self._sql = flat.sql(dialect="duckdb")
        # one thread, no files, no network: the condition sees the given columns and nothing else
        options: dict[str, str | bool | int | float | list[str]] = {
            "threads": 1,
            "enable_external_access": False,
            "lock_configuration": True,
        }
        self._engine = duckdb.connect(config=options)

    def matches(self, changes: TableChanges) -> Matches:
        """Evaluate the condition."""
        texts: dict[str, pa.Array] = {_OP: changes.array("op")}
        is_unknown = np.zeros(changes.count, dtype=bool)
        for name, column in self._columns.items():
            image = _side(changes, name)
            texts[name] = image.columns[column.id].texts
            unsent = image.columns[column.id].unsent
            if unsent is not None:
                is_unknown |= unsent
        casts = [f'TRY_CAST("{name}" AS {_type(column)}) AS "{name}"' for name, column in self._columns.items()]
        given = self._engine.from_arrow(pa.table(texts))
        typed = given.project(", ".join([f'"{_OP}"', *casts])) if casts else given
        is_failed = np.zeros(changes.count, dtype=bool)
        found = typed.project(
            ", ".join([f"({self._sql}) AS matches", *(f'"{name}" IS NULL AS "{name}"' for name in self._columns)])
        )
        result = found.to_arrow_table()
        for name in self._columns:
            lost = pc.and_(result[name], pc.is_valid(pa.chunked_array([texts[name]])))
            is_failed |= lost.to_numpy()
        is_true = pc.fill_null(result["matches"], fill_value=False).to_numpy()
        return Matches(np.flatnonzero((is_true | is_unknown) & ~is_failed), np.flatnonzero(is_failed & ~is_unknown))

    def refusal(self) -> EventNotEncodable:
        """Return the error of changes with a value that the condition cannot read."""
        return EventNotEncodable(
            f"the condition of a delivery cannot read a value of table {self._topic!r}: a column that it names has a "
            "value that SQL types of the condition do not have",
            remedy="correct 'when' in the rule of the delivery, then run 'cdc dlq retry SINK'",
        )

    @staticmethod
    def _name(column: exp.Column) -> str:
        return f"{column.table}.{column.name}" if column.table else column.name

    def _column(self, found: exp.Column, schema: TableSchema) -> tuple[str, Column | None]:
        name = self._name(found)
        if name == _OP:
            return name, None
        column = schema.column(found.name)
        if found.table not in _SIDES or column is None or column.generated:
            raise TransformFailed(
                f"the condition of a delivery for table {self._topic!r} reads {name!r}: expected op, or a column of "
                "the table as before.NAME or after.NAME"
            )
        if found.table == "before" and schema.replica_identity is not ReplicaIdentity.FULL:
            raise TransformFailed(
                f"the condition of a delivery reads {name!r}, but table {self._topic!r} does not send old rows",
                remedy="run ALTER TABLE … REPLICA IDENTITY FULL at the source, or write a condition over 'after' alone",
            )
        return name, column


def _side(changes: TableChanges, name: str) -> Image:
    return changes.before if name.startswith("before.") else changes.after


def _type(column: Column) -> str:
    oid, typmod = column.value_type
    if oid != _NUMERIC:
        return _TYPES.get(oid, "VARCHAR")
    precision, scale = ((typmod - 4) >> 16) & 0xFFFF, (typmod - 4) & 0x7FF
    return (
        f"DECIMAL({precision}, {scale})"
        if typmod >= 0 and precision <= _MOST_DIGITS and scale <= precision
        else "DOUBLE"
    )
