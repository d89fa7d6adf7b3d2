"""One version of a target, from which the driver reads rows by the values of a column."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, RELATION_COLUMN
from pipelines.sinks.delta.merge_source import rows_with_keys
from pipelines.sinks.delta.target_part import columns_of_part

PLACE: Final = (POSITION_COLUMN, ORDINAL_COLUMN)
"""Columns that identify a row of a target with the latest state of its table."""


class RowsNotReadable(Exception):
    """The driver cannot read rows of a target by the values of a column; Spark may be able to."""


class TableVersion:
    """One version of the target of one table that keeps the latest state of its rows."""

    def __init__(self, uri: str, version: int, relation: int) -> None:
        """relation: the table, for a target that several share. Raises RowsNotReadable for other targets."""
        try:
            self._table = DeltaTable(uri, version=version)
            columns = pa.schema(self._table.schema().to_arrow())
        except (DeltaError, OSError) as exc:
            raise RowsNotReadable(str(exc)) from exc
        if not {*PLACE} <= {*columns.names}:
            raise RowsNotReadable(f"{uri} keeps the history of its rows")
        self.version = version
        self.relation = relation if RELATION_COLUMN in columns.names else None
        """The table whose rows are read, if several share the target."""
        self.columns = columns_of_part(columns, self.relation)

    def row_count(self) -> int:
        """Return the number of rows in the data files, also of other tables and deleted ones.

        Raises RowsNotReadable if a file does not say it.
        """
        numbers = pa.table(self._table.get_add_actions(flatten=True))["num_records"]
        if numbers.null_count:
            raise RowsNotReadable("a data file has no statistics")
        return pc.sum(numbers, min_count=0).as_py()  # type: ignore[no-any-return]

    def rows(self, column: str, values: pa.ChunkedArray | pa.Array) -> pa.Table:
        """Return the rows whose value in a column is one of `values`; a null matches no row.

        Raises RowsNotReadable if the values cannot have the type of the column, or if a file is missing.
        """
        try:
            keys = pa.table({column: values.drop_null().cast(self.columns.field(column).type)})
            return rows_with_keys(self._table, keys, self.columns, relation=self.relation)
        except (DeltaError, pa.ArrowException, OSError) as exc:
            raise RowsNotReadable(str(exc)) from exc
