"""New data files of a target: the options of their Parquet, and their statistics in the Delta log.

Statistics are the number of rows, and bounds and nulls of each column, as JSON.

By default pyarrow writes a dictionary for every column. A dictionary of values that rarely repeat, for instance of
keys, makes a file larger, and takes longer to write and to read. For a table of unique numbers and texts the times were
2.6 and 1.6 times as long. So such columns get no dictionary.

Texts of random characters, such as UUIDs and digests, hardly become smaller by compression, but take half of the time
to write a file. So they are not compressed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
from deltalake.transaction import AddAction

from cdc.delta_protocol.table_storage import storage_of

MAX_TEXT_BOUND: Final = 256
"""Maximum characters of a text bound; a longer lower bound is cut, a longer upper bound is left out."""
SAMPLE_ROWS: Final = 1 << 15
"""Number of rows from which the dictionaries of a large file are chosen; counting takes about 2 ms for a column."""
SMALL_SAMPLE_ROWS: Final = 1 << 10
"""Number of rows from which the dictionaries of the small file of a batch are chosen."""
FEW_ROWS: Final = 64
"""Number of rows up to which a file gets no dictionary, and its bounds are computed in Python.

For so few rows, a call of Arrow takes longer than the work that it does.
"""
COMPRESSION: Final = "snappy"
SAMPLED_BYTES: Final = 1 << 16
"""Maximum number of characters of a text column that are compressed to see whether this makes them smaller."""
SMALLER_BY: Final = 8
"""A text column is compressed if that saves at least 1/SMALLER_BY of the characters of the sample."""
REPEATED: Final = 2
"""Minimum average number of times that a value of the sample occurs, for a column with a dictionary."""
LONG: Final = 1024
"""Average bytes of a value above which a column gets no dictionary, because a dictionary has at most 1 MiB."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file that no commit has added to a table yet."""

    name: str
    """Path of the file relative to the table's directory."""
    size: int
    """Size of the file in bytes."""
    rows: int
    statistics: str
    partition: str = "{}"
    """Partition column → value as text or null, as a JSON object."""

    @property
    def partition_values(self) -> dict[str, str | None]:
        """Partition column → value as text, or None for NULL."""
        return dict(json.loads(self.partition))

    def add_action(self) -> AddAction:
        """Return the action that adds the file to a table."""
        values = self.partition_values
        return AddAction(self.name, self.size, values, int(time.time() * 1000), True, self.statistics)


@dataclass(frozen=True, slots=True)
class TargetFolder:
    """The directory of a target, and the columns for which executors return bounds. Executors get pickled instances."""

    path: str
    """A directory that every executor can write, or one in an object store to which its environment gives access."""
    statistics_columns: tuple[str, ...]
    """Columns whose bounds are returned."""
    partition_columns: tuple[str, ...] = ()
    """Columns whose values are in the Delta log instead of the files."""

    @property
    def file_system(self) -> pafs.FileSystem:
        """A file system whose root is the directory, for pyarrow."""
        return storage_of(self.path).file_system


def parquet_options(schema: pa.Schema, sample: pa.Table | pa.RecordBatch) -> dict[str, Any]:
    """Return the arguments of `pq.ParquetWriter` for a file with this schema. sample: some rows of the file."""
    repeating = [] if sample.num_rows <= FEW_ROWS else [field for field in schema if _repeats(field, sample)]
    return {
        "compression": COMPRESSION if sample.num_rows <= FEW_ROWS else _compression(schema, sample),
        "write_statistics": [field.name for field in schema if _has_bounds(field.type)],
        "use_dictionary": [path for field in repeating for path in _leaves(field, field.name)],
    }


def _has_bounds(kind: pa.DataType) -> bool:
    # Parquet bounds ignore NaN, but Spark sorts NaN above all values, so with bounds it would skip rows
    return not pa.types.is_floating(kind)


def _compression(schema: pa.Schema, sample: pa.Table | pa.RecordBatch) -> dict[str, str]:
    """Return the compression of every Parquet column."""
    chosen = {field.name: COMPRESSION if _becomes_smaller(field, sample) else "none" for field in schema}
    return {path: chosen[field.name] for field in schema for path in _leaves(field, field.name)}


def _becomes_smaller(field: pa.Field, sample: pa.Table | pa.RecordBatch) -> bool:
    """Return whether compression pays for a column; true for other types than text and bytes."""
    if field.name not in sample.schema.names or not _has_characters(field.type):
        return True
    values = sample.column(field.name)
    whole = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if not _has_characters(whole.type) or not len(whole):
        return True
    texts = whole.cast(pa.large_binary())
    _, offsets, content = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    characters = memoryview(content or b"")[int(ends[0]) : int(ends[-1])][:SAMPLED_BYTES]
    saved = len(characters) - pa.compress(characters, COMPRESSION).size
    return saved * SMALLER_BY >= len(characters) or not characters


