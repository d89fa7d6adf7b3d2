"""Continuous verification: compares every table with the source in repeated passes, one range of keys at a time.

A cut is kept for some seconds only, even for a large table: while a cut exists, the source cannot vacuum newer dead
rows. Some ranges are compared at each cut, and the next ranges at the next cut. The catalog records the progress, so a
restarted process continues there. A mismatch is reported, and repaired if the schedule says so. No mismatch ends the
passes.
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
from cdc.errors import CdcError, ExitCode
from cdc.position import Position
from cdc.postgres.key_range_digests import KeyRange, next_range_start
from cdc.snapshot.backfill_documents import KEYS
from cdc.verify_and_replay_options import VerifyMode
from pipelines.verification.compare_table import TableComparison, TableVerdict
from pipelines.verification.consistent_cut import ConsistentCut, consistent_cut
from pipelines.verification.expected_rows import RateLimitedRows, ReadRateLimit
from pipelines.verification.repair import Key, RepairResult, RepairRun, SinkTable, mismatched_keys
from pipelines.verification.verify import (
    VerifyOptions,
    comparison_at,
    cut_request,
    forget_removed_tables,
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
        self._definition, self._schedule, self._report = definition, schedule, report
        self._signals = _StopSignals()
        self._options = replace(options, listed=KEYS if schedule.repair else options.listed, pause=self._signals.pause)
        self._rate_limit = ReadRateLimit(schedule.rate, pause=self._signals.pause)
        self._refused_at: dict[SinkTable, datetime] = {}
        """Table that cannot be compared → time of its last report."""
        self._tables: list[SinkTable] = []
        """The tables that were selected at the last cut."""
        self._repaired: list[VerifiedRange] = []
        """Ranges whose rows were read again, and which have to be compared again."""
        self._tried: set[tuple[SinkTable, datetime, int]] = set()
        """Ranges that were repaired in this pass; if one still differs, another attempt would not help."""
        self.wrong: set[SinkTable] = set()
        """Tables that have a known mismatch or could not be compared."""

    def run(self) -> None:
        """Compare tables in rounds until SIGTERM or SIGINT. Raises errors of usage, which every round would repeat."""
        with self._signals, Catalog.open(self._definition.catalog.url) as catalog, suppress(Stopped):
            while True:
                self._signals.pause(self._attempt_round(catalog))

    def round(self, catalog: Catalog) -> None:
        """Compare ranges until none is due, at as many cuts as needed."""
        while self._compare_at_cut(catalog):
            pass

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
            return min(RETRY_SECONDS, self._schedule.every)
        return self._seconds_until_due(catalog)

    def _seconds_until_due(self, catalog: Catalog) -> float:
        now, every = datetime.now(UTC), timedelta(seconds=self._schedule.every)
        due = [(self._pass_began(catalog, table) or now) + every for table in self._tables]
        return max(0.1, (min(due) - now).total_seconds()) if due else self._schedule.every

    def _pass_began(self, catalog: Catalog, table: SinkTable) -> datetime | None:
        """Return when the newest pass over a table began; None before the first pass."""
        passes = catalog.verified.passes(self._definition.name, *table)
        began = [found for found in (self._refused_at.get(table), *(ranges[0].began for ranges in passes)) if found]
        return max(began, default=None)

    def _compare_at_cut(self, catalog: Catalog) -> bool:
        """Take a cut and compare due ranges for about CUT_SECONDS; return whether another cut is needed.

        That is the case if ranges may still be due, or if ranges were repaired, which have to be compared again.
        """
        at, until, complete = datetime.now(UTC), time.monotonic() + CUT_SECONDS, True
        wrong: list[tuple[TableVerdict, VerifiedRange]] = []
        with consistent_cut(catalog, cut_request(self._definition, self._options)) as cut:
            for verdict, found in self._due_ranges(catalog, cut, at):
                catalog.verified.record(self._definition.name, found)
                self._record_result(catalog, verdict, found)
                if not verdict.equal:
                    wrong.append((verdict, found))
                if time.monotonic() >= until:
                    complete = False
                    break
                self._signals.pause()
        return self._repair(wrong) or not complete

    def _due_ranges(
        self, catalog: Catalog, cut: ConsistentCut, at: datetime
    ) -> Iterator[tuple[TableVerdict, VerifiedRange]]:
        """Compare the due ranges one after the other; yield the verdict and the catalog record of each.

        The tables are ordered by the start of their newest pass, oldest first.
        """
        selected = select_tables(cut, self._definition, self._options)
        forget_removed_tables(catalog, self._definition, self._options, selected)
        tables = {(sink.name, topic): (sink, oid) for sink, oid, topic in selected}
        self._tables = list(tables)
        began = {table: self._pass_began(catalog, table) or _NEVER for table in tables}
        for table in sorted(tables, key=began.__getitem__):
            sink, oid = tables[table]
            found = comparison_at(cut, sink, oid, table[1])
            if not isinstance(found, TableVerdict):
                limited = replace(found, expected_rows=RateLimitedRows(found.expected_rows, self._rate_limit))
                yield from self._ranges(catalog, cut, limited, at)
            elif began[table] + timedelta(seconds=self._schedule.every) <= at:
                self._refused_at[table] = at
                self._record_result(catalog, found, None)

    def _ranges(
        self, catalog: Catalog, cut: ConsistentCut, comparison: TableComparison, at: datetime
    ) -> Iterator[tuple[TableVerdict, VerifiedRange]]:
        table = (comparison.sink, comparison.record.topic)
        column = comparison.range_column(cut.source)
        for result in [found for found in self._repaired if (found.sink, found.topic) == table]:
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
            yield self._compare(comparison, within, found)

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
