"""The view engine: computes what changed in the views from one cut of their inputs to the next, and logs it.

For the range (a, b] of positions, and for each view:

1. the change log says which rows of the inputs changed; their old rows are read at cut a, their new rows at cut b
2. from these rows follow the keys of view rows that can have changed, at a and at b
3. the view is computed for these keys only, at a and at b
4. the differences become one commit of the log of views, at position b

A view at b is therefore its SQL over the inputs at b. The engine keeps no state: the old rows are computed again. Where
old inputs are not readable any more, where every row of an input may have changed, and for SQL that does not allow step
2, the whole view is computed at b and compared with its rows in the log.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

import pyarrow as pa
import structlog
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc.config import DeltaSinkDefinition, rule_of, table_settings
from cdc.config.views import View
from cdc.errors import CdcError, Reaction, SinkUnavailable, ViewFailed
from cdc.log.disk_format import CommitSource
from cdc.log.reader import LogReader
from cdc.stores.published_record import Published
from cdc.table import TableSchema, TableState
from cdc.view_sql.view_query import ViewQuery, queries_of
from pipelines.views.affected_rows import KEYS_AT_ONCE, AffectedRows, ChangedInputs
from pipelines.views.changed_rows import all_new, check_key, differences
from pipelines.views.input_changes import KeysByRelation, changed_keys, cut_of, distinct, usable_inputs
from pipelines.views.kept_rows import check_time, floor_at, old_rows, without_old
from pipelines.views.log_of_views import ComputedFrom, ComputedView, Cut, InputVersion, LogOfViews, ViewCommit
from pipelines.views.view_columns import view_images, view_keys, view_schema
from pipelines.views.view_inputs import InputRemoved, ViewInputs

TRY_AGAIN: Final = 60.0
"""Seconds after which a view that failed is computed again, if nothing that it depends on changed before."""

log = structlog.get_logger("views")


@dataclass(frozen=True, slots=True)
class _Step:
    """One step from cut a to cut b."""

    cut: Cut
    before: ComputedFrom
    """What the log of views was computed from, at a."""
    inputs: Mapping[str, InputVersion]
    """Topic → version of each input that is complete at b."""
    schemas: Mapping[str, TableSchema]
    """Topic → source table of each input at b."""
    changes: Mapping[str, pa.Array | None]
    """Topic of each changed input → keys of its rows that may have changed; None: every row may have."""


@dataclass(slots=True)
class ViewFigures:
    """What the engine did for one view in the last step."""

    state: str = "waiting"
    """`live`, `waiting` for its inputs, `paused`, or `failed`."""
    reason: str = ""
    position: int = 0
    """The position of the inputs of which its rows are the result."""
    changed_rows: int = 0
    """Number of changes that were logged."""
    input_rows: int = 0
    """Number of changed rows of its inputs; those of an input of which every row may have changed are not counted."""
    affected_keys: int = 0
    mode: str = ""
    """How it was computed: `incremental` or `whole`; empty if it was not computed."""
    seconds: float = 0.0
    keys_left: int = 0
    """Number of affected keys that a computation in slices has not done yet."""
    seconds_left: float = 0.0
    """Estimated time that they take."""

    def begin(self) -> None:
        """Forget the numbers of the step before."""
        self.input_rows = self.affected_keys = self.keys_left = 0
        self.mode, self.seconds, self.seconds_left = "", 0.0, 0.0


@dataclass(slots=True)
class _Failure:
    """Why a view cannot be computed, and what may change that."""

    depends_on: object
    due: float


class ViewEngine:
    """The views of one pipeline; one thread calls `advance`."""

    def __init__(
        self,
        views: Sequence[View],
        sink: DeltaSinkDefinition,
        log_of_views: LogOfViews,
        change_log: LogReader,
        session: SparkSession,
    ) -> None:
        """sink: the sink whose targets are the inputs. Raises the errors of `queries_of`."""
        self._views, self._sink, self._log, self._change_log = views, sink, log_of_views, change_log
        self._queries = queries_of(views)
        self._inputs = ViewInputs(session, sink)
        self._failures: dict[str, _Failure] = {}
        self._refreshed_at: dict[str, float] = {}
        self._requested: set[str] = set()
        """Views to compute as a whole in the next step, because somebody asked for it."""
        self.paused: frozenset[str] = frozenset()
        """Views that are not computed. Afterwards each is computed as a whole, and its differences are logged."""
        self.keys_at_once = KEYS_AT_ONCE
        """Maximum number of affected keys in one slice."""
        self.on_slice: Callable[[str, ViewFigures], None] = lambda _view, _figures: None
        """Called after each slice of the affected keys of a view."""
        self._relations = _numbered([view.name for view in views], log_of_views.schemas())
        self._fingerprints = {view.name: _fingerprint(view, self._queries[view.name], sink) for view in views}
        self.figures = {view.name: ViewFigures() for view in views}

    def refresh(self, name: str) -> None:
        """Compute a view as a whole in the next step."""
        self._requested.add(name)
        self._failures.pop(name, None)

    def advance(self, record: Published, source: CommitSource) -> bool:
        """Compute the views at a published cut of the inputs; return False if they already are at or after it.

        source: the source server of the change log.
        """
        cut = cut_of(record)
        if cut.position <= self._log.position:
            return False
        step = self._step(record, cut)
        commit, computed = self._log.begin(cut), dict[str, ComputedView]()
        for view in self._views:
            found = self._compute(view, step, commit)
            if found is not None:
                computed[view.name] = found
        commit.commit(source, ComputedFrom(step.inputs, computed))
        self._inputs.keep_only(step.inputs)
        for view in self._views:
            figures = self.figures[view.name]
            figures.position = computed[view.name].position if view.name in computed else figures.position
            figures.changed_rows = commit.rows.get(view.name, 0)
        return True

    def _step(self, record: Published, cut: Cut) -> _Step:
        before = self._log.computed_from
        wanted = {topic for query in self._queries.values() for topic in query.inputs}
        inputs = usable_inputs(record, wanted)
        schemas = {
            table.topic: TableSchema.from_json(table.schema)
            for table in record.tables.values()
            if table.topic in inputs and table.schema is not None
        }
        self._change_log.refresh()
        by_relation = changed_keys(
            self._change_log, self._log.position, cut.position, [found.relation for found in inputs.values()]
        )
        changes = {
            topic: found
            for topic, version in inputs.items()
            if (found := _changes_of(version, before.inputs.get(topic), by_relation)) is None or len(found)
        }
        return _Step(cut, before, inputs, schemas, changes)

    def _compute(self, view: View, step: _Step, commit: ViewCommit) -> ComputedView | None:
        """Add the changes of one view to the commit, and return how they were computed; None if they could not be."""
        figures, began = self.figures[view.name], time.monotonic()
        figures.begin()
        if view.name in self.paused:
            figures.state, figures.reason = "paused", f"paused: run 'cdc views resume {view.name}'"
            return step.before.views.get(view.name)
        depends_on = (tuple(step.inputs), tuple(step.schemas.values()))
        failure = self._failures.get(view.name)
        if failure is not None and failure.depends_on == depends_on and began < failure.due:
            return None
        try:
            found = self._computed(view, step, commit)
        except (CdcError, PySparkException) as exc:
            if isinstance(exc, CdcError) and exc.reaction is not Reaction.QUARANTINE:
                raise
            error = exc if isinstance(exc, CdcError) else _error_of(view, exc)
            self._failures[view.name] = _Failure(depends_on, began + TRY_AGAIN)
            figures.state, figures.reason = "failed", f"{error.code} {error.message}"
            figures.keys_left, figures.seconds_left = 0, 0.0
            log.exception(
                "a view stopped; the other views continue",
                view=view.name,
                reason=figures.reason,
                exc_info=None if isinstance(exc, CdcError) else exc,
            )
            self._mark(view, commit, TableState.NEEDS_RESYNC, figures.reason)
            return None
        self._failures.pop(view.name, None)
        figures.seconds = time.monotonic() - began if figures.mode else 0.0
        if found is not None:
            figures.state, figures.reason = "live", ""
        return found

    def _computed(self, view: View, step: _Step, commit: ViewCommit) -> ComputedView | None:
        """Do as `_compute_changes`; where old rows of an input were removed, compute the whole view."""
        try:
            with commit.view(view.name):
                return self._compute_changes(view, step, commit)
        except InputRemoved as exc:
            log.warning("old rows were removed: the whole view is computed", view=view.name, reason=str(exc))
        self.refresh(view.name)
        try:
            with commit.view(view.name):
                return self._compute_changes(view, step, commit)
        except InputRemoved as exc:
            raise SinkUnavailable(
                f"what view {view.name!r} reads was removed from sink {self._sink.name!r} meanwhile: {exc}",
                remedy="nothing: the view is computed again, from a later version",
            ) from exc

    def _compute_changes(self, view: View, step: _Step, commit: ViewCommit) -> ComputedView | None:
        query, figures = self._queries[view.name], self.figures[view.name]
        missing = sorted(set(query.inputs) - set(step.inputs))
        if missing:
            figures.state, figures.reason = "waiting", f"{missing[0]} is not complete in sink {self._sink.name!r}"
            self._mark(view, commit, TableState.SNAPSHOTTING, figures.reason)
            return None
        known, fingerprint = self._log.schemas().get(view.name), self._fingerprints[view.name]
        earlier = step.before.views.get(view.name)
        if known is None or earlier is None or earlier.fingerprint != fingerprint:
            now = ComputedView(fingerprint, int(step.cut.position), floor_at(step.cut, view.keep, None))
            self._add_all(view, None, step, commit, now.floor)
            return now
        now = ComputedView(fingerprint, int(step.cut.position), floor_at(step.cut, view.keep, earlier.floor))
        is_exact = earlier.position == int(self._log.position)
        changed = set(query.inputs) & set(step.changes)
        is_requested = view.name in self._requested
        if is_exact and not changed and not is_requested:
            self._delete_old(known, earlier.floor, now.floor, commit)
            return now
        if query.only_refresh is not None and not is_requested and not self._is_due(view):
            return earlier
        is_small = all(step.changes[topic] is not None for topic in changed)
        has_old = set(query.inputs) <= set(step.before.inputs)
        if query.only_refresh is None and is_exact and is_small and has_old and not is_requested:
            self._delete_old(known, earlier.floor, now.floor, commit)
            self._add_affected(view, known, step, commit, now.floor)
        else:
            self._add_all(view, known, step, commit, now.floor)
        return now

    def _add_all(
        self, view: View, known: TableSchema | None, step: _Step, commit: ViewCommit, floor: int | None
    ) -> None:
        """Compute the whole view, and add its differences to the rows in the log, or a new version with all rows.

        known: the version of the rows in the log; None if they cannot be used. floor: time before which rows are old.
        """
        query = self._queries[view.name]
        self.figures[view.name].mode = "whole"
        names = self._inputs.register({topic: step.inputs[topic] for topic in query.inputs}, "b")
        result = self._inputs.rows(query.whole(names))
        schema = self._new_version(view, result.schema)
        rows = _rows(result, schema, floor)
        if schema == known:
            commit.add_rows(schema, differences(self._log.state(schema), rows))
        else:
            commit.add_version(schema)
            commit.add_rows(schema, all_new(rows))
            commit.end_build(schema)
        self._refreshed_at[view.name] = time.monotonic()
        self._requested.discard(view.name)

    def _delete_old(self, known: TableSchema, before: int | None, floor: int | None, commit: ViewCommit) -> None:
        """Delete the rows in the log that became old because the floor moved."""
        if floor is not None and floor != before:
            state = self._log.state(known)
            commit.add_rows(known, differences(old_rows(state, known, floor), state.slice(0, 0)))

    def _add_affected(self, view: View, known: TableSchema, step: _Step, commit: ViewCommit, floor: int | None) -> None:
        """Compute the rows of the affected keys at both cuts, and add their differences."""
        query, figures, began = self._queries[view.name], self.figures[view.name], time.monotonic()
        figures.mode = "incremental"
        changed = ChangedInputs(
            {topic: step.before.inputs[topic] for topic in query.inputs},
            {topic: step.inputs[topic] for topic in query.inputs},
            {
                topic: self._inputs.typed_keys(keys, step.schemas[topic])
                for topic, keys in step.changes.items()
                if topic in query.inputs and keys is not None
            },
        )
        figures.input_rows = sum(keys.num_rows for keys in changed.keys.values())
        affected = AffectedRows(query, self._inputs, changed, self.keys_at_once)
        for number, (old, new) in enumerate(affected.pairs(), 1):
            if self._new_version(view, new.schema) != known:
                raise ViewFailed(f"the columns of view {view.name!r} changed with those of its tables")
            commit.add_rows(known, differences(_rows(old, known, floor), _rows(new, known, floor)))
            figures.affected_keys = min(number * self.keys_at_once, affected.number)
            figures.keys_left = affected.number - figures.affected_keys
            figures.seconds_left = (time.monotonic() - began) / figures.affected_keys * figures.keys_left
            self.on_slice(view.name, figures)

    def _new_version(self, view: View, fields: pa.Schema) -> TableSchema:
        earlier = self._log.versions(view.name)
        schema = view_schema(self._relations[view.name], view.name, view.key, fields, earlier)
        if view.keep is not None:
            check_time(schema)
        return schema

    def _mark(self, view: View, commit: ViewCommit, state: TableState, reason: str) -> None:
        """Add a version of a view in another state, if the log has the view in a different one."""
        known = self._log.schemas().get(view.name)
        if known is not None and (known.state, known.reason) != (state, reason):
            commit.add_version(known.flagged(state, reason))

    def _is_due(self, view: View) -> bool:
        last = self._refreshed_at.get(view.name)
        return last is None or time.monotonic() - last >= view.refresh.every


def _fingerprint(view: View, query: ViewQuery, sink: DeltaSinkDefinition) -> str:
    """Return a hash of all that the rows of a view depend on, besides the rows of its inputs."""
    rules = []
    for topic in query.inputs:
        rule = rule_of(topic, sink.rules)
        transform = None if rule is None or rule.transform is None else rule.transform.fingerprint
        rules.append([topic, table_settings(topic, sink, sink.rules).model_dump(mode="json"), transform])
    kept = [] if view.keep is None else [view.keep]
    text = json.dumps([query.sql, query.key, rules, *kept], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _changes_of(version: InputVersion, before: InputVersion | None, changes: KeysByRelation) -> pa.Array | None:
    """Return the keys of the rows of one input that may have changed; None if every row may have."""
    if before is None or before.relation != version.relation or before.target != version.target:
        return None
    found = changes.get(version.relation, pa.array([], pa.list_(pa.string())))
    parked = {*before.parked} ^ {*version.parked} if before.parked != version.parked else set()
    if found is None or not parked:
        return found
    return distinct(pa.concat_arrays([found, pa.array(sorted(map(list, parked)), found.type)]))


def _rows(result: pa.Table, schema: TableSchema, floor: int | None) -> pa.Table:
    """Return the rows of a view that are not old, as keys and images; raise ViewKeyNotUnique if two have one key."""
    result = without_old(result, schema, floor)
    rows = pa.table({"key": view_keys(result, schema), "after": view_images(result, schema)})
    check_key(rows, schema)
    return rows


def _error_of(view: View, exc: PySparkException) -> CdcError:
    text = str(exc).partition("\n")[0]
    return ViewFailed(f"view {view.name!r} cannot be computed: {text[:300]}")


def _numbered(names: Sequence[str], known: Mapping[str, TableSchema]) -> dict[str, int]:
    """Return name → number in the log of views; a view that the log does not have yet gets an unused one."""
    used = max((schema.relation for schema in known.values()), default=0)
    unused = count(used + 1)
    return {name: known[name].relation if name in known else next(unused) for name in names}
