"""repair: rows of sinks that do not equal their source are read again, by key, for the sink that has them wrong.

What a comparison names is asked for as a backfill addressed to that sink: the source's rows replace those that are
missing or differ, and a deletion takes away what the source does not have, for both are newer than anything there. Then
the tables are compared again, at a later instant. Nothing of the stream stops meanwhile, and no other sink is written.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from getpass import getuser
from typing import Any, Final

from cdc.catalog import Catalog, Command, CommandState
from cdc.config import Definition, DeltaSinkDefinition
from cdc.config.job_options import VerifyMode
from cdc.errors import ConfigError, PositionNotReached, StateConflict
from cdc.position import Position
from cdc.snapshot.backfill_progress import find_backfill
from cdc.snapshot.backfill_requests import request_backfill
from cdc.snapshot.backfill_state import BACKFILL, KEYS, BackfillRequest
from cdc.table import exact_glob
from pipelines.verification.compare_rows import LISTED
from pipelines.verification.source_cut import SILENT_AFTER
from pipelines.verification.verdict import TableVerdict, VerifyReport
from pipelines.verification.verify import VerifyOptions, verify

ROUNDS: Final = 3
"""A row that moved to another key while it was repaired took what was wrong with it along: the next round finds it."""
POLL: Final = 0.2
"""Seconds between two looks at a backfill."""

Place = tuple[str, str]
"""Sink and topic."""
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """One table of one sink that did not equal its source."""

    sink: str
    topic: str
    keys: int = 0
    """Read again, in all rounds."""
    missing: int = 0
    extra: int = 0
    differing: int = 0
    """How many there were at first."""
    backfills: tuple[int, ...] = ()
    """Their numbers."""
    equal: bool = False
    """In the end."""
    reason: str | None = None
    """Why it was not read again, and what to do."""

    @property
    def summary(self) -> str:
        """One line for a person."""
        if self.reason is not None:
            return f"{self.sink} {self.topic}: not repaired, {self.reason}"
        outcome = "equal now" if self.equal else "still not equal"
        return f"{self.sink} {self.topic}: {self.keys:,} keys read again, {outcome}"


@dataclass(frozen=True, slots=True)
class Repair:
    """The outcome of one run."""

    report: VerifyReport
    """Each table as it was last compared."""
    repairs: tuple[RepairResult, ...] = ()
    position: Position | None = None
    """Where those that were read again were last compared."""

    @property
    def equal(self) -> bool:
        """Every table in every sink."""
        return self.report.equal

    @property
    def summary(self) -> str:
        """One line for a person."""
        again = f", {sum(one.keys for one in self.repairs):,} keys read again" if self.repairs else ""
        return f"{self.report.summary}{again}"

    def to_json(self) -> dict[str, Any]:
        """The envelope's result."""
        position = None if self.position is None else str(self.position)
        return self.report.to_json() | {"repaired": {"position": position, "tables": [asdict(m) for m in self.repairs]}}


def repair(definition: Definition, options: VerifyOptions) -> Repair:
    """Compare, have read again what differs, compare that again.

    Raises PositionNotReached as verify does, and while the reader does not run.
    """
    options = replace(options, listed=KEYS)
    report = verify(definition, options)
    if options.mode is not VerifyMode.ROWS and (
        untold := [_place(v) for v in report.tables if v.compared and not v.equal]
    ):
        options = replace(options, mode=VerifyMode.ROWS)
        report = _merged(report, verify(definition, _only(options, untold)), untold)
    tried: dict[Place, frozenset[Key]] = {}
    run, position = RepairRun(definition, options.timeout), None
    repairs = {_place(v): run.begun(v) for v in report.tables if not v.equal}
    for _ in range(ROUNDS):
        wanted = {_place(v): keys_of(v) for v in report.tables if not v.equal and repairs[_place(v)].reason is None}
        # what came out the same is not wrong by accident
        wanted = {place: keys for place, keys in wanted.items() if keys and frozenset(keys) != tried.get(place)}
        if not wanted:
            break
        tried |= {place: frozenset(keys) for place, keys in wanted.items()}
        repairs |= run.carry_out(wanted, repairs)
        again = verify(definition, _only(replace(options, mode=VerifyMode.ROWS), wanted))
        position, report = again.position, _merged(report, again, wanted)
        repairs |= {_place(v): replace(repairs[_place(v)], equal=v.equal) for v in report.tables if _place(v) in wanted}
    return Repair(replace(report, tables=tuple(map(_short, report.tables))), tuple(repairs.values()), position)


