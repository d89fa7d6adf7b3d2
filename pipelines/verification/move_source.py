"""The command line verb `move`: continues the log on another server, and prints what it checked, proved and did.

`cdc.capture.source_move` describes the procedure. `moved_tables.py` compares the tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Final

from cdc.capture.failover import check_succession
from cdc.capture.former_source import read_to_end
from cdc.capture.operator_recovery import START_READER, check_no_pending_epoch
from cdc.capture.source_move import DIFFERED, NewCluster, open_new_cluster
from cdc.command_output import LineMark, emit, line
from cdc.config import Definition, load_definition
from cdc.errors import (
    ExitCode,
    LogError,
    MovedRowsDiffer,
    SlotInvalidated,
    SlotMissing,
    SourceBehindLog,
    SourceCloned,
    SourceForked,
    SourceGap,
    SourceRejectsConnection,
    SourceRestored,
    SourceUnreachable,
    TimelineChanged,
    TransactionsLost,
)
from cdc.log.reader import LogReader
from cdc.postgres.replication import identify_system
from pipelines.verification.moved_tables import MovedTable, compare_tables
from pipelines.verification.verify import lazy_session

UNKNOWN_TABLE: Final = "the log did not have the table when the source moved"
SOLVED_BY_COMPARISON: Final = (
    SlotInvalidated,
    SlotMissing,
    SourceBehindLog,
    SourceCloned,
    SourceForked,
    SourceGap,
    SourceRestored,
    TimelineChanged,
    TransactionsLost,
)
"""Errors of a server of the log's cluster from which the log can continue in a new epoch.

A former primary and a standby are not among them: they are the wrong server.
"""
_LISTED: Final = 10
"""Maximum number of differing tables that an error message names."""


class StepKind(StrEnum):
    """What a line of the output says about a step of the move."""

    CHECKED = "checked"
    PROVED = "proved"
    DONE = "done"
    NEXT = "next"


@dataclass(slots=True)
class MoveSteps:
    """The steps of one move; each is printed at once, unless the output is JSON."""

    json: bool
    steps: list[dict[str, str]] = field(default_factory=list)

    def __call__(self, kind: StepKind, text: str) -> None:
        """Add a step."""
        self.steps.append({"kind": kind.value, "text": text})
        if not self.json:
            line(LineMark.ADVICE if kind is StepKind.NEXT else LineMark.GOOD, f"{kind.value}: {text}")


def run(arguments: argparse.Namespace) -> int:
    """Run one move, and return the exit status."""
    steps = MoveSteps(arguments.json)
    definition = load_definition(arguments.config)
    tables = move(definition, arguments, steps)
    summary = "checked the move; nothing was changed" if arguments.check else "the log continues on the new server"
    result = {"check": arguments.check, "steps": steps.steps, "tables": [asdict(table) for table in tables]}
    emit("source move", json=arguments.json, summary=summary, result=result)
    return int(ExitCode.OK.value)


def move(definition: Definition, options: argparse.Namespace, report: MoveSteps) -> list[MovedTable]:
    """Continue the log on the server `options.to`; return the compared tables.

    options: `to` is the DSN of the new server, `check` only compares, `resync` copies tables that differ.
    """
    log = LogReader(definition.log.root)
    last = log.last_commit
    if last is None:
        raise LogError("the log is empty, so there is nothing to move", remedy=START_READER)
    check_no_pending_epoch(definition, last)
    moved = definition.model_copy(update={"source": definition.source.moved_to(options.to)})
    known, found = last.system_id or log.identity.system_id, identify_system(options.to)
    report(StepKind.CHECKED, f"the log is at {last.last}, from system {known} on timeline {last.timeline}")
    report(StepKind.CHECKED, f"the new server is system {found.system_id} on timeline {found.timeline}")
    tables: list[MovedTable] = []
    if found.system_id != known:
        _read_former_source(definition, known, options.check, report)
        log.refresh()
        tables = _move_to_cluster(moved, log, options, report)
    elif _continues(moved, options.resync, report):
        report(StepKind.PROVED, "the new server has every transaction of the log, and its slot is not ahead of the log")
    else:
        tables = _move_to_cluster(moved, log, options, report)
    if options.check:
        report(StepKind.NEXT, "run the same command without --check")
    else:
        report(StepKind.NEXT, "set source.dsn to the new server, start the reader, then run 'cdc verify'")
    return tables


def _continues(moved: Definition, resync: bool, report: MoveSteps) -> bool:  # noqa: FBT001 - private
    """Return True if the log can continue in its epoch on a server of its cluster.

    Otherwise raise an error, or return False if with `resync` a comparison of all tables solves it.
    """
    try:
        check_succession(moved)
    except SOLVED_BY_COMPARISON as exc:
        if not resync:
            raise
        report(StepKind.CHECKED, f"{exc.code} {exc.message}")
        return False
    return True


def _read_former_source(definition: Definition, known: str, check: bool, report: MoveSteps) -> None:  # noqa: FBT001
    """Read the former server to its end if it answers; a check only says how far the log is."""
    unread = "the log was not read to its end; only equal rows prove that nothing is missing"
    try:
        former = identify_system(definition.source.current_dsn())
    except (SourceUnreachable, SourceRejectsConnection) as exc:
        report(StepKind.CHECKED, f"the former server does not answer ({exc.message}): {unread}")
        return
    if former.system_id != known or former.in_recovery:
        what = "is a standby" if former.in_recovery else "is not the server of the log"
        report(StepKind.CHECKED, f"the server of source.dsn {what}: {unread}")
    elif check:
        report(StepKind.CHECKED, f"the WAL of the former server ends at {former.wal_end}; a move reads the rest first")
    else:
        position = read_to_end(definition)
        report(
            StepKind.PROVED,
            f"the log has every transaction of the former server, up to {position}; no transaction is open there, and "
            "no table was changed meanwhile",
        )


def _move_to_cluster(
    moved: Definition, log: LogReader, options: argparse.Namespace, report: MoveSteps
) -> list[MovedTable]:
    with open_new_cluster(moved, log, check=options.check) as cluster, lazy_session(moved) as spark:
        if cluster.draft is not None:
            at = cluster.draft.snapshot.consistent_point
            report(StepKind.DONE, f"took a snapshot at {at}; from now on writers may write to the new server")
        tables = []
        for table in compare_tables(cluster, log, spark):
            found = f"{table.rows:,} rows are those of the log" if table.equal else table.reason
            report(StepKind.PROVED if table.equal else StepKind.CHECKED, f"{table.topic}: {found}")
            tables.append(table)
        differing = [table for table in tables if table.compared and not table.equal]
        if differing and not options.resync:
            raise MovedRowsDiffer(_differences(differing, len(tables)))
        if not options.check:
            _begin_epoch(cluster, [table.relation for table in differing], report)
    return tables


def _begin_epoch(cluster: NewCluster, differing: Sequence[int], report: MoveSteps) -> None:
    again = dict.fromkeys(differing, DIFFERED)
    again |= {s.relation: UNKNOWN_TABLE for s in cluster.tables.copied if s.relation not in cluster.schemas}
    cluster.begin_epoch(again)
    copied = f"; the reader copies {len(again)} tables" if again else ", and no table is copied"
    report(StepKind.DONE, f"created slot {cluster.source.slot!r} and began an epoch at {cluster.position}{copied}")


def _differences(differing: Sequence[MovedTable], total: int) -> str:
    listed = "; ".join(f"{table.topic}: {table.reason}" for table in differing[:_LISTED])
    return f"{len(differing)} of {total} tables of the new server differ from the log: {listed}"
