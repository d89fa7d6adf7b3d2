"""Integrity check of a Parquet file of the log: it reads every page, and describes each unreadable row group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdc.bucket_files import BucketPath, Root, as_root
from cdc.errors import LogCorrupt
from cdc.log.disk_format import LogFile
from cdc.log.table_io import can_read_in_threads, parquet_file
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position

_BROKEN: Final = (OSError, pa.ArrowException, MemoryError, UnicodeDecodeError)
"""Exceptions that pyarrow raises for a damaged file.

MemoryError is among them because a damaged length field can request any amount of memory.
"""
_NAMED: Final = 5
"""Maximum number of tables that a message names; further tables are only counted."""
_I32: Final = 0x15
"""Header byte in Thrift's compact protocol for a 32-bit integer field whose id follows the previous field id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadablePart:
    """A row group of a file, or the whole file, that cannot be read."""

    message: str
    first: Position | None = None
    """Least position of the unreadable rows; None if the positions cannot be read either."""
    last: Position | None = None
    """Greatest position of the unreadable rows; None if the positions cannot be read either."""
    relations: frozenset[int] | None = None
    """Relations of the unreadable rows; None if the relations cannot be read either."""


@dataclass(frozen=True, slots=True)
class FileCheck:
    """Result of the integrity check of one file."""

    unread: tuple[UnreadablePart, ...]
    """The unreadable row groups, or one entry for the whole file; empty for an undamaged file."""
    has_checksums: bool = True
    """True if the pages of the file have checksums, so that the check finds every flipped byte."""


def read(
    place: Root, consume: Callable[[pa.Table], None], columns: Sequence[str] | None = None, size: int | None = None
) -> FileCheck:
    """Read a log file, pass the rows of each readable row group to `consume`, and return the unreadable row groups.

    The row groups are read in the order of the file. The rows have all columns of LOG_SCHEMA, or only those named in
    `columns`. Pass `size`, the size of the file in bytes, if it is known. Raises FileNotFoundError if the file does not
    exist.
    """
    names = list(columns or LOG_SCHEMA.names)
    schema = pa.schema([LOG_SCHEMA.field(name) for name in names])
    try:
        source = open_for_random_access(place, size)
        parquet = parquet_file(source)
        fits = parquet.schema_arrow.names == LOG_SCHEMA.names
    except FileNotFoundError:
        raise
    except _BROKEN as exc:
        return FileCheck((UnreadablePart(message=f"the footer of the file cannot be read: {_reason(exc)}"),))
    if not fits:
        return FileCheck(
            (
                UnreadablePart(
                    message=f"the file has the columns {', '.join(parquet.schema_arrow.names)}, not those of the log"
                ),
            )
        )
    unread, threads = list[UnreadablePart](), can_read_in_threads(source)
    for number in range(parquet.num_row_groups):
        try:
            rows = parquet.read_row_group(number, columns=names, use_threads=threads).select(names).cast(schema)
        except _BROKEN as exc:
            unread.append(_describe_row_group(parquet, number, _reason(exc)))
        else:
            if any(rows[field.name].null_count for field in schema if not field.nullable):
                unread.append(_describe_row_group(parquet, number, "required values are missing"))
            else:
                consume(rows)
    return FileCheck(tuple(unread), _has_checksums(source, parquet.metadata))


def open_for_random_access(place: Root, size: int | None = None) -> Any:
    """Open the file for random access.

    Raises FileNotFoundError for a missing file. If `size` is given for a file in an object store, only the first read
    raises this error.
    """
    return place.reader(size) if isinstance(place, BucketPath) else pa.OSFile(str(place))


def unreadable_file_error(file: LogFile) -> LogCorrupt:
    """Return the error for a damaged log file; the message names the file, its positions and its tables."""
    content = f"positions {file.first!s} to {file.last!s}{tables_suffix(_topics(file))}"
    return LogCorrupt(f"log file {file.path!r} cannot be read; affected: {content}")


def _topics(file: LogFile) -> list[str]:
    """Return the topics that the column `topic` of a file contains.

    If this column cannot be read, return `relation N` for the least and the greatest relation number in the commit.
    """
    try:
        topics = parquet_file(open_for_random_access(as_root(file.path, file.options)))
        return sorted(topics.read(columns=["topic"], use_threads=False)["topic"].unique().drop_null().to_pylist())
    except _BROKEN:
        return [] if file.relations is None else [f"relation {number}" for number in sorted(set(file.relations))]


def _describe_row_group(parquet: pq.ParquetFile, number: int, reason: str) -> UnreadablePart:
    """Describe an unreadable row group: its damaged columns, and its positions and relations if they can be read."""
    readable = {name: rows for name in LOG_SCHEMA.names if (rows := _column(parquet, number, name)) is not None}
    broken = [name for name in LOG_SCHEMA.names if name not in readable]
    message = f"columns {', '.join(broken)} of row group {number} cannot be read: {reason}"
    first = last = None
    if "position" in readable:
        least, greatest = (value.as_py() for value in pc.min_max(readable["position"]).values())
        first, last = Position(least), Position(greatest)
    found = readable["relation"].unique().drop_null().to_pylist() if "relation" in readable else None
    return UnreadablePart(
        message=message, first=first, last=last, relations=None if found is None else frozenset(found)
    )


def _column(parquet: pq.ParquetFile, number: int, name: str) -> pa.ChunkedArray | None:
    """Return the values of a column of one row group.

    Return None if the column cannot be read, or if rows or required values are missing.
    """
    try:
        found = parquet.read_row_group(number, columns=[name], use_threads=False)[name]
    except _BROKEN:
        return None
    is_complete = len(found) == parquet.metadata.row_group(number).num_rows
    return found if is_complete and (LOG_SCHEMA.field(name).nullable or not found.null_count) else None


def _has_checksums(source: Any, footer: pq.FileMetaData) -> bool:
    """Return True if the header of the file's first page contains a checksum.

    The header has the page type, two sizes, and then the checksum (`PageHeader` in parquet.thrift).
    """
    if not footer.num_row_groups:
        return True
    column = footer.row_group(0).column(0)
    source.seek(column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset)
    header = bytes(source.read(24))
    at = 0
    for _ in range(3):
        if header[at : at + 1] != bytes([_I32]):
            return False
        at += 1
        while header[at] & 0x80:
            at += 1
        at += 1
    return header[at] == _I32


def _reason(exc: BaseException) -> str:
    return (str(exc) or type(exc).__name__).splitlines()[0][:160]


def tables_suffix(tables: Collection[str]) -> str:
    """Return a text such as `; tables a, b and 3 more` for the end of a message; "" for no tables."""
    if not tables:
        return ""
    some = sorted(tables)
    more = f" and {len(some) - _NAMED:,} more" if len(some) > _NAMED else ""
    return f"; tables {', '.join(some[:_NAMED])}{more}"
