"""Typed: the changes of one table as rows with its own columns, and what each row is beside them.

Columns are found by id in every image, so rows of older versions show under the names of now. What a version that came
later added cannot show in a frame that was made before: whoever reads such a frame is told.
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

from cdc.change import LOG_SCHEMA, Operation
from cdc.errors import InvalidDefinition, SchemaNotApplicable
from cdc.log.ranges import TableSelection
from cdc.log.reader import LogReader
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, column_name
from cdc.position import ChangePosition, Position
from cdc.table import TableSchema, TableState
from pipelines.types.families import TypePolicy, family_of
from pipelines.types.typed_rows import sent_cells, target_schema, typed_keys, typed_rows

OP_COLUMN: Final = "_op"
COMMITTED_COLUMN: Final = "_committed_at"
UNCHANGED_COLUMN: Final = "_unchanged"
"""Names of the columns that an image lacks because they were not sent; null if it lacks none."""

_NAMES: Final = pa.list_(pa.field("element", pa.string()))
_OF_LOG: Final = {
    OP_COLUMN: "op",
    POSITION_COLUMN: "position",
    ORDINAL_COLUMN: "ordinal",
    COMMITTED_COLUMN: "committed_at",
}
_IMAGE: Final = ("key", "before", "after", "partial")
_OPERATIONS: Final = pa.array(["c", "u", "d", "r", "t", "g"])


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedTable:
    """One version of a table as the columns of a frame."""

    schema: TableSchema
    place: ChangePosition
    """Of its `s` row."""
    policy: TypePolicy
    chosen: tuple[str, ...] = ()
    """Columns of the frame, in this order; all when empty."""

    @classmethod
    def find(cls, log: LogReader, topic: str, upto: Position, policy: TypePolicy, chosen: Sequence[str] = ()) -> Self:
        """The table that has this name at upto, a dropped one if no other has; raises InvalidDefinition for none."""
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
    def only(self) -> TableSelection:
        """The rows of the log that are the table's."""
        return TableSelection(relations=(self.schema.relation, self.schema.relation))

    @property
    def columns(self) -> StructType:
        """The frame's columns: the table's under their names in a sink, then `_op` and the others."""
        return from_arrow_schema(self._arrow)

    @property
    def needed(self) -> list[str]:
        """Columns of the log that the frame is made from."""
        images = _IMAGE if self._narrow.columns or UNCHANGED_COLUMN in self._arrow.names else ()
        asked = {"op", "position", "ordinal", *images, *(_OF_LOG[n] for n in self._arrow.names if n in _OF_LOG)}
        return [name for name in LOG_SCHEMA.names if name in asked]

    def check(self, version: TableSchema, place: ChangePosition) -> None:
        """Raise SchemaNotApplicable if rows of a later version of the table do not fit into the frame.

        A column that was added does not fit, unless the frame's columns were chosen; one with another type never does.
        """
        known = {column.id: family_of(column, self.policy).arrow for column in self._narrow.sent}
        for column in version.sent:
            if column.id not in known and self.chosen:
                continue
            if known.get(column.id) != family_of(column, self.policy).arrow:
                raise SchemaNotApplicable(
                    f"table {version.topic!r} has column {column.name!r} of type {column.type_name!r} "
                    f"from {place.position!s} on, which is after the frame was created",
                    remedy="create the frame again; a stream then continues from its checkpoint with the new columns",
                )

    def rows(self, found: pa.Table) -> pa.Table:
        """Log rows of the table with the needed columns → rows of the frame; messages and versions are left out.

        Raises ValueNotRepresentable as pipelines.types.typed_rows does.
        """
        found = found.filter(pc.is_in(found["op"], _OPERATIONS)).combine_chunks()
        columns: dict[str, Any] = {
            name: found[of_log] for name, of_log in _OF_LOG.items() if of_log in found.schema.names
        }
        if "after" in found.schema.names:
            columns |= self._images(found)
        arrow = to_arrow_schema(self.columns, timezone="UTC")
        return pa.table([columns[name] for name in arrow.names], names=arrow.names).cast(arrow)

    def _images(self, found: pa.Table) -> dict[str, Any]:
        deleted = pc.equal(found["op"], Operation.DELETE.value)
        image = pc.if_else(deleted, found["before"].combine_chunks(), found["after"].combine_chunks())
        rows = found.set_column(found.schema.names.index("after"), "after", image)
        narrow = self._narrow
        typed, sent = typed_rows(rows, narrow, self.policy), sent_cells(rows, narrow)
        # of an image that is whole, a column that it lacks came later, and typed_rows says what rows had then
        whole = pc.and_(pc.invert(found["partial"]), pc.is_in(found["op"], pa.array(["c", "r", "u"]))).to_numpy()
        columns = {
            column_name(column.name): typed[place]
            if column.missing is None
            else pc.if_else(pa.array(sent[place] | whole), typed[place], None)
            for place, column in enumerate(narrow.sent)
        }
        columns |= self._keys(found, columns)
        if UNCHANGED_COLUMN in self._arrow.names:
            columns[UNCHANGED_COLUMN] = _unchanged(found["partial"].to_numpy(), sent, list(columns))
        return columns

    def _keys(self, found: pa.Table, columns: dict[str, Any]) -> dict[str, Any]:
        """Key columns of deleted rows, whose old image the log may have let go."""
        width = len(self.schema.key)
        fits = pc.and_(
            pc.equal(found["op"], Operation.DELETE.value), pc.equal(pc.list_value_length(found["key"]), width)
        )
        bare = np.flatnonzero(pc.fill_null(pc.and_(fits, pc.is_null(found["before"])), False).to_numpy())
        if not width or not len(bare):
            return {}
        keys = typed_keys(found["key"].take(bare), self.schema, self.policy, found["position"].take(bare))
        which = np.full(found.num_rows, -1, np.int64)
        which[bare] = np.arange(len(bare))
        there = pa.array(which >= 0)
        places = pa.array(which, mask=which < 0)
        return {
            name: pc.if_else(there, keys[name].take(places), columns[name])
            for name in keys.column_names
            if name in columns
        }

    @property
    def _all(self) -> pa.Schema:
        fields = [field for field in target_schema(self.schema, self.policy) if field.name not in _OF_LOG]
        said = [pa.field(name, LOG_SCHEMA.field(of_log).type) for name, of_log in _OF_LOG.items()]
        return pa.schema([*fields, *said, pa.field(UNCHANGED_COLUMN, _NAMES)])

    @property
    def _arrow(self) -> pa.Schema:
        return pa.schema([self._all.field(name) for name in self.chosen]) if self.chosen else self._all

    @property
    def _narrow(self) -> TableSchema:
        """The version with the columns alone that have to be converted."""
        if not self.chosen or UNCHANGED_COLUMN in self.chosen:
            return self.schema
        kept = tuple(column for column in self.schema.columns if column_name(column.name) in self.chosen)
        return replace(self.schema, columns=kept)


def _unchanged(partial: np.ndarray, sent: np.ndarray, names: Sequence[str]) -> pa.Array:
    lacking = ~sent & partial
    offsets = np.concatenate(([0], np.cumsum(lacking.sum(axis=0)))).astype(np.int32)
    which = np.nonzero(lacking.T)[1]
    listed = pa.ListArray.from_arrays(pa.array(offsets), pa.array(names, pa.string()).take(pa.array(which)))
    return pc.if_else(pa.array(partial), listed, pa.nulls(len(partial), listed.type))
