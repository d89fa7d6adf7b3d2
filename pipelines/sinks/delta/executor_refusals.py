"""The rows of a large batch that its target refuses: executors find them, and the driver gets a limited number.

The driver needs these rows, because it parks them. If there are more than may be parked, the table stops, and the
driver gets one of them for the error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN
from pipelines.folding.folded_parts import IMAGES, collect_in_steps, piece_of_images
from pipelines.runtime.executor_code import forwarding_errors
from pipelines.sinks.contract import RefusedParts
from pipelines.sinks.delta.dead_letters import refused_rows
from pipelines.sinks.delta.executor_merge import ExecutorMerge, images_and_bases
from pipelines.sinks.delta.merge_source import BaseLookup, source_rows, split_partial
from pipelines.sinks.delta.spark_target import spark_schema
from pipelines.sinks.delta.target_columns import RowShape
from pipelines.types.failing_rows import failing_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ORDER: Final = pa.schema([(name, pa.int64()) for name in (POSITION_COLUMN, ORDINAL_COLUMN)])


def find_refused(merge: ExecutorMerge, limit: int) -> RefusedParts:
    """Return the folded rows that the target refuses.

    limit: maximum number of upserts that may be refused. If there are more, few of them come to the driver.
    """
    with merge.raising_errors():
        frame = _complete_rows(merge, limit)
        if _has_computed_texts(merge.shape):
            frame = frame.unionByName(_rows_with_computed_texts(merge, limit))
        if merge.parts.table.incomplete:
            frame = frame.unionByName(_partial_images(merge, limit))
        return RefusedParts(*collect_in_steps(frame, limit))


def _has_computed_texts(shape: RowShape) -> bool:
    return not {*shape.partition_texts} <= {*shape.image_columns.names}


def _refused(images: pa.Table, bases: BaseLookup, shape: RowShape, limit: int) -> pa.Table:
    def check(rows: pa.Table, shape: RowShape) -> None:
        if not _has_computed_texts(shape):
            shape.check_partitions(rows)

    errors = refused_rows(images, bases, shape, limit, check)
    return images.take(pa.array([error.row for error in errors], pa.int64()))


def _complete_rows(merge: ExecutorMerge, limit: int) -> DataFrame:
    shape = merge.shape

    def find(part: int, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        with forwarding_errors():
            complete, _ = split_partial(shape.settled(rows))
            if (chosen := _refused(complete, BaseLookup(None), shape, limit)).num_rows:
                yield piece_of_images(part, chosen)

    return merge.images.map_pieces(find, IMAGES)


def _partial_images(merge: ExecutorMerge, limit: int) -> DataFrame:
    shape, plan = merge.shape, merge.plan

    def find(pieces: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with forwarding_errors():
            for images, bases in images_and_bases(pieces, plan):
                if (chosen := _refused(images, bases, shape, limit)).num_rows:
                    yield piece_of_images(0, chosen)

    return merge.with_bases().mapInArrow(find, IMAGES)


def _rows_with_computed_texts(merge: ExecutorMerge, limit: int) -> DataFrame:
    """Return the folded rows with a computed text that cannot name the directory of a partition.

    At most one more than `limit` positions of such rows come to the driver.
    """
    shape = merge.shape

    def typed(_: int, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        with forwarding_errors():
            images = shape.settled(rows)
            failing = failing_rows(images, lambda part: source_rows(part, shape), images.num_rows)
            kept = np.delete(np.arange(images.num_rows), list(failing))
            yield from source_rows(images.take(pa.array(kept)), shape).to_batches()

    def find(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = pa.Table.from_batches([batch])
            failing = failing_rows(rows, shape.check_partitions, limit)
            yield from rows.select(_ORDER.names).take(pa.array(sorted(failing), pa.int64())).to_batches()

    source = merge.computed(merge.images.map_pieces(typed, spark_schema(shape.source)))
    refused = source.mapInArrow(find, spark_schema(_ORDER)).limit(limit + 1).collect()
    places = {(row[POSITION_COLUMN], row[ORDINAL_COLUMN]) for row in refused}

    def select(part: int, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        place_of_rows = zip(rows["position"].to_pylist(), rows["ordinal"].to_pylist(), strict=True)
        chosen = rows.filter(pa.array([place in places for place in place_of_rows], pa.bool_()))
        if chosen.num_rows:
            yield piece_of_images(part, chosen)

    return merge.parts.map_pieces(select, IMAGES)
