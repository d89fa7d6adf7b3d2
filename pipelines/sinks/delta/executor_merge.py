"""The merge of a large batch by Spark's executors: they make the typed rows from the folded parts, and write them.

The driver plans and commits. It gets names, sizes and statistics of files.

- **Empty target**: for each part an executor writes one data file, or one for each partition. One commit of the driver
  adds the files. Rows pass through the JVM only if Spark computes columns of a rule.
- **Filled target**: the same files, and deletion vectors for the old rows, see `executor_upsert.py`. Where these do not
  fit, Delta's own MERGE joins the typed rows with the target.
- **Rules**: executors mask, rename and drop columns, and call Python functions. Spark computes the columns of
  `computed` and the filter `where`.
- **Partial images**: executors read their base rows from the version of the target before the batch, see
  `executor_row_lookup.py`. Base rows and images of a part meet in one task, where `merge_source.overlay` completes the
  images, as for a small batch.

Executors convert rows with the functions of a small batch. So both ways have the same rows, and refuse the same rows
with the same errors (executor_refusals.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from cdc.target_names import RELATION_COLUMN
from pipelines.folding.fold import has_base_key
from pipelines.folding.folded_parts import IMAGES, FoldedParts, Piece, piece_of_images
from pipelines.folding.key_parts import from_ipc
from pipelines.runtime.executor_code import forwarding_errors, raising_task_errors
from pipelines.sinks.delta.delta_target import DeltaTarget, TxnMarker
from pipelines.sinks.delta.executor_files import FILES, PartFiles, add_files, collect_files, folder_of, takes_files
from pipelines.sinks.delta.executor_filter import filter_partial_images
from pipelines.sinks.delta.executor_key_search import KeySearch
from pipelines.sinks.delta.executor_row_lookup import RowLookup, stored_and_images, with_images
from pipelines.sinks.delta.merge_source import (
    BaseLookup,
    as_upserts,
    has_float_key,
    one_row_per_key_in_spark,
    overlay,
    source_rows,
    split_partial,
)
from pipelines.sinks.delta.new_data_files import DataFile, TargetFolder
from pipelines.sinks.delta.spark_target import frame_of, hinted_merge_source, spark_schema
from pipelines.sinks.delta.stored_columns import StoredColumns
from pipelines.sinks.delta.target_columns import OP, RowShape
from pipelines.sinks.delta.target_part import columns_of_part
from pipelines.transform.expressions import raising_transform_failed
from pipelines.types.failing_rows import failing_rows
from pipelines.types.nulled_values import count_nulled, may_be_nulled
from pipelines.types.typed_rows import typed_keys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class BasePlan:
    """How a task uses the base rows that it has received. Executors receive pickled instances."""

    stored: StoredColumns
    """The columns of the target at the version of the base rows, and those of the base rows."""
    exact: bool
    truncated: tuple[int, int] | None

    def lookup(self, rows: Sequence[pa.Table]) -> BaseLookup:
        """Return the lookup of the base rows that a task has received."""
        schema = self.stored.schema
        return BaseLookup(
            None,
            exact=self.exact,
            truncated=self.truncated,
            received=pa.concat_tables([schema.empty_table(), *(table.select(schema.names) for table in rows)]),
            present=self.stored.present,
        )


@dataclass(frozen=True)
class ExecutorMerge:
    """The rows of one batch on the executors, for one target."""

    target: DeltaTarget
    parts: FoldedParts
    shape: RowShape
    bases: BaseLookup

    def source(self, own_rows: pa.Table | None) -> DataFrame:
        """Return the merge source of the batch as a frame.

        own_rows: merge source rows on the driver, which belong to the batch as well.
        """
        source = self._finished(one_row_per_key_in_spark(self.rows_of_images(), self.shape.key))
        if own_rows is not None and own_rows.num_rows:
            source = source.unionByName(frame_of(self.parts.session, own_rows))
            source = one_row_per_key_in_spark(source, self.shape.key)
        return hinted_merge_source(source, self.shape.key, self.parts.parts) if self.target.files()[0] else source

    def can_write_files(self) -> bool:
        """Return whether executors can write data files for `write_files`: into an empty target."""
        if self.target.files()[0] or self.parts.table.incomplete or not takes_files(self.target):
            return False
        return not has_float_key(self.shape.source, self.shape.key)

    def write_files(self, marker: TxnMarker) -> None:
        """Write the upserts of the batch to data files of the empty target, and add them in one commit."""
        files = self.write_data_files(folder_of(self.target))
        add_files(self.target, files, marker)

    def write_data_files(self, folder: TargetFolder) -> list[DataFile]:
        """Let executors write the upserts of the batch to data files that no commit has added yet."""
        shape = self.shape
        if shape.expressions is not None:
            return collect_files([self._computed_files(folder)])

        def write(pieces: Iterator[Piece]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                file = PartFiles(folder)
                for _, images in pieces:
                    file.add(_written_rows(images, shape))
                yield from file.close()

        frames = [self.parts.map_parts(write, FILES)]
        if self.parts.table.incomplete:
            plan = self.plan

            def write_completed(pieces: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                with forwarding_errors():
                    file = PartFiles(folder)
                    for images, bases in images_and_bases(pieces, plan):
                        rows = _checked(as_upserts(overlay(images, bases, shape), shape), shape)
                        file.add(shape.with_relation(rows.drop_columns([OP])))
                    yield from file.close()

            frames.append(self.with_bases().mapInArrow(write_completed, FILES))
        return collect_files(frames)

    def _computed_files(self, folder: TargetFolder) -> DataFrame:
        """Return the frame of the files with the upserts of the batch, whose expressions Spark evaluates."""
        columns = self.shape.columns

        def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                file = PartFiles(folder)
                for batch in batches:
                    file.add(pa.Table.from_batches([batch]).select(columns.names).cast(columns))
                yield from file.close()

        return self._finished(self.rows_of_images()).where(f"{OP} = 'u'").mapInArrow(write, FILES)

    @contextmanager
    def raising_errors(self) -> Iterator[None]:
        """Raise the errors of tasks, and of the expressions of the rule, as a small batch raises them."""
        with raising_transform_failed(self.shape.schema.topic), raising_task_errors():
            yield

    @property
    def plan(self) -> BasePlan | None:
        """How tasks use base rows of partial images; None if there was no target before the batch."""
        base_lookup, _ = self._base_lookup
        return None if base_lookup is None else BasePlan(base_lookup.stored, self.bases.exact, self.bases.truncated)

    @cached_property
    def _base_lookup(self) -> tuple[RowLookup | None, KeySearch | None]:
        """The lookup of the base rows of partial images, and its search; None if there was no target before."""
        bases = self.bases
        if bases.read_table is None:
            return None, None
        table: DeltaTable = bases.read_table()
        present = columns_of_part(pa.schema(table.schema().to_arrow()), bases.relation)
        stored = StoredColumns.of(present, self.shape.image_columns)
        base_lookup = RowLookup(self.target.uri, table.version(), stored, self.shape.key, relation=bases.relation)
        return base_lookup, base_lookup.search(self.parts.parts)

    @cached_property
    def images(self) -> FoldedParts:
        """The folded rows, in which partial images that the filter `where` of the rule rejects are deletes."""
        return filter_partial_images(self.parts, self.shape)

    def computed(self, source: DataFrame) -> DataFrame:
        """Return merge source rows with the computed columns; the filter `where` makes deletes of upserts."""
        expressions = self.shape.expressions
        return source if expressions is None else expressions.apply_to_frame(source)

    def _finished(self, source: DataFrame) -> DataFrame:
        """Return merge source rows with all columns of the target, after a check of computed texts in partition
        columns.
        """
        shape, finished = self.shape, self.computed(source)

        def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                for batch in batches:
                    shape.check_partitions(pa.Table.from_batches([batch]))
                    yield batch

        if shape.expressions is not None and shape.partition_texts:
            finished = finished.mapInArrow(check, finished.schema)
        if shape.relation is None:
            return finished
        return finished.selectExpr("*", f"{int(shape.relation)}L AS {RELATION_COLUMN}")

    def rows_of_images(self) -> DataFrame:
        """Return the merge source rows of all images, without those of partial images that have no base row."""
        rows = self._complete_rows()
        return rows.unionByName(self._completed_rows()) if self.parts.table.incomplete else rows

    def _complete_rows(self) -> DataFrame:
        shape = self.shape

        def typed(_: int, rows: pa.Table) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                complete, _partial = split_partial(shape.settled(rows))
                yield from _checked(source_rows(complete, shape), shape).to_batches()

        return self.images.map_pieces(typed, spark_schema(shape.source))

    def _completed_rows(self) -> DataFrame:
        shape, plan = self.shape, self.plan

        def complete(pieces: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with forwarding_errors():
                for images, bases in images_and_bases(pieces, plan):
                    yield from _checked(as_upserts(overlay(images, bases, shape), shape), shape).to_batches()

        return self.with_bases().mapInArrow(complete, spark_schema(shape.source))

    def with_bases(self) -> DataFrame:
        """Return the partial images and their base rows as a frame: a Spark partition for each part."""
        shape = self.shape

        def partial(part: int, rows: pa.Table) -> Iterator[pa.RecordBatch]:
            _, incomplete = split_partial(shape.settled(rows))
            if incomplete.num_rows:
                yield piece_of_images(part, incomplete)

        def base_keys(rows: pa.Table) -> pa.Table:
            _, incomplete = split_partial(shape.settled(rows))
            return _typed_base_keys(incomplete, shape)

        base_lookup, search = self._base_lookup
        bases = None if base_lookup is None else base_lookup.rows(self.images, base_keys, search)
        return with_images(bases, self.images.map_pieces(partial, IMAGES), self.parts.parts)


def count_nulled_in_parts(parts: FoldedParts, shape: RowShape) -> int:
    """Return what `count_nulled` returns, for rows on the executors."""
    if not any(may_be_nulled(column, shape.policy) for column in shape.schema.sent):
        return 0

    def count(_: int, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"nulled": [count_nulled(rows, shape.schema, shape.policy)]})

    total = parts.map_pieces(count, "nulled long").selectExpr("sum(nulled) AS nulled").first()
    return 0 if total is None else total["nulled"] or 0


def _written_rows(images: pa.Table, shape: RowShape) -> pa.Table:
    """Return the complete upserts among folded rows as rows of the target."""
    complete, _partial = split_partial(shape.settled(images.filter(pc.equal(images["op"], "u"))))
    return shape.with_relation(_checked(source_rows(complete, shape), shape).drop_columns([OP]))


def _checked(source: pa.Table, shape: RowShape) -> pa.Table:
    """Return merge source rows after a check of the texts in partition columns, unless expressions come first."""
    if shape.expressions is None:
        shape.check_partitions(source)
    return source


def images_and_bases(pieces: Iterator[pa.RecordBatch], plan: BasePlan | None) -> Iterator[tuple[pa.Table, BaseLookup]]:
    """Yield the pieces of images of a part, each with the lookup of the part's base rows."""
    bases, images = stored_and_images(pieces)
    lookup = BaseLookup(None) if plan is None else plan.lookup(bases)
    for stream in images:
        yield from_ipc(stream), lookup


def _typed_base_keys(incomplete: pa.Table, shape: RowShape) -> pa.Table:
    """Return the keys of the base rows, without keys that the target cannot contain."""
    incomplete = incomplete.filter(pc.or_(pc.is_null(incomplete["base"]), has_base_key(incomplete["base"])))
    keys = pa.table({"key": pc.coalesce(incomplete["base"], incomplete["key"])})
    failing = failing_rows(keys, lambda part: typed_keys(part["key"], shape.schema, shape.policy), keys.num_rows)
    typable = np.setdiff1d(np.arange(keys.num_rows), np.fromiter(failing, np.int64, len(failing)))
    return typed_keys(keys["key"].take(pa.array(typable)), shape.schema, shape.policy)
