"""File statistics in a Delta log: number of rows, and bounds and nulls of each column, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

MAX_TEXT_BOUND: Final = 256
"""Maximum characters of a text bound; a longer lower bound is cut, a longer upper bound is left out."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file that no commit has added to a table yet."""

    name: str
    """Path of the file relative to the table's directory."""
    size: int
    """Size of the file in bytes."""
    rows: int
    statistics: str


@dataclass(frozen=True, slots=True)
class TargetFolder:
    """The directory of a target, and the columns for which executors return bounds. Executors get pickled instances."""

    path: str
    """A directory that every executor can write."""
    statistics_columns: tuple[str, ...]
    """Columns whose bounds are returned."""


def statistics(rows: pa.Table, columns: Sequence[str]) -> str:
    """Return the Delta statistics of a file with these rows as JSON; columns that `rows` does not have are left out."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for name in columns:
        if name not in rows.column_names:
            continue
        nulls[name] = rows[name].null_count
        low, high = _bounds(rows[name])
        if low is not None:
            least[name] = low[:MAX_TEXT_BOUND] if isinstance(low, str) else low
        if high is not None and not (isinstance(high, str) and len(high) > MAX_TEXT_BOUND):
            greatest[name] = high
    found = {"numRecords": rows.num_rows, "minValues": least, "maxValues": greatest, "nullCount": nulls}
    return json.dumps(found, ensure_ascii=False)


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


def _bounds(column: pa.ChunkedArray) -> tuple[Any, Any]:
    if delta_bounds(pa.nulls(0, column.type)) is None or column.null_count == len(column):
        return None, None
    found = pc.min_max(column)
    low, high = delta_bounds(pa.array([found["min"].as_py(), found["max"].as_py()], column.type)) or (None, None)
    return low, high
