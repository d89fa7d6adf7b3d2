"""The computation of one view from one cut of its inputs to a later one.

It only reads, and keeps the changes of the view until the log of views takes them. So it may take long, in a thread of
its own, while the log of views gets the changes of other views.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from threading import Event
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import structlog

from cdc.config.views import View
from cdc.errors import SinkUnavailable, ViewFailed, ViewNotDeterministic, ViewOrderUndeclared
from cdc.log.computed_views import ComputedView
from cdc.table import TableSchema
from cdc.targets.hidden_columns import with_moved_names
from cdc.view_sql.view_query import ViewQuery
from pipelines.runtime.query_checks import changes_with_time, float_aggregates
from pipelines.views.affected_rows import KEYS_AT_ONCE, AffectedRows, ChangedInputs
from pipelines.views.changed_rows import CHANGED_ROWS, all_new, check_key, differences
from pipelines.views.kept_rows import check_time, old_rows, view_rows
from pipelines.views.large_build import LargeBuild, LargeBuilder, count_rows, number_of_parts
from pipelines.views.log_of_views import LogAsOf, ViewCommit
from pipelines.views.row_buffer import RowBuffer
from pipelines.views.view_columns import result_fields, view_schema
from pipelines.views.view_inputs import InputRemoved, ViewInputs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

INCREMENTAL: Final = "incremental"
WHOLE: Final = "whole"
LARGE: Final = 2_000_000
"""`ComputationLimits.large`: for fewer rows, Python takes too long to start on executors. The driver has the rows of
smaller views, as typed columns and as texts, and those that the log has of them.
"""
MOST_KEYS: Final = 500_000
"""`ComputationLimits.keys`: ten slices. For more, a query of each slice over whole tables takes longer than one query
of all keys, and the keys would need memory of the driver.
"""
_SUMS: Final = frozenset({"sum", "try_sum", "avg", "mean", "try_avg"})
_EXACT: Final = "let the aggregate add exact numbers, as sum(CAST(x AS DECIMAL(38, 9))) does"
_WITHOUT: Final = "leave the aggregate out, and let readers compute it from counts and from sums of DECIMAL values"

log = structlog.get_logger("views")


class ComputationStopped(Exception):
    """Raised in a computation that nobody waits for any more."""


@dataclass(slots=True)
class Work:
    """What a computation has done, and what is left."""

    mode: str = ""
    """`incremental` or `whole`; empty if no query was run."""
    input_rows: int = 0
    """Number of changed rows of its inputs; those of an input of which every row may have changed are not counted."""
    affected_keys: int = 0
    """Number of affected keys whose rows were computed."""
    keys_left: int | None = 0
    """Number of affected keys that are left; None: not known, as while the whole view is computed."""
    seconds: float = 0.0
    seconds_left: float | None = 0.0
    """Estimated time that the keys that are left take; None: not known."""


@dataclass(frozen=True, slots=True)
class ComputationLimits:
    """How much is computed at once."""

    keys_at_once: int = KEYS_AT_ONCE
    """Maximum number of affected keys in one slice."""
    keys: int = MOST_KEYS
    """Maximum number of affected keys of a step that come to the driver; executors compute a step with more."""
    large: int = LARGE
    """Number of rows, of its inputs, of its result, or in its log, from which executors compute a whole view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewTask:
    """What to compute: one view, at a cut."""

    view: View
    query: ViewQuery
    relation: int
    """Number of the view in the log of views."""
    versions: Sequence[TableSchema]
    """Every version of the view in the log of views, oldest first."""
    known: TableSchema | None
    """The version of its rows in the log of views; None if they cannot be used."""
    earlier: ComputedView | None
    """What its rows in the log of views were computed from; None if they cannot be used."""
    result: ComputedView
    """What the rows are computed from."""
    schemas: Mapping[str, TableSchema]
    """Topic → source table of each input at the cut."""
    changes: Mapping[str, pa.Array] | None
    """Topic of each changed input → keys of its rows that may have changed; None: the whole view is computed."""
    limits: ComputationLimits
    log: LogAsOf
    """The log of views with the rows of the view."""
    on_slice: Callable[[str, Work], None]
    """Called with the name of the view after each slice of the affected keys."""


