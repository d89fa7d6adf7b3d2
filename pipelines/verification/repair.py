"""Repair of mismatches: the reader reads the differing rows again by key, for the sink in which they differ.

Each repair is a backfill that is addressed to one sink. Its rows and deletes have later positions than all rows of the
target. So its rows replace missing and differing rows, and its deletes remove extra rows. Then the tables are compared
again at a later cut. The stream continues meanwhile, and no other sink is written.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from getpass import getuser
from typing import Any, Final

from cdc.catalog import Catalog, Command, CommandState
from cdc.config import Definition
from cdc.errors import ConfigError, PositionNotReached, StateConflict
from cdc.position import Position
from cdc.snapshot.backfill_documents import BACKFILL, KEYS, BackfillRequest
from cdc.snapshot.backfill_status import find_backfill
from cdc.snapshot.reader_commands import request_backfill
from cdc.table import exact_glob
from cdc.verify_and_replay_options import VerifyMode
from pipelines.verification.compare_rows import LISTED
from pipelines.verification.compare_table import TableVerdict
from pipelines.verification.consistent_cut import SILENT_AFTER
from pipelines.verification.verify import VerifyOptions, VerifyReport, verify

ROUNDS: Final = 3
"""Maximum rounds of repair: a wrong row that moves to another key during a repair is found by the next round."""
POLL: Final = 0.2
"""Seconds between two reads of the state of a backfill."""

SinkTable = tuple[str, str]
"""A table in a sink, as (name of the sink, topic)."""
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """The repair of one table of one sink; its fields are those of the JSON output."""

    sink: str
    topic: str
    keys: int = 0
    """Number of keys read again, in all rounds."""
    missing: int = 0
    """Number of rows that were missing in the target before the repair."""
    extra: int = 0
    """Number of rows that were only in the target before the repair."""
    differing: int = 0
    """Number of rows whose values differed from the expected ones before the repair."""
    backfills: tuple[int, ...] = ()
    """Numbers of the backfills that read rows again."""
    equal: bool = False
    """Whether the table was equal when it was last compared."""
    reason: str | None = None
    """Why no rows were read again, or why this failed, with the remedy; None if the rows were read again."""

    @property
    def summary(self) -> str:
        """One line of text: what was repaired in one table of one sink, or why nothing was repaired."""
        if self.reason is not None:
            return f"{self.sink} {self.topic}: not repaired, {self.reason}"
        outcome = "equal now" if self.equal else "still not equal"
        return f"{self.sink} {self.topic}: {self.keys:,} keys read again, {outcome}"


@dataclass(frozen=True, slots=True)
class Repair:
    """The result of `cdc verify --repair`: the final verdicts, and a RepairResult for each table that differed."""

    report: VerifyReport
    """The last verdict of each table."""
    repairs: tuple[RepairResult, ...] = ()
    position: Position | None = None
    """The cut of the last comparison after a repair; None if nothing was repaired."""

    @property
    def equal(self) -> bool:
        """Whether every table is equal in every sink."""
        return self.report.equal

    @property
    def summary(self) -> str:
        """One line of text: how many tables are equal, and how many keys were read again."""
        again = f", {sum(one.keys for one in self.repairs):,} keys read again" if self.repairs else ""
        return f"{self.report.summary}{again}"

    def to_json(self) -> dict[str, Any]:
        """Return the content of the JSON envelope."""
        position = None if self.position is None else str(self.position)
        return self.report.to_json() | {"repaired": {"position": position, "tables": [asdict(m) for m in self.repairs]}}


def repair(definition: Definition, options: VerifyOptions) -> Repair:
    """Compare the tables, repair those that differ, and compare them again.

    Raises PositionNotReached for the same reasons as `verify`, and if the reader is not running.
    """
    options = replace(options, listed=KEYS)
    report = verify(definition, options)
    if options.mode is not VerifyMode.ROWS and (
        without_keys := [_sink_table(v) for v in report.tables if v.compared and not v.equal]
    ):
        options = replace(options, mode=VerifyMode.ROWS)
        report = _merged(report, verify(definition, _only(options, without_keys)), without_keys)
    tried: dict[SinkTable, frozenset[Key]] = {}
    run, position = RepairRun(definition, options), None
    repairs = {_sink_table(v): run.assess(v) for v in report.tables if not v.equal}
    for _ in range(ROUNDS):
        wanted = {
            _sink_table(v): mismatched_keys(v)
            for v in report.tables
            if not v.equal and repairs[_sink_table(v)].reason is None
        }
        # if the same keys differ again, another attempt would not help
        wanted = {table: keys for table, keys in wanted.items() if keys and frozenset(keys) != tried.get(table)}
        if not wanted:
            break
        tried |= {table: frozenset(keys) for table, keys in wanted.items()}
        repairs |= run.carry_out(wanted, repairs)
        again = verify(definition, _only(replace(options, mode=VerifyMode.ROWS), wanted))
        position, report = again.position, _merged(report, again, wanted)
        repairs |= {
            _sink_table(v): replace(repairs[_sink_table(v)], equal=v.equal)
            for v in report.tables
            if _sink_table(v) in wanted
        }
    return Repair(replace(report, tables=tuple(map(_shortened, report.tables))), tuple(repairs.values()), position)


class RepairRun:
    """Requests backfills that read differing rows again, and waits until they end."""

    def __init__(self, definition: Definition, options: VerifyOptions) -> None:
        self._definition = definition
        self._timeout = options.timeout
        self._pause = options.pause

    def assess(self, verdict: TableVerdict) -> RepairResult:
        """Return the RepairResult of a table before any repair: the verdict's numbers of mismatches.

        Its `reason` is set if the table cannot be repaired by key.
        """
        one = RepairResult(sink=verdict.sink, topic=verdict.topic, **verdict.counts)  # type: ignore[arg-type]
        if verdict.complete and not any(verdict.counts.values()):
            return replace(one, reason=verdict.reason or f"the table is {verdict.state}")
        if not verdict.complete or sum(verdict.counts.values()) > KEYS:
            return replace(one, reason=f"more than {KEYS:,} keys differ → {self._replay_command(one)}")
        return one

    def carry_out(
        self, wanted: Mapping[SinkTable, list[Key]], repairs: Mapping[SinkTable, RepairResult]
    ) -> dict[SinkTable, RepairResult]:
        """Request the backfills of one sink after the other, and wait until the log contains their rows.

        wanted: the keys to read again, by table. repairs: the results so far. Returns the new results of these tables.
        The sinks take turns, because only one backfill at a time can read a table.
        """
        done: dict[SinkTable, RepairResult] = {}
        with Catalog.open(self._definition.catalog.url) as catalog:
            _require_reader(catalog, self._definition.name)
            for sink in sorted({sink for sink, _ in wanted}):
                of_sink = {table: keys for table, keys in wanted.items() if table[0] == sink}
                requested = {table: self._request(catalog, repairs[table], keys) for table, keys in of_sink.items()}
                done |= {table: self._wait_for_result(catalog, one) for table, one in requested.items()}
        return done

    def _request(self, catalog: Catalog, one: RepairResult, keys: list[Key]) -> RepairResult:
        try:
            backfill = request_backfill(self._definition, catalog, _backfill_request(one, keys), getuser())
        except StateConflict as exc:
            return replace(one, reason=f"{exc.message} → {exc.fix}")
        except ConfigError as exc:  # for example, a key whose text is not valid for its type at the source
            return replace(one, reason=f"{exc.message} → {self._replay_command(one)}")
        return replace(one, keys=one.keys + len(keys), backfills=(*one.backfills, backfill.id))

    def _replay_command(self, one: RepairResult) -> str:
        by_name = {sink.name: sink for sink in self._definition.sinks_of_tables}
        of_table = f" --tables '{one.topic}'" if not by_name[one.sink].has_one_target else ""
        return f"cdc replay {one.sink}{of_table}"

    def _wait_for_result(self, catalog: Catalog, one: RepairResult) -> RepairResult:
        """Wait until the log contains the rows of the table's last backfill, and return the result.

        At the next cut, the sink has these rows too. If the backfill fails, the result has a reason.
        """
        if one.reason is not None:
            return one
        command = self._wait_for_end(catalog, one.backfills[-1])
        if command.state is CommandState.DONE:
            return one
        status = find_backfill(catalog, self._definition.name, command.id)
        why = f": {status.error['message']}" if status.error else ""
        return replace(
            one, reason=f"backfill {command.id} ended with state {status.state}{why} → {self._replay_command(one)}"
        )

    def _wait_for_end(self, catalog: Catalog, job: int) -> Command:
        """Wait for the end of a backfill, and return its command.

        Raises PositionNotReached if no backfill of the pipeline makes progress within the timeout.
        """
        deadline, last_progress = time.monotonic() + self._timeout, ""
        while True:
            commands = {c.id: c for c in catalog.commands.pending(self._definition.name, BACKFILL)}
            if job not in commands:
                command = catalog.commands.get(job)
                assert command is not None  # noqa: S101 - it was requested
                return command
            # of all backfills, because a large one may run first
            progress = str([(c.id, c.result) for c in commands.values()])
            if progress != last_progress:
                deadline, last_progress = time.monotonic() + self._timeout, progress
            if time.monotonic() > deadline:
                raise PositionNotReached(
                    f"backfill {job}, which repairs mismatches, made no progress for {self._timeout:.0f} s",
                    remedy=f"wait until 'cdc backfill show {job}' shows the end of the backfill, then verify again",
                )
            _require_reader(catalog, self._definition.name)
            self._pause(POLL)


def mismatched_keys(verdict: TableVerdict) -> list[Key]:
    """Return the keys of all listed mismatches. Each key appears once."""
    listed = [*verdict.missing, *verdict.extra, *(entry["key"] for entry in verdict.differing)]
    return list(dict.fromkeys(tuple(text or "" for text in key) for key in listed))


def _backfill_request(one: RepairResult, keys: Iterable[Key]) -> BackfillRequest:
    return BackfillRequest((exact_glob(one.topic),), sink=one.sink, keys=tuple(keys))


def _only(options: VerifyOptions, tables: Iterable[SinkTable]) -> VerifyOptions:
    sinks, topics = zip(*tables, strict=True)
    return replace(options, tables=tuple(sorted({*map(exact_glob, topics)})), sinks=tuple(sorted({*sinks})))


def _merged(before: VerifyReport, again: VerifyReport, wanted: Iterable[SinkTable]) -> VerifyReport:
    """Return the report `before`, with the verdicts of the wanted tables replaced by their verdicts in `again`."""
    newest = {_sink_table(verdict): verdict for verdict in again.tables if _sink_table(verdict) in wanted}
    return replace(before, tables=tuple(newest.get(_sink_table(v), v) for v in before.tables))


def _shortened(verdict: TableVerdict) -> TableVerdict:
    """Return the verdict with at most LISTED keys in each of its lists, as `cdc verify` shows them."""
    missing = verdict.missing[:LISTED]
    extra = verdict.extra[:LISTED]
    differing = verdict.differing[:LISTED]
    return replace(verdict, missing=missing, extra=extra, differing=differing)


def _sink_table(verdict: TableVerdict) -> SinkTable:
    return verdict.sink, verdict.topic


def _require_reader(catalog: Catalog, pipeline: str) -> None:
    """Raise PositionNotReached if the reader has not reported recently. The reader carries out backfills."""
    seen = next((p.reported_at for p in catalog.processes.ls(pipeline) if p.process == "reader"), None)
    age = float("inf") if seen is None else (datetime.now(UTC) - seen).total_seconds()
    if age > SILENT_AFTER:
        raise PositionNotReached(
            f"the reader of pipeline {pipeline!r} is not running, so no backfill can run",
            remedy="start 'cdc run' or 'cdc reader', then run 'cdc verify --repair' again",
        )
