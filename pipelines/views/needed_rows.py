"""The rows of the inputs that a step needs, read by their keys and join columns instead of with whole tables.

From changed rows, or from the keys of a view, the rows that they can meet are found along the equal columns of a join
graph. They are few, so they are read on the driver and given to Spark as they are: planning a read of a Delta table
takes Spark longer than all the rest of a small step. The rows at the earlier cut are those at the later one, with the
old rows in place of the changed ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.view_sql.join_graph import ColumnOf, JoinGraph
from pipelines.sinks.delta.merge_source import comparable
from pipelines.sinks.delta.table_version import PLACE, RowsNotReadable

MOST_ROWS: Final = 200_000
"""Maximum rows that are read for one step; above, Spark reads the tables."""


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """The changed rows of one input: as they were, and as they are."""

    old: pa.Table
    new: pa.Table


class InputTable(Protocol):
    """One version of an input, as `TableVersion` reads it."""

    @property
    def columns(self) -> pa.Schema: ...

    def rows(self, column: str, values: pa.ChunkedArray) -> pa.Table:
        """Return the rows whose value in a column is one of `values`; a null matches no row."""


class NeededRows:
    """Reads rows of the inputs at the later cut of a step."""

    def __init__(self, graph: JoinGraph, tables: Mapping[str, InputTable], changes: Mapping[str, ChangedRows]) -> None:
        """tables: topic → table at the later cut. changes: topic → changed rows of the step."""
        self._graph = graph
        self._tables = tables
        self._changes = changes
        self._read = 0

    def meeting(self) -> dict[str, pa.Table]:
        """Return topic → rows that changed rows can meet in a join at one of the cuts, the changed rows among them."""
        found = self._none()
        for alias, topic in self._graph.tables.items():
            if topic in self._changes:
                change = self._changes[topic]
                self._follow(alias, _BothCuts(change.old, change.new), found)
        return {topic: _once(parts) for topic, parts in found.items()}

    def affected_keys(self, key: Sequence[str]) -> pa.Table | None:
        """Return the keys of the view that the changed rows can meet at one of the cuts, each once.

        They are the affected keys, and keys of rows that WHERE leaves out or that stay as they are. key: names of the
        key columns. None if they are not columns of one table that every row shows, if equal keys may have different
        bits, as -0 and 0 have, or if one is NULL, which WHERE should leave out.
        """
        columns = [self._graph.key[name] for name in key if name in self._graph.key]
        if len(columns) < len(key) or len({column.alias for column in columns}) > 1:
            return None
        owner = columns[0].alias
        types = [self._tables[self._graph.tables[owner]].columns.field(column.column).type for column in columns]
        if owner not in self._graph.required or any(map(pa.types.is_floating, types)):
            return None
        schema = pa.schema(zip(key, types, strict=True))
        parts = [schema.empty_table()]
        for alias, topic in self._graph.tables.items():
            if topic in self._changes:
                for rows in self._meeting_keys(alias, owner, columns):
                    values = [_as_type(one, field.type) for one, field in zip(rows.columns, schema, strict=True)]
                    parts.append(pa.Table.from_arrays(values, schema=schema))
        found = pa.concat_tables(parts)
        return None if any(one.null_count for one in found.columns) else found.group_by([*key]).aggregate([])

    def _meeting_keys(self, alias: str, owner: str, columns: Sequence[ColumnOf]) -> Iterator[pa.Table]:
        """Yield values of some columns of the table `owner`, of the rows that changed rows of a table can meet."""
        change = self._changes[self._graph.tables[alias]]
        rows = _BothCuts(change.old, change.new)
        path = self._graph.path(alias, owner)
        for step in path:
            if step is path[-1] and [step.wanted] == [*columns]:  # the values are known without the rows
                for side in rows:
                    yield side.select([step.known.column]).filter(side[step.known.column].is_valid())
                return
            rows = self._rows(step.wanted, [side[step.known.column] for side in rows])
        for side in rows:
            yield side.select([column.column for column in columns])

    def of_keys(self, keys: pa.Table) -> dict[str, pa.Table]:
        """Return topic → rows from which the rows of a view with these keys are computed."""
        name = next((name for name in keys.column_names if name in self._graph.key), None)
        if name is None or keys[name].null_count:
            raise RowsNotReadable("the key of the view is no column of a table")
        start, found = self._graph.key[name], self._none()
        self._follow(start.alias, self._rows(start, [keys[name]]), found)
        return {topic: _once(parts) for topic, parts in found.items()}

    def _none(self) -> dict[str, list[pa.Table]]:
        return {topic: [table.columns.empty_table()] for topic, table in self._tables.items()}

    def _follow(self, alias: str, rows: _BothCuts, found: dict[str, list[pa.Table]]) -> None:
        """Add rows of the later cut, and those of all other tables that they or the old rows can meet."""
        known = {alias: rows}
        for step in self._graph.steps(alias):
            values = [side[step.known.column] for side in known[step.known.alias]]
            known[step.wanted.alias] = self._rows(step.wanted, values)
        for one, its_rows in known.items():
            found[self._graph.tables[one]].append(its_rows.later)

    def _rows(self, column: ColumnOf, values: Sequence[pa.ChunkedArray]) -> _BothCuts:
        """Return the rows whose column has one of the values."""
        topic = self._graph.tables[column.alias]
        column_type = self._tables[topic].columns.field(column.column).type
        wanted = pa.chunked_array([chunk for one in values for chunk in _as_type(one, column_type).chunks], column_type)
        later = self._tables[topic].rows(column.column, wanted)
        self._read += later.num_rows
        if self._read > MOST_ROWS:
            raise RowsNotReadable("a step needs too many rows")
        change = self._changes.get(topic)
        old = later.slice(0, 0) if change is None else change.old
        found = pc.is_in(comparable(old[column.column]), comparable(wanted.cast(old[column.column].type)))
        return _BothCuts(old.filter(found), later)


class _BothCuts(NamedTuple):
    """Rows of one table: old rows that changed, and all rows at the later cut."""

    old: pa.Table
    later: pa.Table


class RowsOfCuts(NamedTuple):
    """Rows of one table: those that both cuts have, and those that only one of them has."""

    both: pa.Table
    earlier: pa.Table
    later: pa.Table

    @classmethod
    def of(cls, rows: pa.Table, change: ChangedRows | None) -> Self:
        """Divide rows of the later cut by the changes; the earlier cut has all old rows in place of the new ones."""
        if change is None:
            return cls(rows, rows.slice(0, 0), rows.slice(0, 0))
        both = _without(rows, change.new)
        return cls(both, change.old, _without(rows, both))


def _as_type(values: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """Convert values to the type of a column to which they are equal.

    Raises RowsNotReadable for types whose values Spark would convert before it compares them: the text '007' is equal
    to the number 7, which would not find it.
    """
    if values.type != wanted and not (pa.types.is_integer(values.type) and pa.types.is_integer(wanted)):
        raise RowsNotReadable(f"a column of type {values.type} is equal to one of type {wanted}")
    try:
        return values.cast(wanted)
    except pa.ArrowInvalid:
        pass  # raised outside of the handler, because Arrow's message contains the value
    raise RowsNotReadable(f"a value is outside of the range of {wanted}")


def _once(parts: Sequence[pa.Table]) -> pa.Table:
    """Concatenate parts that may have the same rows, and leave each row once. A row has a place of its own."""
    rows = pa.concat_tables(parts).combine_chunks()
    first = _numbered(rows).group_by([*PLACE]).aggregate([("row", "min")])["row_min"]
    return rows.take(first)


def _without(rows: pa.Table, others: pa.Table) -> pa.Table:
    """Leave out the rows that `others` has."""
    kept = _numbered(rows).join(others.select([*PLACE]), [*PLACE], join_type="left anti")
    return rows.take(kept["row"])


def _numbered(rows: pa.Table) -> pa.Table:
    return rows.select([*PLACE]).append_column("row", pa.array(np.arange(rows.num_rows)))
