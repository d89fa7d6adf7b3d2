"""A small log that has lived: two tables, a new column, a message, compacted, trimmed, compacted again, a new epoch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from cdc.log.layout import CommitInfo
from cdc.log.segments import SegmentLimits
from cdc.log.writer import LogWriter
from cdc.position import Position
from cdc.table import TableSchema
from pipelines.compaction.compact import compact
from tests.log.rows import IDENTITY, row, schema_of, table

EACH_OF_ITS_OWN = SegmentLimits(size=1, age=3600.0)
"""Every file that is written closes its segment."""
ORDERS, ITEMS = 16384, 16390
RESTORED = Position.of(50, 1)
"""Of the copy that the second epoch begins with."""


def version(relation: int, *columns: str) -> TableSchema:
    """A version of one of the two tables."""
    return replace(schema_of(relation, *columns), name={ORDERS: "orders", ITEMS: "items"}[relation])


def said(position: int, ordinal: int, schema: TableSchema) -> dict[str, Any]:
    """A schema row."""
    control = {"op": "s", "key": None, "after": None, "relation": schema.relation, "topic": schema.topic}
    return row(position, ordinal, **control, payload=schema.to_json())


def item(position: int, ordinal: int, **fields: Any) -> dict[str, Any]:
    """An insert into the other table."""
    return row(position, ordinal, relation=ITEMS, topic="shop.items", **fields)


def ended(position: int, ordinal: int, **fields: Any) -> dict[str, Any]:
    """A generation that is complete."""
    return row(position, ordinal, op="g", key=None, after=None, payload=str(int(position)).encode(), **fields)


def add(writer: LogWriter, *rows: dict[str, Any], last: int | None = None) -> None:
    """One commit, which counts its rows."""
    end = rows[-1]["position"] if last is None else last
    told = CommitInfo(
        last=Position(end), committed_at=end, timeline=1, rows=len(rows), transactions=1, system_id=IDENTITY.system_id
    )
    writer.commit(writer.stage(table(*rows)) if rows else [], told)


def build(root: Path) -> LogWriter:
    """The log under root, and who may go on with it."""
    writer = LogWriter.open(root, IDENTITY, EACH_OF_ITS_OWN)
    add(
        writer,
        said(100, 0, version(ORDERS, "name")),
        *(row(100, n, op="r") for n in (1, 2, 3)),
        said(100, 4, version(ITEMS, "name")),
        *(item(100, n, op="r") for n in (5, 6)),
        ended(100, 7),
        ended(100, 8, relation=ITEMS, topic="shop.items"),
    )
    message = {"op": "m", "relation": None, "topic": "app", "key": None, "after": None, "payload": b"hello"}
    add(writer, row(110, 0), item(110, 1), row(110, 2, **message), row(110, 3), row(115, 0), item(115, 1))
    add(writer, last=117)
    add(writer, row(120, 0, op="d", before=[(1, "0")], after=None), row(120, 1, op="u", key=["9"], old_key=["0"]))
    compact(None, root, upto=Position(115), everything=True)
    writer.trim([0, 1, 2], Position(115))
    add(writer, said(130, 0, version(ORDERS, "name", "note")), row(130, 1, after=[(1, "1"), (2, "x"), (3, "y")]))
    # a chunk that was read beside the stream, for one sink, between rows of the transaction of its watermark
    chunk = [item(140, n, op="r", address="lake") for n in (1, 2, 3)]
    add(writer, row(140, 0), *chunk, row(140, 4, op="u", partial=True, after=[(1, "4")]))
    compact(None, root, upto=Position(120), everything=True)
    copied = [said(RESTORED, 0, version(ORDERS, "name", "note")), row(RESTORED, 1, op="r"), ended(RESTORED, 2)]
    add(writer, *copied)
    add(writer, row(RESTORED + 10, 0), item(RESTORED + 10, 1, op="d", before=[(1, "1")], after=None))
    return writer
