"""Continuous: every table is held against the source again and again, range by range, no faster than is allowed.

A cut is held for seconds, however large a table is: each takes a few ranges further, and the catalog keeps how far.
Whoever starts anew goes on there. What differs is told, and mended if that was asked for, and everything goes on.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import Any, Final

from cdc.catalog import Catalog, VerifiedRange
from cdc.config import Definition
from cdc.config.job_options import VerifyMode
from cdc.errors import CdcError, ExitCode
from cdc.position import Position
from cdc.postgres.key_ranges import KeyRange, next_range_start
from cdc.snapshot.backfill_state import KEYS
from pipelines.verification.compare_table import TableComparison
from pipelines.verification.rate_limit import RateLimitedReference, ReadRateLimit
from pipelines.verification.repair import Key, Place, RepairResult, RepairRun, keys_of
from pipelines.verification.schedule import next_place
from pipelines.verification.source_cut import ConsistentCut, consistent_cut
from pipelines.verification.verdict import TableVerdict
from pipelines.verification.verify import VerifyOptions, cut_of, forget_others, inspection_at, tables_at

SLICE: Final = 30.0
"""Seconds after which a cut is given back: while one is held the source can vacuum nothing that is newer."""
RANGE_ROWS: Final = 100_000
"""Rows of one range: what is read again when one of them differs, and what a stop can lose."""
LEAST_ROWS: Final = 1_000
"""Rows of a range where they come slowly."""
RANGE_SECONDS: Final = 10
"""What a range may take at a slow pace."""
AGAIN_AFTER: Final = 10.0
"""Seconds until a cut that was not reached is tried again."""

_NEVER: Final = datetime.min.replace(tzinfo=UTC)
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationSchedule:
    """How often and how fast."""

    every: float
    """Seconds from the beginning of a pass over a table to that of the next one."""
    rate: int | None = None
    """Rows of the source per second; None: as fast as it goes."""
    repair: bool = False
    """Whether rows that differ are read again for the sink that has them wrong."""
    range_rows: int = RANGE_ROWS

    @property
    def rows(self) -> int:
        """About how many rows one range has."""
        slow = self.range_rows if self.rate is None else max(LEAST_ROWS, self.rate * RANGE_SECONDS)
        return min(self.range_rows, slow)


@dataclass(frozen=True, slots=True)
class RangeResult:
    """What is said of a range when it was compared, or of what went wrong."""

    verdict: TableVerdict | None
    found: VerifiedRange | None = None
    """None if nothing was compared."""
    error: CdcError | None = None
    """Why nothing was, for now."""

    def to_json(self) -> dict[str, Any]:
        """The envelope's result: the verdict, and of the range where it lies and where both sides stood."""
        said = {} if self.verdict is None else asdict(self.verdict)
        if self.found is None:
            return said
        position, at = str(Position(self.found.position)), self.found.verified_at.isoformat()
        return {**said, "first": self.found.first, "ended": self.found.ended, "position": position, "verified_at": at}


class Ended(BaseException):
    """SIGTERM or SIGINT came."""