class RepairRun:
    """What is asked of the reader."""

    def __init__(self, definition: Definition, timeout: float) -> None:
        self._definition, self._timeout = definition, timeout

    def begun(self, verdict: TableVerdict) -> RepairResult:
        """What is wrong with a table, and why it cannot be repaired by keys if so."""
        one = RepairResult(sink=verdict.sink, topic=verdict.topic, **verdict.counts)  # type: ignore[arg-type]
        if verdict.complete and not any(verdict.counts.values()):
            return replace(one, reason=verdict.reason or f"it is {verdict.state}")
        if not verdict.complete or sum(verdict.counts.values()) > KEYS:
            return replace(one, reason=f"more than {KEYS:,} keys differ → {self._rebuild(one)}")
        return one

    def carry_out(
        self, wanted: Mapping[Place, list[Key]], repairs: Mapping[Place, RepairResult]
    ) -> dict[Place, RepairResult]:
        """Ask for everything, sink by sink, for a table is in one backfill at a time; wait until the log holds it."""
        done: dict[Place, RepairResult] = {}
        with Catalog.open(self._definition.catalog.url) as catalog:
            _require_reader(catalog, self._definition.name)
            for sink in sorted({sink for sink, _ in wanted}):
                of_sink = {place: keys for place, keys in wanted.items() if place[0] == sink}
                asked = {place: self._ask(catalog, repairs[place], keys) for place, keys in of_sink.items()}
                done |= {place: self._ended(catalog, one) for place, one in asked.items()}
        return done

    def _ask(self, catalog: Catalog, one: RepairResult, keys: list[Key]) -> RepairResult:
        try:
            asked = request_backfill(self._definition, catalog, _request(one, keys), getuser())
        except StateConflict as exc:
            return replace(one, reason=f"{exc.message} → {exc.fix}")
        except ConfigError as exc:  # a key that the source cannot have, say
            return replace(one, reason=f"{exc.message} → {self._rebuild(one)}")
        return replace(one, keys=one.keys + len(keys), backfills=(*one.backfills, asked.id))

    def _rebuild(self, one: RepairResult) -> str:
        by_name = {sink.name: sink for sink in self._definition.sinks}
        of_table = f" --tables '{one.topic}'" if isinstance(by_name[one.sink], DeltaSinkDefinition) else ""
        return f"cdc replay {one.sink}{of_table}"

    def _ended(self, catalog: Catalog, one: RepairResult) -> RepairResult:
        """Once the log holds it; the sink has it by the next cut, which lies behind that."""
        if one.reason is not None:
            return one
        command = self._wait(catalog, one.backfills[-1])
        if command.state is CommandState.DONE:
            return one
        status = find_backfill(catalog, self._definition.name, command.id)
        why = f": {status.error['message']}" if status.error else ""
        return replace(one, reason=f"backfill {command.id} was {status.state}{why} → {self._rebuild(one)}")

    def _wait(self, catalog: Catalog, job: int) -> Command:
        """Until it ended; raises PositionNotReached if nothing becomes of any backfill for so long."""
        deadline, seen = time.monotonic() + self._timeout, ""
        while True:
            commands = {c.id: c for c in catalog.commands.pending(self._definition.name, BACKFILL)}
            if job not in commands:
                command = catalog.commands.get(job)
                assert command is not None  # noqa: S101 - it was asked for
                return command
            standing = str([(c.id, c.result) for c in commands.values()])  # one before it may be large
            if standing != seen:
                deadline, seen = time.monotonic() + self._timeout, standing
            if time.monotonic() > deadline:
                raise PositionNotReached(
                    f"backfill {job} made no progress for {self._timeout:.0f} s",
                    remedy=f"the reader continues it: watch it with 'cdc backfill show {job}', then verify again",
                )
            _require_reader(catalog, self._definition.name)
            time.sleep(POLL)


def keys_of(verdict: TableVerdict) -> list[Key]:
    """All that are known to be wrong, each once."""
    listed = [*verdict.missing, *verdict.extra, *(entry["key"] for entry in verdict.differing)]
    return list(dict.fromkeys(tuple(text or "" for text in key) for key in listed))


def _request(one: RepairResult, keys: Iterable[Key]) -> BackfillRequest:
    return BackfillRequest((exact_glob(one.topic),), sink=one.sink, keys=tuple(keys))


def _only(options: VerifyOptions, places: Iterable[Place]) -> VerifyOptions:
    sinks, topics = zip(*places, strict=True)
    return replace(options, tables=tuple(sorted({*map(exact_glob, topics)})), sinks=tuple(sorted({*sinks})))


def _merged(before: VerifyReport, again: VerifyReport, wanted: Iterable[Place]) -> VerifyReport:
    """The newest verdict of each table that was compared again because it was wrong."""
    newest = {_place(verdict): verdict for verdict in again.tables if _place(verdict) in wanted}
    return replace(before, tables=tuple(newest.get(_place(v), v) for v in before.tables))


def _short(verdict: TableVerdict) -> TableVerdict:
    """As verify shows it."""
    missing, extra, differing = verdict.missing[:LISTED], verdict.extra[:LISTED], verdict.differing[:LISTED]
    return replace(verdict, missing=missing, extra=extra, differing=differing)


def _place(verdict: TableVerdict) -> Place:
    return verdict.sink, verdict.topic


def _require_reader(catalog: Catalog, pipeline: str) -> None:
    """Raise PositionNotReached unless the reader reported lately: nobody else reads rows again."""
    seen = next((p.reported_at for p in catalog.processes.ls(pipeline) if p.process == "reader"), None)
    age = float("inf") if seen is None else (datetime.now(UTC) - seen).total_seconds()
    if age > SILENT_AFTER:
        raise PositionNotReached(
            f"the reader of pipeline {pipeline!r}, which reads rows again, is not running",
            remedy="start 'cdc run' or 'cdc reader', then repair again",
        )
