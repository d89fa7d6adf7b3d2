"""Commands: requests that people make to a running process, and their results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Row, bindparam, delete, select, update

from cdc.catalog.connection import Database
from cdc.catalog.models import CommandRow

COMPACT: Final = "compact"
"""Kind of the command that asks the apply process to compact the log; its payload is {"everything": bool}."""
REPLAY: Final = "replay"
"""Kind of the command that starts a replay; its result is the report of the child process."""
VERIFY: Final = "verify"
"""Kind of the command that starts a verification; its result is the report of the child process."""
JOB_LEASE: Final = "lease"
"""Key in the payload of a command whose job runs on a cluster; the value names the lease that the job renews."""


class CommandState(StrEnum):
    """State of a command."""

    #: Posted and not finished.
    PENDING = "pending"
    #: Finished with success.
    DONE = "done"
    #: Finished without success; the result contains the error.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Command:
    """A command as the catalog stores it."""

    id: int
    pipeline: str
    kind: str
    payload: dict[str, Any]
    state: CommandState
    result: dict[str, Any] | None
    """Result of a finished command; progress of a pending one."""
    posted_at: datetime
    finished_at: datetime | None


class Commands:
    """The store of commands; only the process that executes a command sets its result."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def post(self, pipeline: str, kind: str, payload: Mapping[str, Any]) -> int:
        """Store a new command, and return its number."""
        row = CommandRow(
            pipeline=pipeline,
            kind=kind,
            payload=dict(payload),
            state=CommandState.PENDING.value,
            posted_at=datetime.now(UTC),
        )
        with self._database.writing() as session:
            session.add(row)
            session.flush()
            return row.id

    def pending(self, pipeline: str, *kinds: str) -> list[Command]:
        """Return the unfinished commands of the kinds, oldest first."""
        with self._database.reading() as session:
            return [_command(row) for row in session.execute(_PENDING, {"pipeline": pipeline, "kinds": kinds})]

    def get(self, command: int) -> Command | None:
        """Return the command with that number; None if the catalog has none."""
        with self._database.reading() as session:
            row = session.get(CommandRow, command)
            return None if row is None else _command(row)

    def finished(self, commands: Iterable[int]) -> list[Command]:
        """Return those of the commands with these numbers that are finished."""
        chosen = (CommandRow.id.in_(list(commands)), CommandRow.state != CommandState.PENDING.value)
        with self._database.reading() as session:
            return [_command(row) for row in session.scalars(select(CommandRow).where(*chosen))]

    def record(self, command: int, result: Mapping[str, Any]) -> None:
        """Store the progress of a pending command; does nothing if the command is finished or unknown."""
        with self._database.writing() as session:
            session.execute(
                update(CommandRow)
                .where(CommandRow.id == command, CommandRow.state == CommandState.PENDING.value)
                .values(result=dict(result))
            )

    def ls(self, pipeline: str, kind: str, limit: int | None = None) -> list[Command]:
        """Return the newest commands of the kind, newest first; all of them if `limit` is None."""
        of_kind = (CommandRow.pipeline == pipeline, CommandRow.kind == kind)
        newest = select(CommandRow).where(*of_kind).order_by(CommandRow.id.desc()).limit(limit)
        with self._database.reading() as session:
            return [_command(row) for row in session.scalars(newest)]

    def delete(self, commands: Iterable[int]) -> None:
        """Delete commands that nobody needs any more; an answer that arrives later has no effect."""
        with self._database.writing() as session:
            session.execute(delete(CommandRow).where(CommandRow.id.in_(list(commands))))

    def finish(self, command: int, result: Mapping[str, Any], *, ok: bool = True) -> bool:
        """Store the result and finish the command; return False if the command is finished already or unknown."""
        with self._database.writing() as session:
            row = session.get(CommandRow, command)
            if row is None or row.state != CommandState.PENDING.value:
                return False
            row.state = (CommandState.DONE if ok else CommandState.FAILED).value
            row.result = dict(result)
            row.finished_at = datetime.now(UTC)
            return True

    def reopen(self, command: int) -> None:
        """Make a failed command pending again, with the result as its progress; does nothing to other commands."""
        failed = (CommandRow.id == command, CommandRow.state == CommandState.FAILED.value)
        with self._database.writing() as session:
            session.execute(
                update(CommandRow).where(*failed).values(state=CommandState.PENDING.value, finished_at=None)
            )


_COLUMNS: Final = CommandRow.__table__.c
_PENDING: Final = (
    select(CommandRow.__table__)
    .where(
        _COLUMNS.pipeline == bindparam("pipeline"),
        _COLUMNS.kind.in_(bindparam("kinds", expanding=True)),
        _COLUMNS.state == CommandState.PENDING.value,
    )
    .order_by(_COLUMNS.id)
)
"""Query of `Commands.pending`. It selects columns, not objects, and is built once, because it runs very often."""


def _command(row: CommandRow | Row[Any]) -> Command:
    return Command(
        id=row.id,
        pipeline=row.pipeline,
        kind=row.kind,
        payload=row.payload,
        state=CommandState(row.state),
        result=row.result,
        posted_at=row.posted_at,
        finished_at=row.finished_at,
    )
