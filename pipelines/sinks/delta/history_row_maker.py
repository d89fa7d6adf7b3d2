"""History row maker: makes the new rows of a target with history from changes and from the rows that they change.

It does no I/O. The driver uses it for a small batch, and executors use it for each part of a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import TableSettings
from cdc.config.delta_sink import HistoryMode
from cdc.table import TableSchema
from cdc.target_names import DELETED_COLUMN, OP_COLUMN, column_name
from pipelines.folding.history_changes import GenerationEnd
from pipelines.sinks.delta.history_rows import StoredRows, change_rows, complete_changes, marked_rows, version_rows
from pipelines.sinks.delta.merge_source import latest_per_key
from pipelines.sinks.delta.target_columns import RowShape
from pipelines.types.typed_rows import typed_keys

CHANGE_OPS = ("c", "d", "r", "u")
"""Values of `_op` in the rows of mode `changes` that are changes; the others are truncates and ends of full copies."""


@dataclass(frozen=True, slots=True)
class HistoryRowMaker:
    """Makes the rows of one target in one history mode. Executors receive pickled instances."""

    mode: HistoryMode
    shape: RowShape
    tracked: tuple[str, ...] = ()
    """Delta names of the columns whose changes begin a new version of a row."""

    @classmethod
    def of(cls, shape: RowShape, schema: TableSchema, settings: TableSettings) -> Self:
        """Create the row maker of a table. Arguments as in `tracked_columns`."""
        return cls(settings.history_mode, shape, tuple(tracked_columns(shape, schema, settings)))

    @property
    def columns(self) -> pa.Schema:
        """The columns of the rows that it makes."""
        return self.shape.columns_in_mode(self.mode)

    def stored_keys(self, images: pa.Table) -> pa.Table:
        """Return the typed keys of the target's rows that the new rows of these changes depend on.

        In mode `changes`, a complete image depends on no row.
        """
        if self.mode is HistoryMode.CHANGES:
            images = images.filter(pc.invert(pc.fill_null(images["complete"], fill_value=True)))
        keys = pa.chunked_array(
            [*images["key"].chunks, *images["base"].drop_null().chunks], images.schema.field("key").type
        )
        return typed_keys(keys, self.shape.schema, self.shape.policy)

    def stored(self, rows: pa.Table) -> StoredRows:
        """Return rows of the target as the states before a range.

        rows: the rows that are current in the target; in mode `changes`, all rows of their keys.
        """
        if self.mode is HistoryMode.VERSIONS:
            return StoredRows(rows, np.ones(rows.num_rows, bool))
        if self.mode is HistoryMode.MARKED:
            return StoredRows(rows, ~rows[DELETED_COLUMN].to_numpy())
        changes = rows.filter(pc.is_in(rows[OP_COLUMN], pa.array(CHANGE_OPS)))
        rows = latest_per_key(changes, self.shape.key).combine_chunks()
        return StoredRows(rows, pc.not_equal(rows[OP_COLUMN], "d").to_numpy())

    def new_rows(
        self,
        images: pa.Table,
        stored: StoredRows,
        endings: Sequence[GenerationEnd],
        added_endings: Sequence[GenerationEnd] = (),
    ) -> pa.Table:
        """Return the complete new rows, which are added to the target or replace some of its rows.

        images: changes. stored: the target's rows of their keys. endings: truncates and ends of full copies in the
        range. added_endings: those that get a row of their own in mode `changes`. Raises the errors of
        `complete_changes`.
        """
        states = complete_changes(images, stored, endings, self.shape)
        if self.mode is HistoryMode.VERSIONS:
            return version_rows(states, stored, self.tracked)
        if self.mode is HistoryMode.MARKED:
            return marked_rows(states)
        return change_rows(states, images["op"], added_endings)


def changes_to_merge(images: pa.Table, done: int, since: int) -> pa.Table:
    """Return the changes that a target does not have yet.

    done: position up to which the target has all changes. since: position at which the history of the target begins;
    deletes up to it are left out.
    """
    images = images.filter(pc.greater(images["position"], done))
    earlier = pc.and_(pc.less_equal(images["position"], since), pc.equal(images["op"], "d"))
    return images.filter(pc.invert(earlier))


def tracked_columns(shape: RowShape, schema: TableSchema, settings: TableSettings) -> list[str]:
    """Return the Delta names of the columns whose changes begin a new version of a row.

    settings: the settings of the table; they name columns as the source does. schema: the schema of the source table.
    """
    wanted, unwanted = set(settings.track_history_column_list), set(settings.track_history_except_column_list)
    source_name = {column.id: column.name for column in schema.columns}
    names = [(column_name(column.name), source_name.get(column.id, column.name)) for column in shape.schema.sent]
    keys = set(shape.key)
    return [
        delta_name
        for delta_name, name in names
        if delta_name not in keys and (not wanted or name in wanted) and name not in unwanted
    ]