class ContinuousVerification:
    """One process' work; one at a time is enough for a pipeline, and more do no harm."""

    def __init__(
        self,
        definition: Definition,
        options: VerifyOptions,
        rhythm: VerificationSchedule,
        say: Callable[[RangeResult], None],
    ) -> None:
        self._definition, self._rhythm, self._say = definition, rhythm, say
        self._options = replace(options, listed=KEYS) if rhythm.repair else options
        self._pace = ReadRateLimit(rhythm.rate)
        self._refused: dict[Place, datetime] = {}
        """When a table that could not be compared was looked at."""
        self._places: list[Place] = []
        """Of the last cut."""
        self._again: list[VerifiedRange] = []
        """Ranges whose rows were read again."""
        self._tried: set[tuple[Place, datetime, int]] = set()
        """The same, in this pass over their table: what differs then still is not wrong by accident."""
        self.wrong: set[Place] = set()
        """Tables that differ by what is known of them, or that could not be compared."""

    def run(self) -> None:
        """Go on until SIGTERM or SIGINT; raises what asking again does not mend."""
        with _signals(), Catalog.open(self._definition.catalog.url) as catalog:
            try:
                while True:
                    time.sleep(self._guarded(catalog))
            except Ended:
                return

    def round(self, catalog: Catalog) -> None:
        """Compare everything that is due."""
        while self._slice(catalog):
            pass

    def _guarded(self, catalog: Catalog) -> float:
        """A round; seconds until the next one."""
        try:
            self.round(catalog)
        except CdcError as error:
            if error.exit_code is ExitCode.USAGE:
                raise
            self._say(RangeResult(None, error=error))
            return min(AGAIN_AFTER, self._rhythm.every)
        return self._rest(catalog)

    def _rest(self, catalog: Catalog) -> float:
        now, every = datetime.now(UTC), timedelta(seconds=self._rhythm.every)
        due = [(self._begun(catalog, place) or now) + every for place in self._places]
        return max(0.1, (min(due) - now).total_seconds()) if due else self._rhythm.every

    def _begun(self, catalog: Catalog, place: Place) -> datetime | None:
        """When the newest pass over a table began; None before the first."""
        passes = catalog.verified.passes(self._definition.name, *place)
        begun = [found for found in (self._refused.get(place), *(ranges[0].began for ranges in passes)) if found]
        return max(begun, default=None)

    def _slice(self, catalog: Catalog) -> bool:
        """Compare as much as one cut is held for; whether there is more."""
        at, until, complete = datetime.now(UTC), time.monotonic() + SLICE, True
        wrong: list[tuple[TableVerdict, VerifiedRange]] = []
        with consistent_cut(catalog, cut_of(self._definition, self._options)) as cut:
            for verdict, found in self._compared(catalog, cut, at):
                catalog.verified.record(self._definition.name, found)
                self._note(catalog, verdict, found)
                if not verdict.equal:
                    wrong.append((verdict, found))
                if time.monotonic() >= until:
                    complete = False
                    break
        return self._repair(wrong) or not complete

    def _compared(
        self, catalog: Catalog, cut: ConsistentCut, at: datetime
    ) -> Iterator[tuple[TableVerdict, VerifiedRange]]:
        """Range after range of what is due, that table first whose pass began first."""
        wanted = tables_at(cut, self._definition, self._options)
        forget_others(catalog, self._definition, self._options, wanted)
        tables = {(sink.name, topic): (sink, oid) for sink, oid, topic in wanted}
        self._places = list(tables)
        begun = {place: self._begun(catalog, place) or _NEVER for place in tables}
        for place in sorted(tables, key=begun.__getitem__):
            sink, oid = tables[place]
            found = inspection_at(cut, sink, oid, place[1])
            if not isinstance(found, TableVerdict):
                paced = replace(found, reference=RateLimitedReference(found.reference, self._pace))
                yield from self._ranges(catalog, cut, paced, at)
            elif begun[place] + timedelta(seconds=self._rhythm.every) <= at:
                self._refused[place] = at
                self._note(catalog, found, None)

    def _ranges(
        self, catalog: Catalog, cut: ConsistentCut, table: TableComparison, at: datetime
    ) -> Iterator[tuple[TableVerdict, VerifiedRange]]:
        place = (table.sink, table.record.topic)
        column = table.range_column(cut.source)
        for result in [found for found in self._again if (found.sink, found.topic) == place]:
            self._again.remove(result)
            within = None if column is None else KeyRange(column, result.first, result.ended)
            yield self._one(table, within, replace(result, position=cut.position, verified_at=at))
        while begin := next_place(catalog.verified.passes(self._definition.name, *place), at, self._rhythm.every):
            within = None if column is None else KeyRange(column, begin.first)
            if within is not None:
                within = replace(within, ended=next_range_start(cut.source, table.schema, within, self._rhythm.rows))
            found = VerifiedRange(
                sink=table.sink,
                topic=table.record.topic,
                began=begin.began if within or begin.first is None else at,
                number=begin.number if within else 0,
                first=None if within is None else within.first,
                ended=None if within is None else within.ended,
                rows=0,
                mismatched=0,
                position=cut.position,
                verified_at=at,
            )
            yield self._one(table, within, found)

    def _one(
        self, table: TableComparison, within: KeyRange | None, found: VerifiedRange
    ) -> tuple[TableVerdict, VerifiedRange]:
        verdict = table(self._options.mode, within=within, listed=self._options.listed)
        if not verdict.equal and verdict.mode == VerifyMode.CHECKSUM:
            verdict = table(VerifyMode.ROWS, within=within, listed=self._options.listed)
        return verdict, replace(found, rows=verdict.rows, mismatched=verdict.mismatched)

    def _note(self, catalog: Catalog, verdict: TableVerdict, found: VerifiedRange | None) -> None:
        place = (verdict.sink, verdict.topic)
        if not verdict.equal:
            self.wrong.add(place)
        elif found is not None:
            newest = catalog.verified.passes(self._definition.name, *place)[0]
            if newest[-1].ended is None and not any(one.mismatched for one in newest):
                self.wrong.discard(place)
        self._say(RangeResult(verdict, found))

    def _repair(self, wrong: Sequence[tuple[TableVerdict, VerifiedRange]]) -> bool:
        """Have what differs read again, and remember which ranges that was; whether there was anything."""
        if not self._rhythm.repair:
            return False
        run = RepairRun(self._definition, self._options.timeout)
        asked: dict[Place, RepairResult] = {}
        wanted: dict[Place, list[Key]] = {}
        for verdict, found in wrong:
            place, one = (verdict.sink, verdict.topic), run.begun(verdict)
            mark = (place, found.began, found.number)
            if one.reason is not None or mark in self._tried:
                continue
            self._tried.add(mark)
            self._again.append(found)
            asked.setdefault(place, one)
            wanted[place] = [*wanted.get(place, ()), *keys_of(verdict)][:KEYS]
        run.carry_out(wanted, asked)
        return bool(wanted)


@contextmanager
def _signals() -> Iterator[None]:
    """The first SIGTERM or SIGINT inside the block raises Ended; what is being given back then is not disturbed."""

    def end(_number: int, _frame: FrameType | None) -> None:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        raise Ended

    before = {number: signal.signal(number, end) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
