"""Typed frame of a table: its changes with the table's columns, and with `_op`, `_position` and others.

The frame has the columns of one version of the table. Columns are found by id in every image. So rows of older versions
appear under the names of that version. The frame fails if a later version adds a column or changes a type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from cdc.errors import InvalidDefinition, SchemaNotApplicable
from cdc.log.file_selection import TableSelection
from cdc.log.reader import LogReader
from cdc.log_row import LOG_SCHEMA, Operation
from cdc.position import ChangePosition, Position
from cdc.table import TableSchema, TableState
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, column_name
from pipelines.types import TypePolicy, family_of
from pipelines.types.typed_rows import sent_cells, target_schema, typed_keys, typed_rows

OP_COLUMN: Final = "_op"
COMMITTED_COLUMN: Final = "_committed_at"
UNCHANGED_COLUMN: Final = "_unchanged"
"""The column that lists the unsent columns of a partial image; null for a complete image."""

_NAMES: Final = pa.list_(pa.field("element", pa.string()))
_LOG_COLUMN_OF: Final = {
    OP_COLUMN: "op",
    POSITION_COLUMN: "position",
    ORDINAL_COLUMN: "ordinal",
    COMMITTED_COLUMN: "committed_at",
}
_IMAGE: Final = ("key", "before", "after", "partial")
_OPERATIONS: Final = pa.array(["c", "u", "d", "r", "t", "g"])


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedTable:
    """One version of a table, and which of its columns a frame has."""

    schema: TableSchema
    place: ChangePosition
    """Position and ordinal of the schema row of this version."""
    policy: TypePolicy
    chosen: tuple[str, ...] = ()
    """Columns of the frame, in this order; empty: all."""

    @classmethod
    def find(cls, log: LogReader, topic: str, upto: Position, policy: TypePolicy, chosen: Sequence[str] = ()) -> Self:
        """Return the table whose name at position `upto` is `topic`. An existing table is preferred to a dropped one.

        chosen: the option `columns`. Raises InvalidDefinition if the log has no such table, or if the table does not
        have one of these columns.
        """
        latest = {schema.relation: (place, schema) for place, schema in log.schema_history(upto)}
        named = [found for found in latest.values() if found[1].topic == topic]
        if not named:
            raise InvalidDefinition(f"option 'table': the log has no table {topic!r} up to {upto!s}")
        place, schema = max(named, key=lambda found: (found[1].state is not TableState.DROPPED, found[0]))
        table = cls(schema=schema, place=place, policy=policy, chosen=tuple(chosen))
        if unknown := sorted(set(chosen) - set(table._all.names)):
            raise InvalidDefinition(f"option 'columns': table {topic!r} has no column {', '.join(map(repr, unknown))}")
        return table

    @property
    def tables(self) -> TableSelection:
        """Return the selection of tables that contains only this table."""
        return TableSelection(relations=(self.schema.relation, self.schema.relation))

    @property
    def columns(self) -> StructType:
        """Return the columns of the frame: first the table's columns, named as in a sink, then `_op` and the other log
        columns.
        """
        return from_arrow_schema(self._arrow)

    @property
    def log_columns(self) -> list[str]:
        """Return the names of the log's columns that the frame reads."""
        images = _IMAGE if self._shown_schema.columns or UNCHANGED_COLUMN in self._arrow.names else ()
        needed = {
            "op",
            "position",
            "ordinal",
            *images,
            *(_LOG_COLUMN_OF[n] for n in self._arrow.names if n in _LOG_COLUMN_OF),
        }
        return [name for name in LOG_SCHEMA.names if name in needed]

    def check(self, version: TableSchema, place: ChangePosition) -> None:
        """Raise SchemaNotApplicable if rows of a later version of the table do not fit into the frame.

        version: the later version. place: where it begins, for the error. A column with another type never fits. An
        added column fits only if the option `columns` selects the columns of the frame.
        """
        known = {column.id: family_of(column, self.policy).arrow for column in self._shown_schema.sent}
        for column in version.sent:
            if column.id not in known and self.chosen:
                continue
            if known.get(column.id) != family_of(column, self.policy).arrow:
                raise SchemaNotApplicable(
                    f"table {version.topic!r} changed after the frame was created: from {place.position!s} on, column "
                    f"{column.name!r} has type {column.type_name!r}",
                    remedy="create the frame again; a stream then continues from its checkpoint with the new columns",
                )

    def rows(self, found: pa.Table) -> pa.Table:
        """Convert rows of the log to rows of the frame; leave out logical messages and schema rows.

        found: rows of the table with the columns `log_columns`. Raises ValueNotRepresentable as `typed_rows` does.
        """
        found = found.filter(pc.is_in(found["op"], _OPERATIONS)).combine_chunks()
        columns: dict[str, Any] = {
            name: found[of_log] for name, of_log in _LOG_COLUMN_OF.items() if of_log in found.schema.names
        }
        if "after" in found.schema.names:
            columns |= self._image_columns(found)
        arrow = to_arrow_schema(self.columns, timezone="UTC")
        return pa.table([columns[name] for name in arrow.names], names=arrow.names).cast(arrow)

    def _image_columns(self, found: pa.Table) -> dict[str, Any]:
        deleted = pc.equal(found["op"], Operation.DELETE.value)
        image = pc.if_else(deleted, found["before"].combine_chunks(), found["after"].combine_chunks())
        rows = found.set_column(found.schema.names.index("after"), "after", image)
        schema = self._shown_schema
        typed, sent = typed_rows(rows, schema, self.policy), sent_cells(rows, schema)
        # a column that is absent from a complete image was added later: typed_rows gives it the value of older rows
        is_complete = pc.and_(pc.invert(found["partial"]), pc.is_in(found["op"], pa.array(["c", "r", "u"]))).to_numpy()
        columns = {
            column_name(column.name): typed[number]
            if column.missing is None
            else pc.if_else(pa.array(sent[number] | is_complete), typed[number], None)
            for number, column in enumerate(schema.sent)
        }
        columns |= self._deleted_keys(found, columns)
        if UNCHANGED_COLUMN in self._arrow.names:
            columns[UNCHANGED_COLUMN] = _unsent_names(found["partial"].to_numpy(), sent, list(columns))
        return columns

    def _deleted_keys(self, found: pa.Table, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the key columns; in deletes without an old image, their values come from the log's column `key`.

        The result is name → values for all rows; other rows keep their values in `columns`. It is empty if there is no
        such delete.
        """
        width = len(self.schema.key)
        fits = pc.and_(
            pc.equal(found["op"], Operation.DELETE.value), pc.equal(pc.list_value_length(found["key"]), width)
        )
        key_only = np.flatnonzero(pc.fill_null(pc.and_(fits, pc.is_null(found["before"])), False).to_numpy())
        if not width or not len(key_only):
            return {}
        keys = typed_keys(found["key"].take(key_only), self.schema, self.policy, found["position"].take(key_only))
        key_number = np.full(found.num_rows, -1, np.int64)
        key_number[key_only] = np.arange(len(key_only))
        has_key = pa.array(key_number >= 0)
        numbers = pa.array(key_number, mask=key_number < 0)
        return {
            name: pc.if_else(has_key, keys[name].take(numbers), columns[name])
            for name in keys.column_names
            if name in columns
        }

    @property
    def _all(self) -> pa.Schema:
        fields = [field for field in target_schema(self.schema, self.policy) if field.name not in _LOG_COLUMN_OF]
        added = [pa.field(name, LOG_SCHEMA.field(of_log).type) for name, of_log in _LOG_COLUMN_OF.items()]
        return pa.schema([*fields, *added, pa.field(UNCHANGED_COLUMN, _NAMES)])

    @property
    def _arrow(self) -> pa.Schema:
        return pa.schema([self._all.field(name) for name in self.chosen]) if self.chosen else self._all

    @property
    def _shown_schema(self) -> TableSchema:
        if not self.chosen or UNCHANGED_COLUMN in self.chosen:
            return self.schema
        shown = tuple(column for column in self.schema.columns if column_name(column.name) in self.chosen)
        return replace(self.schema, columns=shown)


def _unsent_names(partial: np.ndarray, sent: np.ndarray, names: Sequence[str]) -> pa.Array:
    is_unsent = ~sent & partial
    offsets = np.concatenate(([0], np.cumsum(is_unsent.sum(axis=0)))).astype(np.int32)
    numbers = np.nonzero(is_unsent.T)[1]
    listed = pa.ListArray.from_arrays(pa.array(offsets), pa.array(names, pa.string()).take(pa.array(numbers)))
    return pc.if_else(pa.array(partial), listed, pa.nulls(len(partial), listed.type))
