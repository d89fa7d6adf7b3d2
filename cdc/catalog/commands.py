"""Commands: what a person asked of a running process, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import select, update

from cdc.catalog.database import Database
from cdc.catalog.models import CommandRow

COMPACT: Final = "compact"
"""The command by which the apply process is asked to compact the log; its payload is {"everything": bool}."""
REPLAY: Final = "replay"
"""The kind of command; its result is what the child reported."""
VERIFY: Final = "verify"
"""The kind of command; its result is what the child reported."""
JOB_LEASE: Final = "lease"
"""In the payload of what runs elsewhere, as a job of a cluster that tells of itself: the lease that it lives by."""


class CommandState(StrEnum):
    """How far a command has come."""

    #: Posted and not finished.
    PENDING = "pending"
    #: Finished as asked.
    DONE = "done"
    #: Finished without; the result says why.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    id: int
    pipeline: str
    kind: str
    payload: dict[str, Any]
    state: CommandState
    result: dict[str, Any] | None
    """What came of it; of a pending one, how far it has come."""
    posted_at: datetime
    finished_at: datetime | None


class Commands:
    """The store of commands; the process that carries one out finishes it, and only it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def post(self, pipeline: str, kind: str, payload: Mapping[str, Any]) -> int:
        """Ask for something; hands back the command's number."""
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

    def pending(self, pipeline: str, kind: str) -> list[Command]:
        """Unfinished commands of the kind, oldest first."""
        row = CommandRow
        wanted = (row.pipeline == pipeline, row.kind == kind, row.state == CommandState.PENDING.value)
        with self._database.reading() as session:
            return [_command(found) for found in session.scalars(select(row).where(*wanted).order_by(row.id))]

    def get(self, command: int) -> Command | None:
        """The command of that number, if there is one."""
        with self._database.reading() as session:
            row = session.get(CommandRow, command)
            return None if row is None else _command(row)

    def record(self, command: int, result: Mapping[str, Any]) -> None:
        """Say how far it has come; a command that is finished already, or unknown, stays as it is."""
        with self._database.writing() as session:
            session.execute(
                update(CommandRow)
                .where(CommandRow.id == command, CommandRow.state == CommandState.PENDING.value)
                .values(result=dict(result))
            )

    def ls(self, pipeline: str, kind: str, limit: int | None = None) -> list[Command]:
        """Commands of the kind, newest first: all, or so many."""
        wanted = (CommandRow.pipeline == pipeline, CommandRow.kind == kind)
        newest = select(CommandRow).where(*wanted).order_by(CommandRow.id.desc()).limit(limit)
        with self._database.reading() as session:
            return [_command(row) for row in session.scalars(newest)]

    def finish(self, command: int, result: Mapping[str, Any], *, ok: bool = True) -> None:
        """Say what came of it; a command that is finished already, or unknown, stays as it is."""
        with self._database.writing() as session:
            row = session.get(CommandRow, command)
            if row is not None and row.state == CommandState.PENDING.value:
                row.state = (CommandState.DONE if ok else CommandState.FAILED).value
                row.result = dict(result)
                row.finished_at = datetime.now(UTC)


def _command(row: CommandRow) -> Command:
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
