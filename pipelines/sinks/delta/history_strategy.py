"""History strategy: merges batches into targets that keep more than the latest state of each row.

The history mode decides whether such a target keeps every version of a row, the latest row with a mark if it was
deleted, or every change. A merge has three steps: it changes the columns of the target, sets new columns to their
defaults, and writes the rows with HistoryMerge. A full copy does not replace the rows that the target already has. So
the target records a position for each new column, in a `txn` action. Rows up to that position are older than the
column, and only they get the column's default.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import structlog
from deltalake import CommitProperties, Transaction

from cdc.config.delta_sink import HistoryMode
from cdc.table import Column, TableSchema
from cdc.target_names import OP_COLUMN, POSITION_COLUMN
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.folding.folded_parts import FoldedParts
from pipelines.sinks.contract import RefusedParts, RefusedRow, TableBatch
from pipelines.sinks.delta.column_defaults import new_defaults
from pipelines.sinks.delta.dead_letters import refused_changes
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.executor_files import takes_files
from pipelines.sinks.delta.executor_history import can_replace_rows, find_refused_keys
from pipelines.sinks.delta.history_merge import HistoryMerge
from pipelines.sinks.delta.history_modes import ROWS_OF
from pipelines.sinks.delta.history_row_maker import HistoryRowMaker
from pipelines.sinks.delta.schema_evolution import ColumnChange, column_id, ids_only_in
from pipelines.sinks.delta.sink_parts import DeltaSinkParts
from pipelines.sinks.delta.target_layout import double_quoted

OLDER_THAN_COLUMN: Final = "/older/"
"""Suffix of a `txn` application id, followed by a column id. The version of this `txn` is a position: rows up to it are
older than the column.
"""

log = structlog.get_logger("apply")


class History:
    """Implements pipelines.sinks.delta.sink.MergeStrategy for targets with history."""

    replaced_by_copy = False

    def __init__(self, parts: DeltaSinkParts) -> None:
        self._settings, self._writers = parts.settings, parts.writers
        self._targets, self._published = parts.targets, parts.published

    def merge(self, target: DeltaTarget, batch: TableBatch) -> None:
        """See MergeStrategy.merge."""
        shape, known = self._targets.shape(batch.schema), self._published.schema_of(batch.schema.relation)
        batch, settings = without_earlier_keys(batch, known), self._settings.of(batch.schema.topic)
        defaults = new_defaults(shape, original_columns(target, shape.schema) if known is None else known.columns)
        columns = shape.columns_in_mode(settings.history_mode)
        if target.columns_changed_upto <= batch.upto:
            # older versions stay, so that no copy replaces every row
            record_older_rows(target, columns, defaults.keys())
            change = ColumnChange(columns, settings.schema_changes, replaced=False, topic=batch.schema.topic)
            target.evolve_columns(change, batch.upto)
        else:
            record_rows_before_columns(target, columns, batch.upto)
        fill_older_rows(target, defaults, settings.history_mode)
        rows_of = ROWS_OF[settings.history_mode]
        finder = None
        if self._settings.uses_index(batch.schema):
            finder = self._writers.indexed.row_finder(target, shape.key, rows_of.null_column)
        maker = HistoryRowMaker.of(shape, batch.schema, settings)
        HistoryMerge(rows_of(target, maker, finder), self._writers).apply(batch)

    def needs_spark(self, target: DeltaTarget, batch: TableBatch, parts: FoldedParts) -> bool:
        """See MergeStrategy.needs_spark."""
        mode, shape = self._settings.of(batch.schema.topic).history_mode, self._targets.shape(batch.schema)
        if not target.files()[0] or (mode is HistoryMode.CHANGES and not parts.table.incomplete):
            return not takes_files(target)
        return not can_replace_rows(target, shape.columns_in_mode(mode), shape.key, batch.after)

    def rows_upto(self, target: DeltaTarget) -> int:
        """See MergeStrategy.rows_upto."""
        return target.changed_upto

    def find_refused(self, target: DeltaTarget, batch: TableBatch, limit: int) -> list[RefusedRow]:  # noqa: ARG002
        """See MergeStrategy.find_refused."""
        return refused_changes(batch, self._targets.shape(batch.schema), limit)

    def find_refused_in_parts(
        self,
        target: DeltaTarget,  # noqa: ARG002 - the rows of the target refuse nothing
        batch: TableBatch,
        limit: int,
    ) -> RefusedParts:
        """See pipelines.sinks.contract.ExecutorSink.find_refused_in_parts."""
        if batch.parts is None:
            return RefusedParts(FOLDED_ARROW.empty_table(), is_complete=True)
        rows = find_refused_keys(batch.parts, self._targets.shape(batch.schema), limit)
        return RefusedParts(rows, is_complete=True)


def without_earlier_keys(batch: TableBatch, before: TableSchema | None) -> TableBatch:
    """Return the batch without the changes before a full copy, if a full copy ends in it and the table's key changed.

    These changes identify their rows by the earlier key, by which the target no longer finds rows. Any other batch is
    returned unchanged. before: the schema that was published last; None if the table was never published.
    """
    if not batch.ends_copy or batch.generation is None:
        return batch
    ids = [column.id for column in batch.schema.key]

    def have_other_keys(rows: pa.Table) -> bool:
        return not pc.all(pc.equal(pc.list_value_length(rows["key"]), len(ids)), min_count=0).as_py()

    rows, parts = batch.rows, batch.parts
    same = before is None or [column.id for column in before.key] == ids
    if same and not (rows is not None and have_other_keys(rows)) and not (parts and parts.has_any(have_other_keys)):
        return batch
    if rows is not None:
        rows = rows.filter(pc.greater_equal(rows["position"], batch.generation))
    if parts is not None:
        parts = parts.after(batch.generation - 1)
    if dropped := _count(batch.rows, batch.parts) - _count(rows, parts):
        log.warning(
            "the key of a table changed: its history will not contain the changes before the full copy",
            table=batch.schema.topic,
            changes=dropped,
        )
    return replace(batch, rows=rows, parts=parts)


def _count(rows: pa.Table | None, parts: FoldedParts | None) -> int:
    return (0 if rows is None else rows.num_rows) + (0 if parts is None else parts.table.rows)


def original_columns(target: DeltaTarget, schema: TableSchema) -> list[Column]:
    """Return the columns of the schema that the target already had when its first row was written."""
    if not target.changed_upto:
        return list(schema.columns)
    fields = {column_id(field): field for field in target.columns}
    columns = [(column, fields.get(str(column.id).encode())) for column in schema.columns]
    return [c for c, field in columns if field is not None and target.transaction(_older_than(field)) is None]


def record_older_rows(target: DeltaTarget, columns: pa.Schema, names: Collection[str]) -> None:
    """For each column in `names` that the target does not have yet, record that all present rows are older than it."""
    present, upto = {column_id(field) for field in target.columns}, target.changed_upto
    new = [_older_than(columns.field(name)) for name in names if column_id(columns.field(name)) not in present]
    if upto:
        _record_positions(target, new, upto)


def record_rows_before_columns(target: DeltaTarget, columns: pa.Schema, upto: int) -> None:
    """For each column of the target that is not in `columns`, record that rows up to `upto` are older than it.

    An attempt before a crash added these columns, for a range of the log that ended later than the present range.
    upto: end of the present range.
    """
    later = sorted(ids_only_in(target.columns, columns))
    _record_positions(target, [OLDER_THAN_COLUMN + column.decode() for column in later], upto)


def fill_older_rows(target: DeltaTarget, defaults: Mapping[str, str], mode: HistoryMode) -> None:
    """Set each new column to its default in the rows that are older than the column.

    defaults: Delta column → SQL expression. In mode `changes`, the column stays null in rows of deletes, of truncates
    and of ends of copies.
    """
    images = f" AND {OP_COLUMN} IN ('c', 'u', 'r')" if mode is HistoryMode.CHANGES else ""
    for name, expression in defaults.items():
        older = target.transaction(_older_than(target.columns.field(name)))
        if older is not None and target.files()[0]:
            target.table.update(
                updates={double_quoted(name): expression},
                predicate=f"{POSITION_COLUMN} <= {older}{images}",
                commit_properties=target.signed_commit,
            )


def _record_positions(target: DeltaTarget, suffixes: Sequence[str], upto: int) -> None:
    if suffixes:
        positions = CommitProperties(
            app_transactions=[Transaction(target.app_id + suffix, upto) for suffix in suffixes]
        )
        target.table.create_write_transaction([], "append", target.table.schema(), commit_properties=positions)
        target.refresh()


def _older_than(field: pa.Field) -> str:
    return OLDER_THAN_COLUMN + (column_id(field) or b"").decode()
