"""A lake with tables and views: a query that names both reads them at one position.

Tables and views have published cuts of their own, because a view is computed from a cut of its tables and follows a
little later. Both kinds of cuts are kept for the same positions (`pipelines/sinks/delta/published_cuts_table.py`). A
query that names tables and views reads the newest position of which both have a cut, and at which each view that it
names was computed. The log of views says which views were: one whose computation takes long is behind the others.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from cdc.bucket_files import Root
from cdc.config.delta_sink import DeltaSinkDefinition
from cdc.errors import CutUnavailable
from cdc.log.computed_views import ComputedFrom, cut_of_commit
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.targets.lake_reader import Lake, Moment, ReadAt, bind_tables, tables_by_shared_target
from cdc.targets.published_record import Published, TableRecord
from cdc.targets.target_rule_changes import TargetRules

_WAIT: Final = (
    "see 'cdc views ls' for what the views wait for; query tables and views apart, or read both with '--at latest'"
)


class LakeWithViews(Lake):
    """Reads the Delta targets of a sink of tables, and those of the sink of views next to it."""

    def __init__(self, tables: DeltaSinkDefinition, views: DeltaSinkDefinition, log_of_views: Root) -> None:
        super().__init__(tables.path, TargetRules.of(tables), tables.record_uri)
        self._views, self._log_of_views = Lake.of(views), log_of_views

    def tables(self) -> list[TableRecord]:
        """Return the tables and the views of the published records, sorted by topic."""
        return sorted([*super().tables(), *self._views.tables()], key=lambda table: table.topic)

    def cut_for(self, sql: str, at: ReadAt | Moment = ReadAt.PUBLISHED) -> Published:
        """Return the record of the cut that a statement reads, with all tables and views that it names.

        Raises the errors of `cut`, and CutUnavailable if tables and views have no cut in common.
        """
        tables, views = super().tables(), self._views.tables()
        topics = {
            **{name: name for name in tables_by_shared_target([*tables, *views])},
            **{table.topic: table.topic for table in (*tables, *views)},
        }
        named = set(bind_tables(sql, topics)[1].values())
        named_views = named & {view.topic for view in views}
        if not named_views:
            return self.cut(at)
        if named == named_views:
            return self._views.cut(at)
        return self._common_cut(named_views, at)

    def _common_cut(self, views: Collection[str], at: ReadAt | Moment) -> Published:
        """Return the newest cut of the tables at which each of these views was computed, with the rows of the views."""
        computed = self._computed()
        commits = {
            cut_of_commit(cut.position): cut.position
            for cut in self._views.cuts()
            if all(computed.was_at(view, cut.position) for view in views)
        }
        newest = self.cut(at).position
        common = [
            cut.position for cut in self.cuts() if cut.position <= newest and cut_of_commit(cut.position) in commits
        ]
        if not common:
            raise CutUnavailable(
                f"the tables and the views {', '.join(map(repr, sorted(views)))} have no kept cut in common at or "
                f"before {Position(newest)}",
                remedy=_WAIT,
            )
        tables = self.cut(Position(common[-1]))
        rows = self._views.cut(Position(commits[cut_of_commit(common[-1])]))
        return Published(tables.position, tables.committed_at, {**tables.tables, **rows.tables})

    def _computed(self) -> ComputedFrom:
        last = LogReader(self._log_of_views).last_commit
        return ComputedFrom.from_json("" if last is None else last.views)
