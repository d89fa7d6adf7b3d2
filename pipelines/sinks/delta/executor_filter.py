"""The filter `where` of a rule for partial images that are on the executors, as `TablePlans.apply_filter` applies it.

Executors type the columns that the filter reads. Spark evaluates the filter. The images themselves stay Arrow streams:
the first row of each piece has the stream, and the other rows follow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa

from pipelines.folding.folded_parts import IMAGES, FoldedParts, piece_of_images
from pipelines.folding.key_parts import from_ipc, to_ipc
from pipelines.runtime.executor_code import forwarding_errors
from pipelines.sinks.delta.spark_target import spark_schema
from pipelines.sinks.delta.target_columns import OP, RowShape, as_deletes

_PART: Final = "_part"
_PIECE: Final = "_piece"


def filter_partial_images(parts: FoldedParts, shape: RowShape) -> FoldedParts:
    """Return the folded rows of a table, in which partial images that the filter rejects are deletes.

    A delete needs no base row. Partial images without all columns that the filter reads stay as they are.
    """
    expressions = shape.expressions
    if not parts.table.incomplete or expressions is None or expressions.where is None:
        return parts
    from pyspark.sql import functions as F

    def undecided(part: int, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        with forwarding_errors():
            images = shape.settled(rows)
            numbers, _ = shape.decidable_rows(images)
            left = np.setdiff1d(np.arange(images.num_rows), numbers)
            if len(left):
                yield piece_of_images(part, images.take(pa.array(left)))

    source = pa.schema([(_PART, pa.int32()), (_PIECE, pa.binary()), *_read_columns(shape), (OP, pa.string())])

    def decidable(part: int, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        with forwarding_errors():
            images = shape.settled(rows)
            numbers, typed = shape.decidable_rows(images)
            if not len(numbers):
                return
            stream = to_ipc(images.take(pa.array(numbers)))
            columns = {
                _PART: pa.repeat(pa.scalar(part, pa.int32()), len(numbers)),
                _PIECE: pa.array([stream, *[None] * (len(numbers) - 1)], pa.binary()),
                OP: pa.repeat(pa.scalar("u"), len(numbers)),
            }
            columns |= {name: typed[name] for name in expressions.decides}
            yield from pa.table([columns[name] for name in source.names], schema=source).combine_chunks().to_batches()

    decided = expressions.decide(parts.map_pieces(decidable, spark_schema(source)), [_PART, _PIECE])
    filtered = parts.map_pieces(undecided, IMAGES).unionByName(decided.mapInArrow(_pack, IMAGES))
    return replace(parts, pieces=filtered.withColumn("relation", F.lit(parts.table.relation)))


def _read_columns(shape: RowShape) -> list[pa.Field]:
    names = () if shape.expressions is None else shape.expressions.decides
    return [shape.image_columns.field(name) for name in names]


def _pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Convert rows (part, stream of the piece or null, `_op`) to pieces, whose images have these operations."""
    part, stream, ops = 0, b"", list[str]()
    for batch in batches:
        columns = (batch[name].to_pylist() for name in (_PART, _PIECE, OP))
        for row_part, piece, op in zip(*columns, strict=True):
            if piece is not None:
                yield from _with_ops(part, stream, ops)
                part, stream, ops = row_part, piece, []
            ops.append(op)
    yield from _with_ops(part, stream, ops)


def _with_ops(part: int, stream: bytes, ops: list[str]) -> Iterator[pa.RecordBatch]:
    if ops:
        yield piece_of_images(part, as_deletes(from_ipc(stream), np.flatnonzero(np.array(ops) == "d")))
