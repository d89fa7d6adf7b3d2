"""One version of a target, from which the driver reads rows by the values of a column."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, RELATION_COLUMN
from pipelines.sinks.delta.target_layout import double_quoted

PLACE: Final = (POSITION_COLUMN, ORDINAL_COLUMN)
"""Columns that identify a row of a target with the latest state of its table."""
_LISTED: Final = 1_000
"""Maximum number of values that the condition of a scan lists; of more integers it has the range."""


class RowsNotReadable(Exception):
    """The driver cannot read rows of a target by the values of a column; Spark may be able to."""


class TableVersion:
    """One version of the target of one table that keeps the latest state of its rows."""

    def __init__(self, uri: str, version: int, relation: int) -> None:
        """relation: the table, for a target that several share. Raises RowsNotReadable for other targets."""
        try:
            self._table = DeltaTable(uri, version=version)
            self.columns = pa.schema(self._table.schema().to_arrow())
        except (DeltaError, OSError) as exc:
            raise RowsNotReadable(str(exc)) from exc
        if not {*PLACE} <= {*self.columns.names}:
            raise RowsNotReadable(f"{uri} keeps the history of its rows")
        self._relation = relation if RELATION_COLUMN in self.columns.names else None

    def rows(self, column: str, values: pa.ChunkedArray | pa.Array) -> pa.Table:
        """Return the rows whose value in a column is one of `values`; a null matches no row.

        Raises RowsNotReadable if the values cannot have the type of the column, or if a file is missing.
        """
        try:
            wanted = pc.unique(values.drop_null().cast(self.columns.field(column).type))
            own = None if self._relation is None else f"{double_quoted(RELATION_COLUMN)} = {int(self._relation)}"
            predicate = " AND ".join(one for one in (_condition(column, wanted), own) if one) or None
            found = [self.columns.empty_table()]
            for batch in pa.RecordBatchReader.from_stream(self._table.scan(predicate=predicate)) if len(wanted) else ():
                rows = pa.Table.from_batches([batch]).select(self.columns.names).cast(self.columns)
                found.append(rows.filter(pc.is_in(rows[column], wanted)))
        except (DeltaError, pa.ArrowException, OSError) as exc:
            raise RowsNotReadable(str(exc)) from exc
        return pa.concat_tables(found)


def _condition(column: str, values: pa.Array) -> str | None:
    """Return an SQL condition that is true for rows with one of the values, and perhaps for others."""
    kind, name = values.type, double_quoted(column)
    if not len(values):
        return None
    if pa.types.is_integer(kind):
        if len(values) <= _LISTED:
            return f"{name} IN ({', '.join(map(str, values.to_pylist()))})"
        bounds = pc.min_max(values).as_py()
        return f"{name} BETWEEN {bounds['min']} AND {bounds['max']}"
    if pa.types.is_string(kind) and len(values) <= _LISTED:
        texts = ("'" + text.replace("'", "''") + "'" for text in values.to_pylist())
        return f"{name} IN ({', '.join(texts)})"
    return None
