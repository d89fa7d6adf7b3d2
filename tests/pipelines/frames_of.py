"""Frames of a log without Spark: what its tasks would read, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from cdc.log.segments import SegmentLimits
from cdc.log.writer import LogWriter
from cdc.position import Position
from cdc.table import TableSchema
from pipelines.source.frames import Frame, planned, read
from pipelines.source.options import SourceOptions
from tests.log.rows import IDENTITY, info, row, table

EACH_OF_ITS_OWN = SegmentLimits(size=1, age=3600.0)
"""Every file closes its segment."""


def frame_of(root: Path, **options: str) -> Frame:
    """A frame with these options."""
    return Frame.of(SourceOptions.from_options({"path": str(root), **options}))


def found(frame: Frame, after: int | None = None, upto: int | None = None) -> pa.Table:
    """Its rows in no order; of a range, if one is given."""
    log = frame.selection.opened()
    start = frame.selection.start(log) if after is None else Position(after)
    end = frame.selection.end(log) if upto is None else Position(upto)
    batches = [batch for part in planned(log, frame, start, end) for batch in read(part, frame)]
    return pa.Table.from_batches(batches) if batches else pa.table({})


def commit(root: Path, last: int, *rows: dict[str, Any], limits: SegmentLimits = EACH_OF_ITS_OWN) -> None:
    """One commit that ends at last."""
    writer = LogWriter.open(root, IDENTITY, limits)
    writer.commit(writer.stage(table(*rows)) if rows else [], info(last))


def version(position: int, schema: TableSchema, ordinal: int = 0) -> dict[str, Any]:
    """An `s` row."""
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