class ViewComputation:
    """Computes one view once: `run` in any thread, then `add_to` in the thread that writes the log of views."""

    def __init__(self, task: ViewTask) -> None:
        self.task, self.work = task, Work()
        self.began_at = datetime.now(UTC)
        self.is_stopped = Event()
        """Set when nobody waits for the result any more."""
        self._rows = RowBuffer(CHANGED_ROWS)
        self._built: list[LargeBuild] = []
        self._schema = task.known
        """The version of the view whose rows are computed."""

    def run(self, inputs: ViewInputs) -> None:
        """Compute the changes of the view.

        Raises the errors of a view, and SinkUnavailable if the tables at the cut were removed meanwhile.
        """
        began = time.monotonic()
        try:
            self._compute(inputs)
        except BaseException:
            self.discard()
            raise
        if self.work.mode:
            self.work.seconds = time.monotonic() - began

    def add_to(self, commit: ViewCommit) -> ComputedView:
        """Add the changes to a commit of the log of views, and return what the rows of the view are computed from."""
        task, schema = self.task, self._schema
        assert schema is not None  # noqa: S101 - it has run
        is_new = schema != task.known
        if is_new:
            commit.add_version(schema)
        for rows in chain(self._rows.take(), *(build.take() for build in self._built)):
            commit.add_rows(schema, rows)
        if is_new:
            commit.end_build(schema)
        return task.result

    def discard(self) -> None:
        """Forget the changes."""
        self._rows.clear()
        while self._built:
            self._built.pop().remove()

    def _compute(self, inputs: ViewInputs) -> None:
        """Compute the changes from the changed rows of the inputs, or of the whole view where that is not possible."""
        view = self.task.view.name
        if self.task.changes is not None:
            try:
                self._compute_changes(self.task.changes, inputs)
                return
            except InputRemoved as exc:
                log.warning("old rows were removed: the whole view is computed", view=view, reason=str(exc))
                self.discard()
        try:
            self._compute_whole(inputs)
        except InputRemoved as exc:
            raise SinkUnavailable(
                f"what view {view!r} reads was removed meanwhile: {exc}",
                remedy="nothing: the view is computed again, from a later version",
            ) from exc

    def _compute_whole(self, inputs: ViewInputs) -> None:
        """Compute the whole view, and its differences from the rows in the log, or all rows for a new version."""
        task, self.work.mode = self.task, WHOLE
        sql, floor = task.query.whole(inputs.register(task.result.inputs, "b")), task.result.floor
        result = inputs.session.sql(sql)
        _refuse_changing_results(task.view.name, result)
        self._schema = schema = self._new_version(result_fields(task.view.name, result.schema))
        is_first, limit = schema != task.known, task.limits.large
        rows_of_inputs = count_rows(task.result.inputs.values())
        if rows_of_inputs is not None and max(rows_of_inputs, task.log.row_count(schema)) < limit:
            found = inputs.rows(sql, limit)
            if found.num_rows < limit:
                rows = _unique_rows(found, schema, floor)
                self._rows.add(all_new(rows) if is_first else differences(task.log.rows(schema), rows))
                return
        builder = self._builder(inputs, schema)
        with inputs.reading():
            self._built.append(builder.all_new(result) if is_first else builder.differences_from_log(result))

    def _builder(self, inputs: ViewInputs, schema: TableSchema) -> LargeBuilder:
        """Return what computes changes of the view by executors."""
        task, session = self.task, inputs.session
        parts = number_of_parts(session, count_rows(task.result.inputs.values()), task.log.row_count(schema))
        return LargeBuilder(session, schema, task.result.floor, task.log, parts)

    def _remove_old(self, inputs: ViewInputs, known: TableSchema, floor: int) -> None:
        """Delete the rows that the log has of the view, and that are old now."""
        if self.task.log.row_count(known) >= self.task.limits.large:
            self._built.append(self._builder(inputs, known).removed_from_log(floor))
            return
        in_log = self.task.log.rows(known)
        self._rows.add(differences(old_rows(in_log, known, floor), in_log.slice(0, 0)))

    def _compute_changes(self, changes: Mapping[str, pa.Array], inputs: ViewInputs) -> None:
        """Compute the rows of the affected keys at both cuts, and their differences."""
        task = self.task
        work = self.work
        began = time.monotonic()
        known = task.known
        earlier = task.earlier
        floor = task.result.floor
        assert known is not None and earlier is not None  # noqa: PT018, S101 - their changes are computed
        if floor is not None and floor != earlier.floor:
            self._remove_old(inputs, known, floor)
        if not changes:
            return
        work.mode = INCREMENTAL
        keys = {topic: inputs.typed_keys(found, task.schemas[topic]) for topic, found in changes.items()}
        work.input_rows = sum(found.num_rows for found in keys.values())
        affected = AffectedRows(
            task.query, inputs, ChangedInputs(earlier.inputs, task.result.inputs, keys), task.limits.keys_at_once
        )
        if not affected.find_keys(task.limits.keys):
            self._compute_large_step(affected, inputs, known)
            return
        for number, (old, new) in enumerate(affected.pairs(), 1):
            if self.is_stopped.is_set():
                raise ComputationStopped
            self._check_columns(new.schema, known)
            self._rows.add(differences(_unique_rows(old, known, floor), _unique_rows(new, known, floor)))
            work.affected_keys = min(number * task.limits.keys_at_once, affected.number)
            keys_left = affected.number - work.affected_keys
            work.keys_left = keys_left
            work.seconds_left = (time.monotonic() - began) / work.affected_keys * keys_left
            task.on_slice(task.view.name, work)

    def _compute_large_step(self, affected: AffectedRows, inputs: ViewInputs, known: TableSchema) -> None:
        """Compute the rows of all affected keys and their differences by executors."""
        with affected.results() as (old, new), inputs.reading():
            self._check_columns(result_fields(self.task.view.name, new.schema), known)
            self._built.append(self._builder(inputs, known).differences(old, new))
        self.work.affected_keys = affected.number
        self.work.keys_left = 0
        self.work.seconds_left = 0.0
        self.task.on_slice(self.task.view.name, self.work)

    def _check_columns(self, fields: pa.Schema, known: TableSchema) -> None:
        if self._new_version(fields) != known:
            raise ViewFailed(f"the columns of view {self.task.view.name!r} changed with those of its tables")

    def _new_version(self, fields: pa.Schema) -> TableSchema:
        view = self.task.view
        schema = view_schema(self.task.relation, view.name, view.key, fields, self.task.versions)
        schema = with_moved_names(schema, self.task.schemas.values())
        if view.keep is not None:
            check_time(schema)
        return schema


def _unique_rows(result: pa.Table, schema: TableSchema, floor: int | None) -> pa.Table:
    """Do as `view_rows`; raise ViewKeyNotUnique if two rows have the same key."""
    rows = view_rows(result, schema, floor)
    check_key(rows, schema)
    return rows


def _refuse_changing_results(view: str, result: DataFrame) -> None:
    """Raise ViewNotDeterministic or ViewOrderUndeclared for what only the types of the columns show."""
    if changes_with_time(result):
        raise ViewNotDeterministic(
            f"view {view!r} converts a text such as 'today' to a date or a time, which is another one every day",
            remedy="compute the time from columns, or compare with a text that has a year",
        )
    names = float_aggregates(result)
    if names:
        raise ViewOrderUndeclared(
            f"view {view!r}: the result of {names[0]} over floating-point numbers depends on the order of the rows",
            remedy=_EXACT if names[0] in _SUMS else _WITHOUT,
        )
