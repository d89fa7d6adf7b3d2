"""The rows of a view that changed inputs can have changed, computed at the cuts before and after the changes.

Few changes are computed from the rows that they need, which the driver reads (`needed_rows.py`). Otherwise, and for SQL
without a join graph, Spark reads the tables at the versions of both cuts. Both ways give the same rows.

The rows of a key are computed at both cuts and compared, so a key too many does no harm. Where the driver finds the
keys without Spark, a step runs one query of Spark instead of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from cdc.log.computed_views import InputVersion
from cdc.view_sql.changed_keys import InputsAtCut
from cdc.view_sql.join_graph import JoinGraph
from cdc.view_sql.view_query import ViewQuery
from pipelines.sinks.delta.table_version import RowsNotReadable, TableVersion
from pipelines.views.followed_inputs import FollowedInputs, opened
from pipelines.views.needed_rows import ChangedRows, NeededRows, RowsOfCuts
from pipelines.views.view_inputs import OWN_COLUMNS, CutNames, ViewInputs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEYS_AT_ONCE: Final = 50_000
"""Maximum number of affected keys whose rows are computed at once."""
_KEYS: Final = "affected_keys"


@dataclass(frozen=True, slots=True)
class ChangedInputs:
    """The inputs of one view at two cuts, and the keys of their rows that may have changed."""

    before: Mapping[str, InputVersion]
    after: Mapping[str, InputVersion]
    keys: Mapping[str, pa.Table]
    """Topic of each changed input → keys, with the names and types of the key columns of its target."""


class AffectedRows:
    """Computes rows of one view for one step."""

    def __init__(
        self, query: ViewQuery, inputs: ViewInputs, changed: ChangedInputs, keys_at_once: int = KEYS_AT_ONCE
    ) -> None:
        self._query = query
        self._inputs = inputs
        self._changed = changed
        self._keys_at_once = keys_at_once
        self._few = _FewRows.of(query, inputs.followed, changed)
        self._keys: pa.Table | None = None
        self.number = 0
        """Number of the affected keys."""

    def find_keys(self, most: int) -> bool:
        """Find the affected keys; return False, and have none of them on the driver, if there are more than `most`."""
        found = self._affected_keys_of_few()
        if found is None:
            found = self._inputs.rows(self._query_of_keys(), limit=most + 1)
        self.number = found.num_rows
        self._keys = None if self.number > most else found
        return self._keys is not None

    def pairs(self) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Yield the rows of some affected keys before and after the changes, until all are done.

        `find_keys` has found the keys.
        """
        keys = self._keys
        assert keys is not None  # noqa: S101 - they were found
        for first in range(0, keys.num_rows, self._keys_at_once):
            some = keys.slice(first, self._keys_at_once)
            self._inputs.register_table(some, _KEYS)
            names = self._names_for(some)
            before, after = (self._query.of_keys(named, _KEYS) for named in (names.before, names.after))
            yield self._inputs.both(before, after, are_few=names.are_few)

    @contextmanager
    def results(self) -> Iterator[tuple[DataFrame, DataFrame]]:
        """Yield the rows of all affected keys before and after the changes, which executors compute.

        Executors keep the keys until the block ends.
        """
        from pyspark import StorageLevel

        session = self._inputs.session
        keys = session.sql(self._query_of_keys()).persist(StorageLevel.DISK_ONLY)
        try:
            with self._inputs.reading():
                self.number = keys.count()
            keys.createOrReplaceTempView(_KEYS)
            names = self._whole_tables()
            yield (
                session.sql(self._query.of_keys(names.before, _KEYS)),
                session.sql(self._query.of_keys(names.after, _KEYS)),
            )
        finally:
            keys.unpersist()

    def _affected_keys_of_few(self) -> pa.Table | None:
        """Return the affected keys if the driver finds them from few rows."""
        if self._few is None:
            return None
        try:
            return self._few.needed().affected_keys(self._query.key)
        except RowsNotReadable:
            self._few = None
            return None

    def _query_of_keys(self) -> str:
        queries, at_cuts = [], self._names_for_changes()
        for number, topic in enumerate(sorted(self._changed.keys)):
            cuts = []
            for side, names in (("a", at_cuts.before), ("b", at_cuts.after)):
                changed = f"changed_{side}_{number}"
                if self._few is None:
                    self._inputs.register_rows(names[topic], self._changed.keys[topic], changed)
                else:
                    change = self._few.changes[topic]
                    self._inputs.register_table(_shown(change.old if side == "a" else change.new), changed)
                cuts.append(InputsAtCut(names, changed))
            queries.append(self._query.affected_keys(topic, *cuts))
        return " UNION ".join(f"({query})" for query in queries)

    def _names_for_changes(self) -> CutNames:
        if self._few is not None:
            try:
                return self._registered(self._few.needed().meeting())
            except RowsNotReadable:
                self._few = None
        return self._whole_tables()

    def _names_for(self, keys: pa.Table) -> CutNames:
        if self._few is not None:
            try:
                return self._registered(self._few.needed().of_keys(keys))
            except RowsNotReadable:
                pass
        return self._whole_tables()

    def _registered(self, rows: Mapping[str, pa.Table]) -> CutNames:
        assert self._few is not None  # noqa: S101 - its rows were read
        found = {topic: RowsOfCuts.of(its_rows, self._few.changes.get(topic)) for topic, its_rows in rows.items()}
        return self._inputs.register_cuts(
            {topic: RowsOfCuts(*map(_shown, its_rows)) for topic, its_rows in found.items()}
        )

    def _whole_tables(self) -> CutNames:
        return CutNames(
            self._inputs.register(self._changed.before, "a"), self._inputs.register(self._changed.after, "b")
        )


@dataclass(frozen=True, slots=True)
class _FewRows:
    """The changed rows, and the tables from which the rows that they meet are read."""

    graph: JoinGraph
    tables: Mapping[str, TableVersion]
    changes: Mapping[str, ChangedRows]

    @classmethod
    def of(cls, query: ViewQuery, followed: FollowedInputs, changed: ChangedInputs) -> _FewRows | None:
        """Read the changed rows; None if the SQL has no join graph, or if the driver cannot read the tables."""
        try:
            tables = {topic: opened(changed.after[topic]) for topic in query.inputs}
            shown = {
                topic: [name for name in t.columns.names if name not in OWN_COLUMNS] for topic, t in tables.items()
            }
            graph = JoinGraph.of(query.sql, query.key, shown)
            if graph is None:
                return None
            changes = {
                topic: followed.changed_rows(changed.before[topic], tables[topic], keys)
                for topic, keys in changed.keys.items()
            }
        except RowsNotReadable:
            return None
        return cls(graph, tables, changes)

    def needed(self) -> NeededRows:
        return NeededRows(self.graph, self.tables, self.changes)


def _shown(rows: pa.Table) -> pa.Table:
    """Return rows of a target with the columns that views see."""
    return rows.select([name for name in rows.column_names if name not in OWN_COLUMNS])
