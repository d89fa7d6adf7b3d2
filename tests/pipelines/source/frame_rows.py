"""Frames of a log and their rows, read in this process without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from cdc.log.writer import LogWriter, SegmentLimits
from cdc.position import Position
from cdc.table import TableSchema
from pipelines.source.options import SourceOptions
from pipelines.source.read_tasks import Frame, plan_tasks, read_task
from tests.log.rows import IDENTITY, info, row, table

EACH_OF_ITS_OWN = SegmentLimits(size=1, age=3600.0)
"""Every file closes its segment."""


def frame_of(root: Path, **options: str) -> Frame:
    """A frame with these options."""
    return Frame.of(SourceOptions.from_options({"path": str(root), **options}))


def frame_rows(frame: Frame, after: int | None = None, upto: int | None = None) -> pa.Table:
    """The rows of a frame, in any order, or those in (after, upto]."""
    log = frame.options.open_log()
    start = frame.options.start(log) if after is None else Position(after)
    end = frame.options.end(log) if upto is None else Position(upto)
    batches = [batch for part in plan_tasks(log, frame, start, end) for batch in read_task(part, frame)]
    return pa.Table.from_batches(batches) if batches else pa.table({})


def commit(root: Path, last: int, *rows: dict[str, Any], limits: SegmentLimits = EACH_OF_ITS_OWN) -> None:
    """Commit rows to the log; `last` is the last position of the commit."""
    writer = LogWriter.open(root, IDENTITY, limits)
    writer.commit(writer.stage(table(*rows)) if rows else [], info(last))


def schema_row(position: int, schema: TableSchema, ordinal: int = 0) -> dict[str, Any]:
    """A schema row."""
    return row(
        position,
        ordinal,
        op="s",
        relation=schema.relation,
        topic=schema.topic,
        payload=schema.to_json(),
        key=None,
        after=None,
    )
