"""Export of a range of the log to Parquet files or JSON lines.

The output gets a temporary name and is renamed at the end, so an output file is always complete. An existing path is
never overwritten.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from cdc.errors import ConfigError, LogTrimmed
from cdc.log.disk_format import GROUP, PARQUET
from cdc.log.inspection import EVERY_ROW, RowSelection, rows_between
from cdc.log.reader import LogReader, read_file
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position

FILE_ROWS: Final = 1_000_000
"""Number of rows after which the export begins the next Parquet file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRange:
    """The changes to export: the selected rows in the range (after, upto]."""

    after: Position
    upto: Position
    selected: RowSelection = EVERY_ROW


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Number of rows, number of files and size of an export."""

    rows: int
    """Number of exported log rows, or number of lines in a file of JSON lines."""
    files: int
    size: int
    """Total size of the output in bytes."""


def export_range(
    log: LogReader, first: Position | None, last: Position | None, selected: RowSelection = EVERY_ROW
) -> ExportRange:
    """Return the range from `first` to `last`, both included.

    By default the range begins after the oldest position and ends at the durable position. Raises LogTrimmed if `first`
    is at or below the oldest position.
    """
    durable = log.durable or Position(0)
    after = log.oldest if first is None else Position(max(0, first - 1))
    if after < log.oldest:
        raise LogTrimmed(
            f"single changes up to {log.oldest!s} cannot be exported: they are trimmed, and only their compacted "
            "state is kept",
            remedy=f"write --from {Position(log.oldest + 1)!s} or later, or omit --from",
        )
    return ExportRange(after=after, upto=durable if last is None else min(last, durable), selected=selected)


def sorted_rows(log: LogReader, asked: ExportRange) -> Iterator[pa.Table]:
    """Yield the rows to export, sorted by position and ordinal, in tables of a few log files each."""
    return rows_between(log, asked.selected, asked.after, asked.upto)


def write_lines(messages: Iterable[object], out: Path) -> ExportResult:
    """Write each message as a line of JSON to the new file `out`. Raises ConfigError if `out` exists."""
    rows = 0
    with _draft(out) as draft, draft.open("w", encoding="utf-8") as sink:
        for message in messages:
            sink.write(json.dumps(message, ensure_ascii=False) + "\n")
            rows += 1
    return ExportResult(rows, 1, out.stat().st_size)


def write_parquet(log: LogReader, asked: ExportRange, out: Path, file_rows: int = FILE_ROWS) -> ExportResult:
    """Write the rows to export to Parquet files `00000.parquet`, `00001.parquet` … in the new directory `out`.

    Each file has about `file_rows` rows with the columns LOG_SCHEMA. The rows are not sorted by position: they come
    file by file from the log, and each file of the log is sorted by relation first. Raises ConfigError if `out` exists.
    """
    files = rows = 0
    with _draft(out) as draft:
        draft.mkdir()
        parts = (read_file(file, asked.after, asked.upto) for file in log.files(asked.after, asked.upto))
        chosen = (part for part in map(asked.selected.filter, parts) if part.num_rows)
        for several in _grouped(chosen, file_rows):
            with pq.ParquetWriter(draft / f"{files:05}.parquet", LOG_SCHEMA, **PARQUET) as sink:
                for part in several:
                    sink.write_table(part, row_group_size=GROUP)
                    rows += part.num_rows
            files += 1
    return ExportResult(rows, files, sum(file.stat().st_size for file in out.iterdir()))


def _grouped(parts: Iterator[pa.Table], limit: int) -> Iterator[Iterator[pa.Table]]:
    """Yield groups of tables; each group except the last has at least `limit` rows.

    The caller must read a group to its end before it takes the next group.
    """
    for first in parts:

        def group(first: pa.Table = first) -> Iterator[pa.Table]:
            rows = first.num_rows
            yield first
            while rows < limit and (part := next(parts, None)) is not None:
                rows += part.num_rows
                yield part

        yield group()


@contextmanager
def _draft(out: Path) -> Iterator[Path]:
    """Yield a temporary path in the directory of `out`. Rename it to `out` after the block, or remove it on failure."""
    if out.exists():
        raise ConfigError(
            f"the export cannot be written: {str(out)!r} already exists", remedy="name a path that does not exist yet"
        )
    if not out.parent.is_dir():
        raise ConfigError(
            f"the export cannot be written: directory {str(out.parent)!r} does not exist",
            remedy="create the directory, or name another path",
        )
    draft = out.with_name(f".{out.name}.{uuid.uuid4().hex}.part")
    try:
        yield draft
        draft.rename(out)
    finally:
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        draft.unlink(missing_ok=True)
