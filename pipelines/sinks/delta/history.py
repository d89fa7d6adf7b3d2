"""History: the strategy of targets that keep more of a row than its latest state: versions, marked rows, every change.

A batch is merged in these steps: evolve the columns, fill the defaults of new columns, let HistoryMerge write the rows
of the mode. A full copy does not replace older rows: they stay, with the columns that they had. So the target records
for each new column, as the position of a `txn`, up to where its rows are older than the column. Only those rows get the
default of the column.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import structlog
from deltalake import CommitProperties, Transaction

from cdc.config.sinks import HistoryMode
from cdc.table import Column, TableSchema
from cdc.target_names import OP_COLUMN, POSITION_COLUMN
from pipelines.sinks.contract import RefusedRow, TableBatch
from pipelines.sinks.delta.column_defaults import new_defaults
from pipelines.sinks.delta.dead_letters import refused_changes
from pipelines.sinks.delta.history_merge import HistoryMerge
from pipelines.sinks.delta.history_modes import ROWS_OF
from pipelines.sinks.delta.schema_evolution import ColumnChange, column_id, ids_only_in
from pipelines.sinks.delta.strategy import DeltaSinkParts
from pipelines.sinks.delta.target import DeltaTarget
from pipelines.sinks.delta.target_layout import double_quoted

OLDER_THAN_COLUMN: Final = "/older/"
"""Suffix of a `txn` identity, with the id of a column: the position up to which rows are older than the column."""

log = structlog.get_logger("apply")


class History:
    """The contract is pipelines.sinks.delta.strategy.KeepingStrategy."""

    replaced_by_copy = False

    def __init__(self, parts: DeltaSinkParts) -> None:
        self._settings, self._writers = parts.settings, parts.writers
        self._targets, self._published = parts.targets, parts.published

    def merge(self, target: DeltaTarget, batch: TableBatch) -> None:
        """See KeepingStrategy.merge."""
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
        HistoryMerge(ROWS_OF[settings.history_mode](target, shape, settings), self._writers).apply(batch)

    def rows_upto(self, target: DeltaTarget) -> int:
        """See KeepingStrategy.rows_upto."""
        return target.changed_upto

    def find_refused(self, target: DeltaTarget, batch: TableBatch, limit: int) -> list[RefusedRow]:  # noqa: ARG002
        """See KeepingStrategy.find_refused."""
        return refused_changes(batch, self._targets.shape(batch.schema), limit)


def without_earlier_keys(batch: TableBatch, before: TableSchema | None) -> TableBatch:
    """The batch without the changes before a full copy that ended under another key: no row is found by that key.

    before: the table when it was last published. The copy ends what the target has of such rows.
    """
    if batch.rows is None or not batch.ends_copy:
        return batch
    ids = [column.id for column in batch.schema.key]
    same = before is None or [column.id for column in before.key] == ids
    if same and pc.all(pc.equal(pc.list_value_length(batch.rows["key"]), len(ids)), min_count=0).as_py():
        return batch
    rows = batch.rows.filter(pc.greater_equal(batch.rows["position"], batch.generation))
    if dropped := batch.rows.num_rows - rows.num_rows:
        log.warning("left out changes that use an earlier key of the table", table=batch.schema.topic, changes=dropped)
    return replace(batch, rows=rows)


def original_columns(target: DeltaTarget, schema: TableSchema) -> list[Column]:
    """The columns that are as old as every row of the target, as far as its recorded positions show."""
    if not target.changed_upto:
        return list(schema.columns)
    fields = {column_id(field): field for field in target.columns}
    columns = [(column, fields.get(str(column.id).encode())) for column in schema.columns]
    return [c for c, field in columns if field is not None and target.transaction(_older_than(field)) is None]


def record_older_rows(target: DeltaTarget, columns: pa.Schema, names: Collection[str]) -> None:
    """Record that all present rows are older than the columns of these names, before the target gets the columns."""
    present, upto = {column_id(field) for field in target.columns}, target.changed_upto
    new = [_older_than(columns.field(name)) for name in names if column_id(columns.field(name)) not in present]
    if upto:
        _record_positions(target, new, upto)


def record_rows_before_columns(target: DeltaTarget, columns: pa.Schema, upto: int) -> None:
    """Record that rows up to a position are older than the columns that an attempt before a crash added."""
    later = sorted(ids_only_in(target.columns, columns))
    _record_positions(target, [OLDER_THAN_COLUMN + column.decode() for column in later], upto)


def fill_older_rows(target: DeltaTarget, defaults: Mapping[str, str], mode: HistoryMode) -> None:
    """Set new columns to their defaults in the rows that are older: Delta column → SQL expression.

    Rows of deletes have no values. Younger rows, perhaps of an attempt before a crash, have their own values.
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
