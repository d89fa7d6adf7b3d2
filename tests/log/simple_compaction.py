"""A compaction for tests: the last row of every key and all schema rows, nothing clever and nothing fast."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from cdc.bucket_files import Root
from cdc.log.compacted_table import CompactedWriter, WrittenFile
from cdc.log.disk_format import delta_statistics
from cdc.log.reader import LogReader, read_file
from cdc.log.table_io import write_parquet
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from tests.log.rows import table

Row = dict[str, Any]


def open_compactor(root: Root) -> CompactedWriter:
    """The compactor of the log under root."""
    log = LogReader(root)
    return CompactedWriter.open(root, log.identity, log.log_id)


def last_rows(rows: list[Row]) -> list[Row]:
    """The last row of every key, and every schema row, in order."""
    ordered = sorted(rows, key=lambda row: (row["position"], row["ordinal"]))
    kept = {(row["relation"], tuple(row["key"])): row for row in ordered if row["key"] is not None}
    schemas = {(row["position"], row["ordinal"]): row for row in ordered if row["op"] == "s"}
    return [*schemas.values(), *kept.values()]


def write_run_files(folder: Root, rows: list[Row]) -> list[WrittenFile]:
    """Rows as files of a run, schema rows in one of their own."""
    parts = ([row for row in rows if row["op"] == "s"], [row for row in rows if row["op"] != "s"])
    return [_file(folder / f"{number}.parquet", table(*part)) for number, part in enumerate(parts) if part]


def compact(
    root: Root, upto: int, *, writer: CompactedWriter | None = None, merge: bool = False, floor: int = 0
) -> CompactedWriter:
    """Move the horizon to upto; merge: into one run, without the deletes at or below the floor."""
    writer = writer or open_compactor(root)
    rows = read_range(LogReader(root), writer.horizon, Position(upto))
    if merge:
        rows += [row for run in writer.runs for file in run.files for row in read_rows(file)]
    kept = [row for row in last_rows(rows) if not (row["op"] == "d" and row["position"] <= floor)]
    _, folder = writer.new_run()
    writer.commit(
        write_run_files(folder, kept),
        horizon=Position(upto),
        floor=Position(max(floor, writer.floor)),
        replaces=[run.number for run in writer.runs] if merge else (),
    )
    return writer


def read_range(log: LogReader, after: Position, upto: Position) -> list[Row]:
    """The rows of (after, upto]."""
    return [row for batch in log.rows(after, upto) for row in batch.to_pylist()]


def read_rows(file: Any) -> list[Row]:
    """All rows of a file."""
    rows: list[Row] = read_file(file, Position(0), Position((1 << 63) - 1)).to_pylist()
    return rows


def latest_state(rows: list[Row], before: dict[Any, Any] | None = None) -> dict[Any, Any]:
    """(relation, key) → (position, image) of what is there once rows came over a state."""
    state = dict(before or {})
    for row in sorted(rows, key=lambda row: (row["position"], row["ordinal"])):
        if row["key"] is not None:
            place = row["relation"], tuple(row["key"])
            state.pop(place, None)
            if row["op"] != "d":
                state[place] = row["position"], row["after"]
    return state


def _file(path: Root, rows: pa.Table) -> WrittenFile:
    size = write_parquet(rows.cast(LOG_SCHEMA), path)
    return WrittenFile(f"{path.parent.name}/{path.name}", rows.num_rows, size, delta_statistics(rows))
