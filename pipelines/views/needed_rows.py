"""The rows of the inputs that a step needs, read by their keys and join columns instead of with whole tables.

From changed rows, or from the keys of a view, the rows that they can meet are found along the equal columns of a join
graph. They are few, so they are read on the driver and given to Spark as they are: planning a read of a Delta table
takes Spark longer than all the rest of a small step. The rows at the earlier cut are those at the later one, with the
old rows in place of the changed ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.view_sql.join_graph import ColumnOf, JoinGraph
from pipelines.sinks.delta.merge_source import comparable
from pipelines.sinks.delta.table_version import PLACE, RowsNotReadable, TableVersion

MOST_ROWS: Final = 200_000
"""Maximum rows that are read for one step; above, Spark reads the tables."""


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """The changed rows of one input: as they were, and as they are."""

    old: pa.Table
    new: pa.Table


class NeededRows:
    """Reads rows of the inputs at the later cut of a step."""

    def __init__(
        self, graph: JoinGraph, tables: Mapping[str, TableVersion], changes: Mapping[str, ChangedRows]
    ) -> None:
        """tables: topic → table at the later cut. changes: topic → changed rows of the step."""
        self._graph, self._tables, self._changes = graph, tables, changes
        self._read = 0

    def meeting(self) -> dict[str, pa.Table]:
        """Return topic → rows that changed rows can meet in a join at one of the cuts, the changed rows among them."""
        found = self._none()
        for alias, topic in self._graph.tables.items():
            if topic in self._changes:
                change = self._changes[topic]
                self._follow(alias, _BothCuts(change.old, change.new), found)
        return {topic: _once(parts) for topic, parts in found.items()}

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
        steps = self._graph.steps(alias)
        if steps is None:
            raise RowsNotReadable("a table has no equal column")
        known = {alias: rows}
        for step in steps:
            values = [side[step.known.column] for side in known[step.known.alias]]
            known[step.wanted.alias] = self._rows(step.wanted, values)
        for one, its_rows in known.items():
            found[self._graph.tables[one]].append(its_rows.later)

    def _rows(self, column: ColumnOf, values: Sequence[pa.ChunkedArray]) -> _BothCuts:
        """Return the rows whose column has one of the values."""
        topic = self._graph.tables[column.alias]
        wanted = pa.chunked_array([chunk for one in values for chunk in one.chunks], values[0].type)
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


def at_the_earlier_cut(rows: Mapping[str, pa.Table], changes: Mapping[str, ChangedRows]) -> dict[str, pa.Table]:
    """Return rows of the later cut with the old rows of every change in place of the new ones."""
    found = {}
    for topic, its_rows in rows.items():
        change = changes.get(topic)
        found[topic] = its_rows if change is None else _once([change.old, _without(its_rows, change.new)])
    return found


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
