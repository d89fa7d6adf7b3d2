"""The view engine: computes what changed in the views from one cut of their inputs to the next, and logs it.

For the range (a, b] of positions, and for each view:

1. the change log says which rows of the inputs changed; their old rows are read at cut a, their new rows at cut b
2. from these rows follow the keys of view rows that can have changed, at a and at b
3. the view is computed for these keys only, at a and at b
4. the differences become one commit of the log of views, at position b

A view at b is therefore its SQL over the inputs at b. The engine keeps no state: the old rows are computed again. Where
old inputs are not readable any more, where every row of an input may have changed, and for SQL that does not allow step
2, the whole view is computed at b and compared with its rows in the log.

A computation that takes longer than PATIENCE continues in its thread while the other views are logged. Its view is then
behind the last cut, and a further step computes it from its own cut to the last one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import pyarrow as pa
import structlog
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc.config import DeltaSinkDefinition, rule_of, table_settings
from cdc.config.views import View
from cdc.errors import CdcError, Reaction, ViewError, ViewFailed
from cdc.log.computed_views import Committed, ComputedFrom, ComputedView, InputVersion
from cdc.log.disk_format import CommitSource
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.stores.published_record import Published, TargetState
from cdc.table import TableSchema, TableState
from cdc.view_sql.view_query import ViewQuery, queries_of
from pipelines.runtime.executor_code import worker_error
from pipelines.views.input_changes import KeysByRelation, changed_keys, cut_of, distinct, usable_inputs
from pipelines.views.kept_rows import floor_at
from pipelines.views.log_of_views import Cut, LogOfViews, ViewCommit
from pipelines.views.view_computation import ComputationLimits, ViewComputation, ViewTask, Work
from pipelines.views.view_thread import ViewThread

TRY_AGAIN: Final = 60.0
"""Seconds after which a view that failed is computed again, if nothing that it depends on changed before."""
PATIENCE: Final = 5.0
"""Seconds for which the changes of other views wait for those of one view."""

log = structlog.get_logger("views")


@dataclass(frozen=True, slots=True)
class _Step:
    """One step to a cut."""

    cut: Cut
    views: Mapping[str, ComputedView]
    """View → what its rows in the log of views were computed from."""
    inputs: Mapping[str, InputVersion]
    """Topic → version of each input that is complete at the cut."""
    schemas: Mapping[str, TableSchema]
    """Topic → source table of each input at the cut."""
    dropped: frozenset[str] = frozenset()
    """Topics of inputs that the source has dropped."""
    changes: dict[int, KeysByRelation] = field(default_factory=dict)
    """Position of an earlier cut → what changed since then; views that are behind have earlier cuts of their own."""


@dataclass(slots=True)
class ViewFigures:
    """What the engine did for one view in the last step."""

    state: str = "waiting"
    """`live`, `waiting` for its inputs, `behind` while its computation takes long, `paused`, or `failed`."""
    reason: str = ""
    position: int = 0
    """The position of the inputs of which its rows are the result."""
    changed_rows: int = 0
    """Number of changes that were logged."""
    work: Work = field(default_factory=Work)


@dataclass(slots=True)
class _Failure:
    """Why a view cannot be computed, and what may change that."""

    depends_on: object
    due: float


class ViewEngine:
    """The views of one pipeline; one thread calls its methods."""

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
        self._session = session
        self._idle: list[ViewThread] = [ViewThread(session, sink)]
        self._running: dict[str, ViewThread] = {}
        """Views whose computation takes long."""
        self._failures: dict[str, _Failure] = {}
        self._refreshed_at: dict[str, float] = {}
        self._requested: set[str] = set()
        """Views to compute as a whole in the next step, because somebody asked for it."""
        self.paused: frozenset[str] = frozenset()
        """Views that are not computed. Afterwards each gets its differences."""
        self.limits = ComputationLimits()
        self.patience = PATIENCE
        self.on_slice: Callable[[str, Work], None] = lambda _view, _work: None
        """Called after each slice of the affected keys of a view, in any thread."""
        self._relations = _numbered([view.name for view in views], log_of_views.schemas())
        self._fingerprints = {view.name: _fingerprint(view, self._queries[view.name], sink) for view in views}
        self.figures = {view.name: ViewFigures() for view in views}
        self._behind = {view.name for view in views if self._is_behind(view.name)}
        """Views that have to be computed at the last cut, too."""

    @property
    def cuts_in_use(self) -> set[int]:
        """Positions of the cuts that the running computations and the next step read."""
        computed = self._log.computed_from
        tasks = [thread.computation.task for thread in self._running.values()]
        views = [view for name, view in computed.views.items() if name in self._behind]
        views += [view for task in tasks for view in (task.result, task.earlier) if view is not None]
        return {computed.cut, *(view.position for view in views)}

    @property
    def oldest_cut(self) -> Position:
        """Position of the earliest cut from which a view continues: the change log must keep what follows it."""
        computed = self._log.computed_from
        tasks = [thread.computation.task for thread in self._running.values()]
        late = [found.position for name, found in computed.views.items() if name in self._behind]
        late += [(task.earlier or task.result).position for task in tasks]
        return Position(min([computed.cut, *late]))

    def is_due(self, record: Published) -> bool:
        """Return whether `advance` has something to do at a published cut."""
        last = self._log.computed_from.cut
        has_result = any(thread.has_ended() for thread in self._running.values())
        return record.position > last or (record.position == last and (has_result or bool(self._behind)))

    def refresh(self, name: str) -> None:
        """Compute a view as a whole in the next step."""
        self._requested.add(name)
        self._failures.pop(name, None)

    def advance(self, record: Published, source: CommitSource) -> bool:
        """Compute the views at a published cut of the inputs, the last one or a later one; return False if none is due.

        source: the source server of the change log.
        """
        if not self.is_due(record):
            return False
        cut = cut_of(record)
        step = self._step(record, cut)
        commit, computed = self._log.begin(cut), dict[str, ComputedView]()
        committed = Committed(commit.position, int(cut.position), self._log.computed_from.cut)
        for view in self._views:
            result = self._compute(view, step, commit)
            if result is not None:
                computed[view.name] = result.committed(committed, step.views.get(view.name))
        commit.commit(source, ComputedFrom(int(cut.position), computed))
        for thread in self._idle:
            thread.inputs.keep_only(step.inputs)
        for view in self._views:
            figures = self.figures[view.name]
            figures.position = computed[view.name].position if view.name in computed else figures.position
            figures.changed_rows = commit.rows.get(view.name, 0)
        return True

    def close(self) -> None:
        """Stop all computations."""
        for thread in (*self._running.values(), *self._idle):
            thread.close()

    def _is_behind(self, name: str) -> bool:
        """Return whether a view was not computed at the last cut, although nobody has to wait for that."""
        computed = self._log.computed_from
        found = computed.views.get(name)
        if found is None or found.fingerprint != self._fingerprints[name]:
            return True
        return found.position < computed.cut and self._queries[name].only_refresh is None

    def _step(self, record: Published, cut: Cut) -> _Step:
        wanted = {topic for query in self._queries.values() for topic in query.inputs}
        inputs = usable_inputs(record, wanted)
        schemas = {
            table.topic: TableSchema.from_json(table.schema)
            for table in record.tables.values()
            if table.topic in inputs and table.schema is not None and table.state != TargetState.DROPPED
        }
        dropped = {t.topic for t in record.tables.values() if t.state == TargetState.DROPPED} & (wanted - {*inputs})
        self._change_log.refresh()
        return _Step(cut, self._log.computed_from.views, inputs, schemas, frozenset(dropped))

    def _compute(self, view: View, step: _Step, commit: ViewCommit) -> ComputedView | None:
        """Add the changes of one view to the commit, and return how its rows were computed; None if they cannot be."""
        figures, began, earlier = self.figures[view.name], time.monotonic(), step.views.get(view.name)
        figures.work = Work()
        self._behind.discard(view.name)
        if view.name in self.paused:
            self._stop(view.name)
            figures.state, figures.reason = "paused", f"paused: run 'cdc views resume {view.name}'"
            return earlier
        depends_on = (tuple(step.inputs), tuple(step.schemas.values()))
        failure = self._failures.get(view.name)
        if failure is not None and failure.depends_on == depends_on and began < failure.due:
            return None
        try:
            found = self._add_changes(view, step, commit)
        except (CdcError, PySparkException) as exc:
            if isinstance(exc, CdcError) and not _stops_one_view(exc):
                raise
            error = exc if isinstance(exc, CdcError) else _error_of(view, exc)
            self._failures[view.name] = _Failure(depends_on, began + TRY_AGAIN)
            figures.state, figures.reason = "failed", f"{error.code} {error.message}"
            log.exception(
                "a view stopped; the other views continue",
                view=view.name,
                reason=figures.reason,
                exc_info=None if isinstance(exc, CdcError) else exc,
            )
            self._mark(view, commit, TableState.NEEDS_RESYNC, figures.reason)
            return None
        self._failures.pop(view.name, None)
        return found

    def _add_changes(self, view: View, step: _Step, commit: ViewCommit) -> ComputedView | None:
        """Compute a view, as long as the others can wait for it, or take the result of a long computation."""
        query, figures, earlier = self._queries[view.name], self.figures[view.name], step.views.get(view.name)
        missing = sorted(set(query.inputs) - set(step.inputs))
        if missing:
            self._stop(view.name)
            reason = f"{missing[0]} is not complete in sink {self._sink.name!r}"
            if missing[0] in step.dropped:
                reason = (
                    f"the source dropped table {missing[0]}; the view keeps its rows until the table is there again"
                )
            figures.state, figures.reason = "waiting", reason
            self._mark(view, commit, TableState.SNAPSHOTTING, figures.reason)
            return None
        thread, patience = self._running.pop(view.name, None), 0.0
        if thread is None:
            task = self._task(view, step)
            if task is None:
                figures.state, figures.reason = "live", ""
                return earlier
            thread, patience = self._start(task), self.patience
        if not thread.has_ended(patience):
            self._running[view.name] = thread
            self._report_long_computation(view.name, thread.computation)
            return earlier
        self._idle.append(thread)
        computation = thread.result()
        with commit.view(view.name):
            found = computation.add_to(commit)
        figures.work, figures.state, figures.reason = computation.work, "live", ""
        if computation.task.changes is None:
            self._refreshed_at[view.name] = time.monotonic()
        if found.position < step.cut.position:
            figures.state, figures.reason = "behind", "changes of its tables during a long computation follow"
            self._behind.add(view.name)
        return found

    def _task(self, view: View, step: _Step) -> ViewTask | None:
        """Return what to compute of a view; None if it is at the cut, or is only refreshed and that is not due."""
        query, fingerprint = self._queries[view.name], self._fingerprints[view.name]
        versions, earlier = self._log.versions(view.name), step.views.get(view.name)
        known = versions[-1] if versions else None
        if known is None or earlier is None or earlier.fingerprint != fingerprint:
            known = earlier = None
        elif earlier.position == step.cut.position and view.name not in self._requested:
            return None
        floor = floor_at(step.cut, view.keep, None if earlier is None else earlier.floor)
        inputs = {topic: step.inputs[topic] for topic in query.inputs}
        result = ComputedView(fingerprint, int(step.cut.position), inputs, floor)
        changes: Mapping[str, pa.Array] | None = None
        if earlier is not None and view.name not in self._requested:
            found = self._changes(earlier, result, step)
            if query.only_refresh is not None and found != {} and not self._is_due_for_refresh(view):
                return None
            if query.only_refresh is None or not found:
                changes = found
        self._requested.discard(view.name)
        return ViewTask(
            view=view,
            query=query,
            relation=self._relations[view.name],
            versions=versions,
            known=known,
            earlier=earlier,
            result=result,
            schemas=step.schemas,
            changes=changes,
            limits=self.limits,
            log=self._log.now(),
            on_slice=self.on_slice,
        )

    def _changes(self, earlier: ComputedView, result: ComputedView, step: _Step) -> Mapping[str, pa.Array] | None:
        """Return topic of each changed input → keys of its rows that may have changed; None if all of one may have."""
        if earlier.position not in step.changes:
            relations = [version.relation for version in step.inputs.values()]
            step.changes[earlier.position] = changed_keys(
                self._change_log, Position(earlier.position), step.cut.position, relations
            )
        changes = {}
        for topic, version in result.inputs.items():
            found = _changes_of(version, earlier.inputs.get(topic), step.changes[earlier.position])
            if found is None:
                return None
            if len(found):
                changes[topic] = found
        return changes

    def _start(self, task: ViewTask) -> ViewThread:
        thread = self._idle.pop() if self._idle else ViewThread(self._session.newSession(), self._sink)
        thread.start(ViewComputation(task))
        return thread

    def _report_long_computation(self, name: str, running: ViewComputation) -> None:
        """Let the figures of a view show how far its computation is."""
        figures = self.figures[name]
        figures.work = Work(keys_left=None, seconds_left=None)
        if running.work.affected_keys:
            figures.work = Work(keys_left=running.work.keys_left, seconds_left=running.work.seconds_left)
        if name in self._failures:
            return  # it is tried again, and stays failed until that succeeds
        what = "it is" if running.task.changes is not None else "the whole view is"
        since = f"{running.began_at:%H:%M:%S} UTC"
        figures.state, figures.reason = "behind", f"{what} computed since {since}; the other views continue"

    def _stop(self, name: str) -> None:
        """Stop the long computation of a view, if there is one."""
        thread = self._running.pop(name, None)
        if thread is not None:
            thread.close()

    def _mark(self, view: View, commit: ViewCommit, state: TableState, reason: str) -> None:
        """Add a version of a view in another state, if the log has the view in a different one."""
        known = self._log.schemas().get(view.name)
        if known is not None and (known.state, known.reason) != (state, reason):
            commit.add_version(known.flagged(state, reason))

    def _is_due_for_refresh(self, view: View) -> bool:
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


def _stops_one_view(error: CdcError) -> bool:
    return isinstance(error, ViewError) or error.reaction is Reaction.QUARANTINE


def _error_of(view: View, exc: PySparkException) -> CdcError:
    if (error := worker_error(exc)) is not None:
        return error
    text = str(exc).partition("\n")[0]
    return ViewFailed(f"view {view.name!r} cannot be computed: {text[:300]}")


def _numbered(names: Sequence[str], known: Mapping[str, TableSchema]) -> dict[str, int]:
    """Return name → number in the log of views; a view that the log does not have yet gets an unused one."""
    used = max((schema.relation for schema in known.values()), default=0)
    unused = count(used + 1)
    return {name: known[name].relation if name in known else next(unused) for name in names}
