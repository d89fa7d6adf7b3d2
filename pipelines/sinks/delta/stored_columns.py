"""Stored columns: how tasks of Spark read columns of a target from its data files, and convert them to others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from cdc.delta_protocol.table_storage import storage_of
from pipelines.sinks.delta.damage_errors import reading_files
from pipelines.sinks.delta.indexed.plain_schema import plain_schema
from pipelines.sinks.delta.schema_evolution import FilledColumn, evolved_batch, read_plan


@dataclass(frozen=True, slots=True)
class StoredColumns:
    """The columns of a target, and how those of other rows are made from them. Executors receive pickled instances."""

    present: pa.Schema
    """The columns of the target."""
    columns: tuple[FilledColumn, ...]
    """How each column of the other rows is made."""

    @classmethod
    def of(cls, present: pa.Schema, wanted: pa.Schema) -> Self:
        """Return how the columns of `wanted` are made, which are found by their column ids."""
        return cls(present, read_plan(present, wanted))

    @property
    def schema(self) -> pa.Schema:
        """The columns of the other rows."""
        return pa.schema([column.field for column in self.columns])

    @property
    def names(self) -> dict[str, str]:
        """Column of the other rows → column of the target that has its values."""
        return {column.field.name: column.source for column in self.columns if column.source is not None}

    @property
    def read_columns(self) -> pa.Schema:
        """The columns of the target that are read, each once."""
        return pa.schema([self.present.field(name) for name in dict.fromkeys(self.names.values())])

    def only(self, names: Sequence[str]) -> Self:
        """Return the plan for some columns of the other rows, in this order."""
        column_of = {column.field.name: column for column in self.columns}
        return replace(self, columns=tuple(column_of[name] for name in names))

    def to_rows(self, batch: pa.RecordBatch) -> pa.Table:
        """Convert a batch with columns of the target to the other rows."""
        return pa.Table.from_batches([evolved_batch(batch, self.present, self.columns)])

    def rows_of_group(self, content: pq.ParquetFile, group: int) -> pa.Table:
        """Read the other rows of a row group of a data file, including deleted ones."""
        return self.to_rows(read_group(content, group, self.read_columns))


@contextmanager
def open_data_file(uri: str, path: str) -> Iterator[pq.ParquetFile]:
    """Open a data file of the target at `uri`. Raises TargetDamaged, also in the block, if it cannot be read."""
    with reading_files(uri), storage_of(uri).open(path) as opened:
        yield pq.ParquetFile(opened, coerce_int96_timestamp_unit="us")


def read_group(content: pq.ParquetFile, group: int, columns: pa.Schema) -> pa.RecordBatch:
    """Read columns of a row group, with these types; a column that the file does not have is null."""
    stored = content.schema_arrow.names
    rows = content.read_row_group(group, columns=[name for name in columns.names if name in stored])
    rows = rows.cast(plain_schema(rows.schema))
    count = content.metadata.row_group(group).num_rows
    arrays = [
        rows[field.name].combine_chunks().cast(field.type) if field.name in stored else pa.nulls(count, field.type)
        for field in columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def first_rows(content: pq.ParquetFile) -> Iterator[tuple[int, int]]:
    """Yield (number of a row group, number of its first row in the file)."""
    row = 0
    for group in range(content.metadata.num_row_groups):
        yield group, row
        row += content.metadata.row_group(group).num_rows
