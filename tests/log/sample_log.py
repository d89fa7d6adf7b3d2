"""A small log with everything: two tables, a new column, a message, a key change, compactions, a trim, a new epoch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from cdc.log.disk_format import CommitInfo
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.position import Position
from cdc.table import TableSchema
from pipelines.compaction.compaction_steps import compact
from tests.log.rows import IDENTITY, message_row, row, schema_of, table

SEGMENT_PER_FILE = SegmentLimits(size=1, age=3600.0)
"""Every data file gets a segment of its own."""
ORDERS, ITEMS = 16384, 16390
RESTORED = Position.of(50, 1)
"""Of the copy that the second epoch begins with."""


def schema_version(relation: int, *columns: str) -> TableSchema:
    """A version of one of the two tables."""
    return replace(schema_of(relation, *columns), name={ORDERS: "orders", ITEMS: "items"}[relation])


def schema_row(position: int, ordinal: int, schema: TableSchema) -> dict[str, Any]:
    """A schema row."""
    control = {"op": "s", "key": None, "after": None, "relation": schema.relation, "topic": schema.topic}
    return row(position, ordinal, **control, payload=schema.to_json())


def item_row(position: int, ordinal: int, **fields: Any) -> dict[str, Any]:
    """An insert into the other table."""
    return row(position, ordinal, relation=ITEMS, topic="shop.items", **fields)


def copy_end(position: int, ordinal: int, **fields: Any) -> dict[str, Any]:
    """The row that ends a full copy."""
    return row(position, ordinal, op="g", key=None, after=None, payload=str(int(position)).encode(), **fields)


def commit_rows(writer: LogWriter, *rows: dict[str, Any], last: int | None = None) -> None:
    """One commit, which counts its rows."""
    end = rows[-1]["position"] if last is None else last
    commit = CommitInfo(
        last=Position(end), committed_at=end, timeline=1, rows=len(rows), transactions=1, system_id=IDENTITY.system_id
    )
    writer.commit(writer.stage(table(*rows)) if rows else [], commit)


def build_sample_log(root: Path) -> LogWriter:
    """Write the log under root, and return its writer."""
    writer = LogWriter.open(root, IDENTITY, SEGMENT_PER_FILE)
    commit_rows(
        writer,
        schema_row(100, 0, schema_version(ORDERS, "name")),
        *(row(100, n, op="r") for n in (1, 2, 3)),
        schema_row(100, 4, schema_version(ITEMS, "name")),
        *(item_row(100, n, op="r") for n in (5, 6)),
        copy_end(100, 7),
        copy_end(100, 8, relation=ITEMS, topic="shop.items"),
    )
    commit_rows(writer, row(110, 0), item_row(110, 1), message_row(110, 2), row(110, 3), row(115, 0), item_row(115, 1))
    commit_rows(writer, last=117)
    commit_rows(
        writer, row(120, 0, op="d", before=[(1, "0")], after=None), row(120, 1, op="u", key=["9"], old_key=["0"])
    )
    compact(None, root, upto=Position(115), everything=True)
    writer.trim([0, 1, 2], Position(115))
    commit_rows(
        writer,
        schema_row(130, 0, schema_version(ORDERS, "name", "note")),
        row(130, 1, after=[(1, "1"), (2, "x"), (3, "y")]),
    )
    # the rows of a chunk that was read for one sink, between rows of the transaction of its watermark
    chunk = [item_row(140, n, op="r", address="lake") for n in (1, 2, 3)]
    commit_rows(writer, row(140, 0), *chunk, row(140, 4, op="u", partial=True, after=[(1, "4")]))
    compact(None, root, upto=Position(120), everything=True)
    copied = [
        schema_row(RESTORED, 0, schema_version(ORDERS, "name", "note")),
        row(RESTORED, 1, op="r"),
        copy_end(RESTORED, 2),
    ]
    commit_rows(writer, *copied)
    commit_rows(writer, row(RESTORED + 10, 0), item_row(RESTORED + 10, 1, op="d", before=[(1, "1")], after=None))
    return writer
