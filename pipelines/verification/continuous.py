"""Continuous verification: compares every table with the source in repeated passes, one range of keys at a time.

A cut is kept for some seconds only, even for a large table: while a cut exists, the source cannot vacuum newer dead
rows, and the tables that are compared are locked against changes of their definition. Some ranges are compared at each
cut, and the next ranges at the next cut. A cut ends at once if another session waits for one of its locks; only a query
of the source is not interrupted. The catalog records the progress, so a restarted process continues there. A mismatch
is reported, and repaired if the schedule says so. No mismatch ends the passes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from queue import Empty, SimpleQueue
from typing import Any, Final, Self

from cdc.catalog import Catalog, VerifiedRange
from cdc.config import Definition
from cdc.errors import CdcError, ExitCode, PositionNotReached, SinkError, SourceError
from cdc.position import Position
from cdc.postgres.key_range_digests import KeyRange, next_range_start
from cdc.snapshot.backfill_documents import KEYS
from cdc.targets.published_record import TargetState
from cdc.verify_and_replay_options import VerifyMode
from pipelines.verification.compare_table import TableComparison, TableVerdict, refused
from pipelines.verification.consistent_cut import ConsistentCut, consistent_cut
from pipelines.verification.expected_rows import RateLimitedRows, ReadRateLimit
from pipelines.verification.read_budget import ReadBudget
from pipelines.verification.repair import Key, RepairResult, RepairRun, SinkTable, mismatched_keys
from pipelines.verification.target_rows import CheckedTargetRows
from pipelines.verification.verify import (
    VerifyOptions,
    comparison_at,
    cut_request,
    find_tables,
    forget_removed_tables,
    select_sinks,
    select_tables,
)

CUT_SECONDS: Final = 30.0
"""Seconds after which a cut is released; while a cut is kept, the source cannot vacuum newer dead rows."""
RANGE_ROWS: Final = 100_000
"""Approximate number of rows in one range of keys; a stopped process loses the progress of at most one range."""
MIN_RANGE_ROWS: Final = 1_000
"""Minimum number of rows in one range of keys, under a low rate limit."""
RANGE_SECONDS: Final = 10
"""Approximate seconds in which a range of keys is read under a rate limit."""
RETRY_SECONDS: Final = 10.0
"""Maximum seconds from a failed round to the next attempt."""

FAILED_TABLE_AFTER: Final = 600.0
"""Maximum seconds after which a table is compared again whose comparison failed or delayed another session."""

_PASSING: Final = frozenset({TargetState.STREAMING.value, TargetState.SNAPSHOTTING.value, "absent"})
"""States of tables that cannot be compared at a cut, but probably soon."""
_NEVER: Final = datetime.min.replace(tzinfo=UTC)
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationSchedule:
    """How often tables are verified, how fast rows are read, and whether mismatches are repaired."""

    every: float
    """Seconds from the start of a pass over a table to the start of the next pass."""
    rate: int | None = None
    """Maximum rows of the source per second; None: no limit."""
    repair: bool = False
    """Whether differing rows are read again from the source, for the sink in which they differ."""
    range_rows: int = RANGE_ROWS
    cut_seconds: float = CUT_SECONDS
    budget: ReadBudget | None = None
    """Limits what is spent; it rests before the next cut. None: no limit but `rate`."""
    ends_before: float | None = None
    """Seconds; the verification ends if nothing is due for so long. None: it ends only by a signal."""
    one_sink_per_cut: bool = False
    """Whether each cut contains a single sink, so that a sink that cannot reach a cut does not stop the others."""
    max_lag: float | None = None
    """A sink that is further behind, in seconds, is left out; None: no sink is left out."""
    after_round: Callable[[Catalog], int] | None = None
    """Compares what has no ranges of keys, after all ranges that are due; returns the number of compared rows."""
    retry: float = RETRY_SECONDS
    """Maximum seconds from a failed round to the next attempt."""

    @property
    def rows(self) -> int:
        """Approximate number of rows in one range, within `range_rows` and the rate limit."""
        within_rate = self.range_rows if self.rate is None else max(MIN_RANGE_ROWS, self.rate * RANGE_SECONDS)
        return min(self.range_rows, within_rate)


@dataclass(frozen=True, slots=True)
class PassStart:
    """Where the next comparison begins: the pass over a table, and the range in it."""

    began: datetime
    """Time at which the pass began."""
    number: int = 0
    """Number of the range in the pass, from 0."""
    first: str | None = None
    """The first key of the range; None for the first range."""


def next_range(passes: Sequence[Sequence[VerifiedRange]], now: datetime, every: float) -> PassStart | None:
    """Return where the next comparison of a table begins; None if the newest pass has ended and no new pass is due.

    The comparison continues the newest pass if that pass has not ended. Otherwise it begins a new pass.

    passes: the recorded ranges of each pass, newest pass first. every: seconds from the start of a pass to the next
    start.
    """
    if not passes:
        return PassStart(now)
    newest = passes[0]
    if newest[-1].ended is not None:
        return PassStart(newest[0].began, newest[-1].number + 1, newest[-1].ended)
    return PassStart(now) if newest[0].began + timedelta(seconds=every) <= now else None


@dataclass(frozen=True, slots=True)
class RangeResult:
    """The result for one range of keys: its verdict, or the error that prevented the comparison."""

    verdict: TableVerdict | None
    found: VerifiedRange | None = None
    """The catalog record of the range; None if nothing was compared."""
    error: CdcError | None = None
    """The error that prevented the comparison; None if there was none."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of the JSON envelope: the verdict, and the bounds, position and time of the range.

        If nothing was compared, the content is only the verdict. If there is no verdict, the content is empty.
        """
        verdict = {} if self.verdict is None else asdict(self.verdict)
        if self.found is None:
            return verdict
        position, at = str(Position(self.found.position)), self.found.verified_at.isoformat()
        bounds = {"first": self.found.first, "ended": self.found.ended}
        return {**verdict, **bounds, "position": position, "verified_at": at}


class Stopped(Exception):
    """Raised at the next pause after the process has received SIGTERM or SIGINT."""


class _StopSignals:
    """Records SIGTERM and SIGINT inside a `with` block; the code stops at its next pause.

    The signal handler itself raises no exception. It can run between any two instructions, so an exception there could
    leave a transaction of the catalog open, and an error of the cleanup could replace the exception.
    """

    def __init__(self) -> None:
        self._received: SimpleQueue[int] = SimpleQueue()  # put() is safe in a signal handler, Event.set() is not
        self._stopped = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _STOP_SIGNALS:
            self._before[number] = signal.signal(number, lambda sent, _: self._received.put(sent))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pause(self, seconds: float = 0.0) -> None:
        """Wait for this number of seconds. Raises Stopped if a signal has arrived or arrives during the wait."""
        if not self._stopped:
            with suppress(Empty):
                self._received.get(timeout=max(0.0, seconds))
                self._stopped = True
        if self._stopped:
            raise Stopped


class _OthersWait(Exception):
    """Another session of the source waits for a lock of the cut, so the cut must end."""


class _TableGivenUp(Exception):
    """One table cannot be compared at this cut; its transaction may have failed, so the cut ends."""

    def __init__(self, table: SinkTable, error: CdcError | None) -> None:
        """error: what failed; None if another session waited for a lock of the cut."""
        super().__init__(table)
        self.table, self.error = table, error


@dataclass(frozen=True, slots=True)
class _SinksAtCut:
    """A cut, and the options that select its sinks."""

    cut: ConsistentCut
    options: VerifyOptions


def _check_waiting(cut: ConsistentCut) -> None:
    """Raise _OthersWait if another session waits for a lock of the cut."""
    if cut.delays_others():
        raise _OthersWait


class ContinuousVerification:
    """Verifies the tables of one pipeline in repeated passes. A second process for the same pipeline is safe, but only
    repeats the work.
    """

    def __init__(
        self,
        definition: Definition,
        options: VerifyOptions,
        schedule: VerificationSchedule,
        report: Callable[[RangeResult], None],
    ) -> None:
        self._definition = definition
        self._schedule = schedule
        self._report = report
        self._signals = _StopSignals()
        self._options = replace(options, listed=KEYS if schedule.repair else options.listed, pause=self._signals.pause)
        self._rate_limit = ReadRateLimit(schedule.rate, pause=self._signals.pause)
        self._refused_at: dict[SinkTable, datetime] = {}
        """Table that cannot be compared → time of its last report."""
        self._failed_at: dict[SinkTable, datetime] = {}
        """Table whose comparison failed or was given up → time of the failure."""
        self._tables: list[SinkTable] = []
        """The tables that were selected at the last cut."""
        self._repaired: list[VerifiedRange] = []
        """Ranges whose rows were read again, and which have to be compared again."""
        self._tried: set[tuple[SinkTable, datetime, int]] = set()
        """Ranges that were repaired in this pass; if one still differs, another attempt would not help."""
        self._rests_until = 0.0
        """Monotonic time before which the budget permits no cut."""
        self.wrong: set[SinkTable] = set()
        """Tables that have a known mismatch or could not be compared."""

    def run(self) -> float | None:
        """Compare tables in rounds until SIGTERM or SIGINT, or until nothing is due for `ends_before` seconds.

        Returns the seconds until something is due; None after a signal. Raises errors of usage, which every round would
        repeat.
        """
        with self._signals, Catalog.open(self._definition.catalog.url) as catalog, suppress(Stopped):
            while True:
                wait = self._attempt_round(catalog)
                if self._schedule.ends_before is not None and wait > self._schedule.ends_before:
                    return wait
                self._signals.pause(wait)
        return None

    def round(self, catalog: Catalog) -> None:
        """Compare ranges until none is due, at as many cuts as needed.

        An error of one sink does not stop the comparison of the others if each cut has a single sink. The first error
        is raised at the end.
        """
        sinks = [sink.name for sink in select_sinks(self._definition, self._options)]
        left: list[tuple[str, ...]] = [(name,) for name in sinks] if self._schedule.one_sink_per_cut else [tuple(sinks)]
        errors: list[CdcError] = []
        while left:
            names = left.pop(0)
            try:
                self._check_lag(catalog, names)
                if self._compare_at_cut(catalog, names):
                    left.append(names)
            except CdcError as error:
                if error.exit_code is ExitCode.USAGE:
                    raise
                errors.append(error)
        if self._schedule.after_round is not None:
            self._pause_for_budget()
            began = time.monotonic()
            rows = self._schedule.after_round(catalog)
            self._spend(rows, time.monotonic() - began)
        if errors:
            raise errors[0]

    def _check_lag(self, catalog: Catalog, sinks: tuple[str, ...]) -> None:
        """Raise PositionNotReached if a sink is too far behind to reach a cut soon."""
        if self._schedule.max_lag is None:
            return
        for sink in catalog.sinks.ls(self._definition.name):
            if sink.sink in sinks and sink.lag_seconds > self._schedule.max_lag:
                raise PositionNotReached(
                    f"sink {sink.sink!r} is {sink.lag_seconds:.0f} s behind, so it is verified later"
                )

    def _attempt_round(self, catalog: Catalog) -> float:
        """Compare all ranges that are due; return the seconds until the next round.

        An error is reported, and the round is attempted again later. Only an error of usage is raised.
        """
        try:
            self.round(catalog)
        except CdcError as error:
            if error.exit_code is ExitCode.USAGE:
                raise
            self._report(RangeResult(None, error=error))
            return min(self._schedule.retry, self._schedule.every)
        return self._seconds_until_due(catalog)

    def _seconds_until_due(self, catalog: Catalog) -> float:
        now, every = datetime.now(UTC), timedelta(seconds=self._schedule.every)
        due = [(self._pass_began(catalog, table) or now) + every for table in self._tables]
        due += [at + self._pause_of_failed for at in self._failed_at.values()]
        return max(0.1, (min(due) - now).total_seconds()) if due else self._schedule.every

    @property
    def _pause_of_failed(self) -> timedelta:
        return timedelta(seconds=min(FAILED_TABLE_AFTER, self._schedule.every))

    def _pass_began(self, catalog: Catalog, table: SinkTable) -> datetime | None:
        """Return when the newest pass over a table began; None before the first pass."""
        passes = catalog.verified.passes(self._definition.name, *table)
        began = [found for found in (self._refused_at.get(table), *(ranges[0].began for ranges in passes)) if found]
        return max(began, default=None)

    def _compare_at_cut(self, catalog: Catalog, sinks: tuple[str, ...]) -> bool:
        """Take a cut of some sinks and compare due ranges for about `cut_seconds`; return whether another is needed.

        That is the case if ranges may still be due, or if ranges were repaired, which have to be compared again.
        """
        options = replace(self._options, sinks=sinks)
        request = replace(cut_request(self._definition, options), locks_all=False)
        self._pause_for_budget()
        at, began = datetime.now(UTC), time.monotonic()
        wrong: list[tuple[TableVerdict, VerifiedRange]] = []
        rows, complete = 0, False
        try:
            with consistent_cut(catalog, request) as cut:
                read_from = time.monotonic()
                for verdict, found in self._due_ranges(catalog, _SinksAtCut(cut, options), at):
                    catalog.verified.record(self._definition.name, found)
                    self._record_result(catalog, verdict, found)
                    rows += verdict.rows
                    if not verdict.equal:
                        wrong.append((verdict, found))
                    if time.monotonic() >= read_from + self._schedule.cut_seconds or cut.delays_others():
                        break
                    self._signals.pause()
                else:
                    complete = True
        except _TableGivenUp as given_up:
            self._give_up(catalog, given_up, at)
        self._spend(rows, time.monotonic() - began)
        return self._repair(wrong) or not complete

    def _spend(self, rows: int, seconds: float) -> None:
        if self._schedule.budget is not None:
            self._rests_until = time.monotonic() + self._schedule.budget.rest_after(rows, seconds)

    def _pause_for_budget(self) -> None:
        self._signals.pause(self._rests_until - time.monotonic())

    def _give_up(self, catalog: Catalog, given_up: _TableGivenUp, at: datetime) -> None:
        """Record that a table could not be compared now, so that other tables are compared before it."""
        table, error = given_up.table, given_up.error
        self._failed_at[table] = at
        if error is None:
            return  # another session waited; the pass continues later with the same range
        # the bounds of the pass may not fit the table any more, so the next pass begins with its first range
        catalog.verified.forget_unended(self._definition.name, *table)
        verdict = refused(*table, TargetState.STREAMING.value, f"{error.code} {error.message} → {error.fix}")
        self._record_result(catalog, verdict, None)

    def _due_ranges(
        self, catalog: Catalog, at_cut: _SinksAtCut, at: datetime
    ) -> Iterator[tuple[TableVerdict, VerifiedRange]]:
        """Compare the due ranges one after the other; yield the verdict and the catalog record of each.

        The tables are ordered by the start of their newest pass, oldest first.
        """
        cut, options = at_cut.cut, at_cut.options
        # a sink may have no table yet; without tables in any sink, the options are wrong
        select = find_tables if self._schedule.one_sink_per_cut else select_tables
        selected = select(cut, self._definition, options)
        forget_removed_tables(catalog, self._definition, options, selected)
        tables = {(sink.name, topic): (sink, oid) for sink, oid, topic in selected}
        self._tables = [*(table for table in self._tables if table[0] not in options.sinks), *tables]
        self._failed_at = {
            table: failed_at
            for table, failed_at in self._failed_at.items()
            if table in tables or table[0] not in options.sinks
        }
        began = {table: self._pass_began(catalog, table) or _NEVER for table in tables}
        for table in sorted(tables, key=began.__getitem__):
            if self._is_put_off(table, at):
                continue
            sink, oid = tables[table]
            try:
                found = comparison_at(cut, sink, oid, table[1])
                if not isinstance(found, TableVerdict):
                    yield from self._ranges(catalog, cut, self._interruptible(cut, found), at)
                    continue
                # a table that is being copied is compared soon after the copy, any other one in the next interval
                (self._failed_at if found.state in _PASSING else self._refused_at)[table] = at
                self._record_result(catalog, found, None)
            except _OthersWait as exc:
                raise _TableGivenUp(table, None) from exc
            except (SourceError, SinkError) as error:
                if cut.source.closed:
                    raise  # no fault of the table
                raise _TableGivenUp(table, error) from error

    def _is_put_off(self, table: SinkTable, at: datetime) -> bool:
        """Return whether a table could not be compared a short time ago, and is not compared again yet."""
        failed_at, refused_at = self._failed_at.get(table), self._refused_at.get(table)
        if failed_at is not None and at < failed_at + self._pause_of_failed:
            return True
        self._failed_at.pop(table, None)
        return refused_at is not None and at < refused_at + timedelta(seconds=self._schedule.every)

    def _interruptible(self, cut: ConsistentCut, comparison: TableComparison) -> TableComparison:
        """Return the comparison with a limited rate, and given up if another session waits for a lock of the cut."""
        expected_rows = RateLimitedRows(comparison.expected_rows, self._rate_limit)
        target = CheckedTargetRows(comparison.target, lambda: _check_waiting(cut))
        return replace(comparison, expected_rows=expected_rows, target=target)

    def _ranges(
        self, catalog: Catalog, cut: ConsistentCut, comparison: TableComparison, at: datetime
    ) -> Iterator[tuple[TableVerdict, VerifiedRange]]:
        table = (comparison.sink, comparison.record.topic)
        repaired = [found for found in self._repaired if (found.sink, found.topic) == table]
        begin = next_range(catalog.verified.passes(self._definition.name, *table), at, self._schedule.every)
        if not repaired and begin is None:
            return
        cut.lock(comparison.schema)
        column = comparison.range_column(cut.source)
        for result in repaired:
            self._repaired.remove(result)
            within = None if column is None else KeyRange(column, result.first, result.ended)
            yield self._compare(comparison, within, replace(result, position=cut.position, verified_at=at))
        while begin := next_range(catalog.verified.passes(self._definition.name, *table), at, self._schedule.every):
            within = None if column is None else KeyRange(column, begin.first)
            if within is not None:
                ended = next_range_start(cut.source, comparison.schema, within, self._schedule.rows)
                within = replace(within, ended=ended)
            found = VerifiedRange(
                sink=comparison.sink,
                topic=comparison.record.topic,
                began=begin.began if within or begin.first is None else at,
                number=begin.number if within else 0,
                first=None if within is None else within.first,
                ended=None if within is None else within.ended,
                rows=0,
                mismatched=0,
                position=cut.position,
                verified_at=at,
            )
            verdict, compared = self._compare(comparison, within, found)
            if not verdict.compared:  # for example, a rule filters its rows
                self._refused_at[table] = at
                self._record_result(catalog, verdict, None)
                return
            yield verdict, compared

    def _compare(
        self, comparison: TableComparison, within: KeyRange | None, found: VerifiedRange
    ) -> tuple[TableVerdict, VerifiedRange]:
        verdict = comparison(self._options.mode, within=within, listed=self._options.listed)
        if not verdict.equal and verdict.mode == VerifyMode.CHECKSUM:
            verdict = comparison(VerifyMode.ROWS, within=within, listed=self._options.listed)
        return verdict, replace(found, rows=verdict.rows, mismatched=verdict.mismatched)

    def _record_result(self, catalog: Catalog, verdict: TableVerdict, found: VerifiedRange | None) -> None:
        table = (verdict.sink, verdict.topic)
        if not verdict.equal:
            self.wrong.add(table)
        elif found is not None:
            newest = catalog.verified.passes(self._definition.name, *table)[0]
            if newest[-1].ended is None and not any(one.mismatched for one in newest):
                self.wrong.discard(table)
        self._report(RangeResult(verdict, found))

    def _repair(self, wrong: Sequence[tuple[TableVerdict, VerifiedRange]]) -> bool:
        """Have the reader read the differing rows again; return whether at least one repair was requested."""
        if not self._schedule.repair:
            return False
        run = RepairRun(self._definition, self._options)
        repairs: dict[SinkTable, RepairResult] = {}
        wanted: dict[SinkTable, list[Key]] = {}
        for verdict, found in wrong:
            table, result = (verdict.sink, verdict.topic), run.assess(verdict)
            attempt = (table, found.began, found.number)
            if result.reason is not None or attempt in self._tried:
                continue
            self._tried.add(attempt)
            self._repaired.append(found)
            repairs.setdefault(table, result)
            wanted[table] = [*wanted.get(table, ()), *mismatched_keys(verdict)][:KEYS]
        run.carry_out(wanted, repairs)
        return bool(wanted)
