"""Options with which this project writes the Parquet files of targets: compression, bounds and dictionaries.

By default pyarrow writes a dictionary for every column. A dictionary of values that rarely repeat, for instance of
keys, makes a file larger, and takes longer to write and to read. For a table of unique numbers and texts the times were
2.6 and 1.6 times as long. So such columns get no dictionary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

SAMPLE_ROWS: Final = 1 << 15
"""Number of rows from which the dictionaries of a large file are chosen; counting takes about 2 ms for a column."""
SMALL_SAMPLE_ROWS: Final = 1 << 10
"""Number of rows from which the dictionaries of the small file of a batch are chosen."""
REPEATED: Final = 2
"""Minimum average number of times that a value of the sample occurs, for a column with a dictionary."""
LONG: Final = 1024
"""Average bytes of a value above which a column gets no dictionary, because a dictionary has at most 1 MiB."""


def parquet_options(schema: pa.Schema, sample: pa.Table | pa.RecordBatch) -> dict[str, Any]:
    """Return the arguments of `pq.ParquetWriter` for a file with this schema. sample: some rows of the file."""
    return {
        "compression": "snappy",
        "write_statistics": [field.name for field in schema if _has_bounds(field.type)],
        "use_dictionary": [path for field in schema if _repeats(field, sample) for path in _leaves(field, field.name)],
    }


def _has_bounds(kind: pa.DataType) -> bool:
    # Parquet bounds ignore NaN, but Spark sorts NaN above all values, so with bounds it would skip rows
    return not pa.types.is_floating(kind)


def _repeats(field: pa.Field, sample: pa.Table | pa.RecordBatch) -> bool:
    """Return whether a dictionary pays for a column. It does for nested values, whose parts are not counted here."""
    if pa.types.is_nested(field.type) or field.name not in sample.schema.names:
        return True
    values = sample.column(field.name)
    if pa.types.is_null(values.type):
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
