"""History: the strategy of targets that keep more of a row than its latest state: versions, marked rows, every change.

Steps of a batch: evolve the columns, then let HistoryMerge write the rows of the mode. No copy replaces older rows:
they stay, in the columns that they had. So the target records, as `txn` positions, up to where its rows are older than
a new column; those rows, and no others, are then given the default of the column.
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
from pipelines.sinks.delta.merge import double_quoted
from pipelines.sinks.delta.schema_evolution import column_id, ids_only_in
from pipelines.sinks.delta.strategy import TableStrategy
from pipelines.sinks.delta.table import DeltaTarget
from pipelines.sinks.delta.versions import all_columns

OLDER_THAN_COLUMN: Final = "/older/"
"""Suffix of a `txn` identity, with the id of a column: the position up to which rows are older than the column."""

log = structlog.get_logger("apply")


class History(TableStrategy):
    """The contract is pipelines.sinks.delta.strategy.KeepingStrategy."""

    replaced_by_copy = False

    def rows_upto(self, target: DeltaTarget) -> int:
        """See KeepingStrategy.rows_upto."""
        return target.changed_upto

    def refused(self, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """See KeepingStrategy.refused."""
        target = self._targets.open(batch.schema)
        return refused_changes(batch, self._targets.shape(self._in_target_columns(target, batch).schema), limit)

    def _merge(self, target: DeltaTarget, batch: TableBatch) -> None:
        shape, known = self._targets.shape(batch.schema), self._published.schema_of(batch.schema.relation)
        batch, settings = without_earlier_keys(batch, known), self._settings.of(batch.schema.topic)
        defaults = new_defaults(shape, original_columns(target, shape.schema) if known is None else known.columns)
        columns = all_columns(shape.columns, settings.history_mode)
        if target.columns_changed_upto <= batch.upto:
            # older versions stay, so that no copy replaces every row
            record_older_rows(target, columns, defaults.keys())
            target.evolve_columns(columns, settings.schema_changes, batch.upto, replaced=False)
        else:
            record_rows_before_columns(target, columns, batch.upto)
        refill(target, defaults, settings.history_mode)
        HistoryMerge(ROWS_OF[settings.history_mode](target, shape, settings), self._parts.writers).apply(batch)


def without_earlier_keys(batch: TableBatch, before: TableSchema | None) -> TableBatch:
    """The batch without changes from before a full copy under another key: no row is found by theirs any more.

    before: the table when it was last published. What the target has of such rows ends with the copy.
    """
    if batch.rows is None or not batch.ends_copy:
        return batch
    ids = [column.id for column in batch.schema.key]
    same = before is None or [column.id for column in before.key] == ids
    if same and pc.all(pc.equal(pc.list_value_length(batch.rows["key"]), len(ids)), min_count=0).as_py():
        return batch
    rows = batch.rows.filter(pc.greater_equal(batch.rows["position"], batch.generation))
    if left := batch.rows.num_rows - rows.num_rows:
        log.warning("changes under an earlier key are not retained", table=batch.schema.topic, changes=left)
    return replace(batch, rows=rows)


def original_columns(target: DeltaTarget, schema: TableSchema) -> list[Column]:
    """The columns that no row of the target is older than, as far as its own notes tell."""
    if not target.changed_upto:
        return list(schema.columns)
    fields = {column_id(field): field for field in target.columns}
    there = [(column, fields.get(str(column.id).encode())) for column in schema.columns]
    return [c for c, field in there if field is not None and target.transaction(_older_than(field)) is None]


def record_older_rows(target: DeltaTarget, columns: pa.Schema, names: Collection[str]) -> None:
    """Note up to where the rows are older than the columns of these names, before the target has them."""
    there, stands = {column_id(field) for field in target.columns}, target.changed_upto
    new = [_older_than(columns.field(name)) for name in names if column_id(columns.field(name)) not in there]
    if stands:
        _note(target, new, stands)


def record_rows_before_columns(target: DeltaTarget, columns: pa.Schema, upto: int) -> None:
    """Note that the rows up to there are older than columns which the target has, and not they, from before a crash."""
    _note(
        target, [OLDER_THAN_COLUMN + column.decode() for column in sorted(ids_only_in(target.columns, columns))], upto
    )


def _note(target: DeltaTarget, suffixes: Sequence[str], upto: int) -> None:
    if suffixes:
        marks = CommitProperties(app_transactions=[Transaction(target.app_id + suffix, upto) for suffix in suffixes])
        target.table.create_write_transaction([], "append", target.table.schema(), commit_properties=marks)
        target.refresh()


def refill(target: DeltaTarget, defaults: Mapping[str, str], keeping: HistoryMode) -> None:
    """Give the rows that were noted as older the defaults of new columns: Delta column → SQL expression.

    Rows of deletes do not say them. Younger ones, perhaps of an attempt before a crash, hold their own values.
    """
    images = f" AND {OP_COLUMN} IN ('c', 'u', 'r')" if keeping is HistoryMode.CHANGES else ""
    for name, expression in defaults.items():
        older = target.transaction(_older_than(target.columns.field(name)))
        if older is not None and target.files()[0]:
            target.table.update(
                updates={double_quoted(name): expression},
                predicate=f"{POSITION_COLUMN} <= {older}{images}",
                commit_properties=target.signed_commit,
            )


def _older_than(field: pa.Field) -> str:
    return OLDER_THAN_COLUMN + (column_id(field) or b"").decode()