def _has_characters(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _repeats(field: pa.Field, sample: pa.Table | pa.RecordBatch) -> bool:
    """Return whether a dictionary pays for a column. It does for nested values, whose parts are not counted here."""
    if pa.types.is_nested(field.type) or field.name not in sample.schema.names:
        return True
    values = sample.column(field.name)
    if pa.types.is_null(values.type) or pa.types.is_dictionary(values.type):  # Arrow cannot count their values
        return True
    if values.nbytes > LONG * len(values):
        return False
    return bool(pc.count_distinct(values, mode="only_valid").as_py() * REPEATED <= len(values) - values.null_count)


def _leaves(field: pa.Field, path: str) -> Iterator[str]:
    """Yield the paths of the Parquet columns in which the values of a column are."""
    kind = field.type
    if pa.types.is_struct(kind):
        for child in kind:
            yield from _leaves(child, f"{path}.{child.name}")
    elif pa.types.is_map(kind):
        yield from _leaves(kind.key_field, f"{path}.key_value.key")
        yield from _leaves(kind.item_field, f"{path}.key_value.value")
    elif pa.types.is_nested(kind):
        yield from _leaves(kind.value_field, f"{path}.list.element")
    else:
        yield path


class FileStatistics:
    """Computes the statistics of a data file whose rows are added in parts."""

    def __init__(self, columns: Sequence[str]) -> None:
        """columns: the columns that get statistics; those that the rows do not have are left out."""
        self.rows = 0
        self._columns = columns
        self._nulls: dict[str, int] = {}
        self._bounds: dict[str, list[pa.Array]] = {}
        """Column → for each part, an array of its least and its greatest value."""

    def add(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Add rows of the file to the statistics; every call needs rows with the same columns."""
        self.rows += rows.num_rows
        for name in self._columns:
            if name not in rows.schema.names:
                continue
            column = rows.column(name)
            self._nulls[name] = self._nulls.get(name, 0) + column.null_count
            if column.null_count < len(column) and delta_bounds(pa.nulls(0, column.type)) is not None:
                self._bounds.setdefault(name, []).append(_min_and_max(column))

    def to_json(self) -> str:
        """Return the statistics as a Delta log contains them."""
        least: dict[str, Any] = {}
        greatest: dict[str, Any] = {}
        for name, bounds in self._bounds.items():
            both = bounds[0] if len(bounds) == 1 else _min_and_max(pa.concat_arrays(bounds))
            low, high = delta_bounds(both) or (None, None)
            if low is not None:
                least[name] = low[:MAX_TEXT_BOUND] if isinstance(low, str) else low
            if high is not None and not (isinstance(high, str) and len(high) > MAX_TEXT_BOUND):
                greatest[name] = high
        found = {"numRecords": self.rows, "minValues": least, "maxValues": greatest, "nullCount": self._nulls}
        return json.dumps(found, ensure_ascii=False)


def _min_and_max(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    if len(values) <= FEW_ROWS and (pa.types.is_integer(values.type) or pa.types.is_string(values.type)):
        known = [value for value in values.to_pylist() if value is not None]
        return pa.array([min(known), max(known)], values.type)
    return pa.array(pc.min_max(values).values(), values.type)


def statistics(rows: pa.Table, columns: Sequence[str]) -> str:
    """Return the statistics of a file with these rows as JSON; columns that `rows` does not have are left out."""
    found = FileStatistics(columns)
    found.add(rows)
    return found.to_json()


def with_all_columns(rows: pa.Table, columns: pa.Schema) -> pa.Table:
    """Return the rows with all columns of a table, in its order; a column that `rows` does not have is null."""
    values = [
        rows[field.name].cast(field.type) if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
        for field in columns
    ]
    return pa.table(values, schema=columns)


def delta_bounds(values: pa.ChunkedArray | pa.Array) -> list[Any] | None:
    """Convert least or greatest values of a column to the form that Delta statistics contain.

    A single value becomes None if Delta cannot express it. Returns None if JSON cannot express the type exactly.
    """
    kind = values.type
    if pa.types.is_integer(kind) or pa.types.is_string(kind):
        whole: list[Any] = values.to_pylist()
        return whole
    if pa.types.is_date(kind):
        return [None if day is None or day.startswith("-") else day for day in values.cast(pa.string()).to_pylist()]
    if pa.types.is_timestamp(kind):
        # statistics of Delta are in milliseconds, rounded down, also for upper bounds; readers expect that
        texts = pc.floor_temporal(values, unit="millisecond").cast(pa.timestamp("ms", tz=kind.tz)).cast(pa.string())
        return [None if text is None or text.startswith("-") else text.replace(" ", "T") for text in texts.to_pylist()]
    return None
