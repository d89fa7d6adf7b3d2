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
from cdc.table import TableSchema, TableState
from cdc.targets.published_record import Published, TargetState
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


@dataclass(slots=True, kw_only=True)
class _FollowedView:
    """One view, and what the engine knows of it."""

    view: View
    query: ViewQuery
    fingerprint: str
    relation: int
    """Number of the view in the log of views."""
    is_behind: bool
    """Whether it has to be computed at the last cut, too."""
    is_requested: bool = False
    """Whether it is computed as a whole in the next step, because somebody asked for it."""
    running: ViewThread | None = None
    """Its computation, if that takes long."""
    failure: _Failure | None = None
    refreshed_at: float | None = None
    """When it was computed as a whole; None if this process has not done so."""
    figures: ViewFigures = field(default_factory=ViewFigures)

    @property
    def name(self) -> str:
        return self.view.name

    @property
    def is_due_for_refresh(self) -> bool:
        return self.refreshed_at is None or time.monotonic() - self.refreshed_at >= self.view.refresh.every

    def stop(self) -> None:
        """Stop its long computation, if there is one."""
        if self.running is not None:
            self.running.close()
            self.running = None

    def report_long_computation(self, computation: ViewComputation) -> None:
        """Let the figures show how far a computation is."""
        figures = self.figures
        figures.work = Work(keys_left=None, seconds_left=None)
        if computation.work.affected_keys:
            figures.work = Work(keys_left=computation.work.keys_left, seconds_left=computation.work.seconds_left)
        if self.failure is not None:
            return  # it is tried again, and stays failed until that succeeds
        what = "it is" if computation.task.changes is not None else "the whole view is"
        since = f"{computation.began_at:%H:%M:%S} UTC"
        figures.state, figures.reason = "behind", f"{what} computed since {since}; the other views continue"


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
        self._sink = sink
        self._log = log_of_views
        self._change_log = change_log
        self._session = session
        self._idle: list[ViewThread] = [ViewThread(session, sink)]
        self.paused: frozenset[str] = frozenset()
        """Views that are not computed. Afterwards each gets its differences."""
        self.limits = ComputationLimits()
        self.patience = PATIENCE
        self.on_slice: Callable[[str, Work], None] = lambda _view, _work: None
        """Called after each slice of the affected keys of a view, in any thread."""
        queries = queries_of(views)
        relations = _numbered([view.name for view in views], log_of_views.schemas())
        self._views: dict[str, _FollowedView] = {}
        """Name of each view → the view, in the order of the definition."""
        for view in views:
            query = queries[view.name]
            fingerprint = _fingerprint(view, query, sink)
            self._views[view.name] = _FollowedView(
                view=view,
                query=query,
                fingerprint=fingerprint,
                relation=relations[view.name],
                is_behind=_is_behind(view.name, query, fingerprint, log_of_views.computed_from),
            )

    @property
    def figures(self) -> dict[str, ViewFigures]:
        """Name of each view → what the engine did for it in the last step."""
        return {name: view.figures for name, view in self._views.items()}

    @property
    def cuts_in_use(self) -> set[int]:
        """Positions of the cuts that the running computations and the next step read."""
        computed = self._log.computed_from
        tasks = self._running_tasks
        views = self._computed_behind
        views += [view for task in tasks for view in (task.result, task.earlier) if view is not None]
        return {computed.cut, *(view.position for view in views)}

    @property
    def oldest_cut(self) -> Position:
        """Position of the earliest cut from which a view continues: the change log must keep what follows it."""
        computed = self._log.computed_from
        late = [view.position for view in self._computed_behind]
        late += [(task.earlier or task.result).position for task in self._running_tasks]
        return Position(min([computed.cut, *late]))

    @property
    def _running_tasks(self) -> list[ViewTask]:
        return [view.running.computation.task for view in self._views.values() if view.running is not None]

    @property
    def _computed_behind(self) -> list[ComputedView]:
        """What the rows of the views were computed from that have to be computed at the last cut, too."""
        computed = self._log.computed_from.views
        return [computed[name] for name, view in self._views.items() if view.is_behind and name in computed]

    def is_due(self, record: Published) -> bool:
        """Return whether `advance` has something to do at a published cut."""
        last = self._log.computed_from.cut
        if record.position != last:
            return record.position > last
        views = self._views.values()
        return any(view.is_behind or (view.running is not None and view.running.has_ended()) for view in views)

    def refresh(self, name: str) -> None:
        """Compute a view as a whole in the next step."""
        if (view := self._views.get(name)) is not None:
            view.is_requested = True
            view.failure = None

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
        for view in self._views.values():
            result = self._compute(view, step, commit)
            if result is not None:
                computed[view.name] = result.committed(committed, step.views.get(view.name))
        commit.commit(source, ComputedFrom(int(cut.position), computed))
        for thread in self._idle:
            thread.inputs.keep_only(step.inputs)
        for view in self._views.values():
            if view.name in computed:
                view.figures.position = computed[view.name].position
            view.figures.changed_rows = commit.rows.get(view.name, 0)
        return True

    def close(self) -> None:
        """Stop all computations."""
        for view in self._views.values():
            view.stop()
        for thread in self._idle:
            thread.close()

    def _step(self, record: Published, cut: Cut) -> _Step:
        topics = {topic for view in self._views.values() for topic in view.query.inputs}
        inputs = usable_inputs(record, topics)
        schemas = {
            table.topic: TableSchema.from_json(table.schema)
            for table in record.tables.values()
            if table.topic in inputs and table.schema is not None and table.state != TargetState.DROPPED
        }
        dropped = {t.topic for t in record.tables.values() if t.state == TargetState.DROPPED} & (topics - {*inputs})
        self._change_log.refresh()
        return _Step(cut, self._log.computed_from.views, inputs, schemas, frozenset(dropped))

    def _compute(self, view: _FollowedView, step: _Step, commit: ViewCommit) -> ComputedView | None:
        """Add the changes of one view to the commit, and return how its rows were computed; None if they cannot be."""
        figures = view.figures
        began = time.monotonic()
        figures.work = Work()
        view.is_behind = False
        if view.name in self.paused:
            view.stop()
            figures.state, figures.reason = "paused", f"paused: run 'cdc views resume {view.name}'"
            return step.views.get(view.name)
        depends_on = (tuple(step.inputs), tuple(step.schemas.values()))
        failure = view.failure
        if failure is not None and failure.depends_on == depends_on and began < failure.due:
            return None
        try:
            result = self._add_changes(view, step, commit)
        except (CdcError, PySparkException) as exc:
            if isinstance(exc, CdcError) and not _stops_one_view(exc):
                raise
            error = exc if isinstance(exc, CdcError) else _error_of(view.name, exc)
            view.failure = _Failure(depends_on, began + TRY_AGAIN)
            figures.state, figures.reason = "failed", f"{error.code} {error.message}"
            log.exception(
                "a view stopped; the other views continue",
                view=view.name,
                reason=figures.reason,
                exc_info=None if isinstance(exc, CdcError) else exc,
            )
            self._mark(view.name, commit, TableState.NEEDS_RESYNC, figures.reason)
            return None
        view.failure = None
        return result

    def _add_changes(self, view: _FollowedView, step: _Step, commit: ViewCommit) -> ComputedView | None:
        """Compute a view, as long as the others can wait for it, or take the result of a long computation."""
        figures = view.figures
        earlier = step.views.get(view.name)
        missing = sorted(set(view.query.inputs) - set(step.inputs))
        if missing:
            view.stop()
            reason = f"{missing[0]} is not complete in sink {self._sink.name!r}"
            if missing[0] in step.dropped:
                reason = (
                    f"the source dropped table {missing[0]}; the view keeps its rows until the table is there again"
                )
            figures.state, figures.reason = "waiting", reason
            self._mark(view.name, commit, TableState.SNAPSHOTTING, figures.reason)
            return None
        thread = view.running
        view.running = None
        patience = 0.0
        if thread is None:
            task = self._task(view, step)
            if task is None:
                figures.state, figures.reason = "live", ""
                return earlier
            thread = self._start(task)
            patience = self.patience
        if not thread.has_ended(patience):
            view.running = thread
            view.report_long_computation(thread.computation)
            return earlier
        self._idle.append(thread)
        computation = thread.result()
        with commit.view(view.name):
            result = computation.add_to(commit)
        figures.work = computation.work
        figures.state = "live"
        figures.reason = ""
        if computation.task.changes is None:
            view.refreshed_at = time.monotonic()
        if result.position < step.cut.position:
            figures.state, figures.reason = "behind", "changes of its tables during a long computation follow"
            view.is_behind = True
        return result

    def _task(self, view: _FollowedView, step: _Step) -> ViewTask | None:
        """Return what to compute of a view; None if it is at the cut, or is only refreshed and that is not due."""
        query = view.query
        versions = self._log.versions(view.name)
        earlier = step.views.get(view.name)
        known = versions[-1] if versions else None
        if known is None or earlier is None or earlier.fingerprint != view.fingerprint:
            known = earlier = None
        elif earlier.position == step.cut.position and not view.is_requested:
            return None
        floor = floor_at(step.cut, view.view.keep, None if earlier is None else earlier.floor)
        inputs = {topic: step.inputs[topic] for topic in query.inputs}
        result = ComputedView(view.fingerprint, int(step.cut.position), inputs, floor)
        changes: Mapping[str, pa.Array] | None = None
        if earlier is not None and not view.is_requested:
            input_changes = self._changes(earlier, result, step)
            if query.only_refresh is not None and input_changes != {} and not view.is_due_for_refresh:
                return None
            if query.only_refresh is None or not input_changes:
                changes = input_changes
        view.is_requested = False
        return ViewTask(
            view=view.view,
            query=query,
            relation=view.relation,
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
            keys = _changes_of(version, earlier.inputs.get(topic), step.changes[earlier.position])
            if keys is None:
                return None
            if len(keys):
                changes[topic] = keys
        return changes

    def _start(self, task: ViewTask) -> ViewThread:
        thread = self._idle.pop() if self._idle else ViewThread(self._session.newSession(), self._sink)
        thread.start(ViewComputation(task))
        return thread

    def _mark(self, name: str, commit: ViewCommit, state: TableState, reason: str) -> None:
        """Add a version of a view in another state, if the log has the view in a different one."""
        version = self._log.schemas().get(name)
        if version is not None and (version.state, version.reason) != (state, reason):
            commit.add_version(version.flagged(state, reason))


def _is_behind(name: str, query: ViewQuery, fingerprint: str, computed: ComputedFrom) -> bool:
    """Return whether a view was not computed at the last cut, although nobody has to wait for that."""
    view = computed.views.get(name)
    if view is None or view.fingerprint != fingerprint:
        return True
    return view.position < computed.cut and query.only_refresh is None


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
    keys = changes.get(version.relation, pa.array([], pa.list_(pa.string())))
    parked = {*before.parked} ^ {*version.parked} if before.parked != version.parked else set()
    if keys is None or not parked:
        return keys
    return distinct(pa.concat_arrays([keys, pa.array(sorted(map(list, parked)), keys.type)]))


def _stops_one_view(error: CdcError) -> bool:
    return isinstance(error, ViewError) or error.reaction is Reaction.QUARANTINE


def _error_of(name: str, exc: PySparkException) -> CdcError:
    if (error := worker_error(exc)) is not None:
        return error
    text = str(exc).partition("\n")[0]
    return ViewFailed(f"view {name!r} cannot be computed: {text[:300]}")


def _numbered(names: Sequence[str], schemas: Mapping[str, TableSchema]) -> dict[str, int]:
    """Return name → number in the log of views; a view that the log does not have yet gets an unused one."""
    used = max((schema.relation for schema in schemas.values()), default=0)
    unused = count(used + 1)
    return {name: schemas[name].relation if name in schemas else next(unused) for name in names}
