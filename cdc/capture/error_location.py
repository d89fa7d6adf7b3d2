"""Error location: adds the positions of slot and log to errors that end the stream.

An operator who has to advance the slot or begin an epoch needs the slot's name, both positions, and a command with an
LSN. The server's message contains none of them.
"""

from __future__ import annotations

from typing import Final, TypeVar

from cdc.config import Definition
from cdc.errors import (
    CdcError,
    LogError,
    PublicationMissing,
    PublicationNarrowed,
    PublicationReplaced,
    SourceError,
    UndecodableWal,
)
from cdc.log.reader import LogReader
from cdc.postgres.connection import ANSWER_TIMEOUT, connect
from cdc.postgres.slot import SlotStatus, slot_status

ERRORS_WITH_POSITIONS: Final = (UndecodableWal, PublicationMissing, PublicationNarrowed, PublicationReplaced)
"""Errors about the next WAL; errors about the slot already contain its position."""
Located = TypeVar("Located", bound=SourceError)


def add_positions(exc: Located, definition: Definition) -> Located:
    """The error with the positions of slot and log; unchanged if the source does not answer or has no such slot."""
    source = definition.source
    try:
        with connect(source.current_dsn(), application_name="cdc identify", timeout=ANSWER_TIMEOUT) as conn:
            slot = slot_status(conn, source.slot.name)
    except CdcError:
        return exc
    if slot is None:
        return exc
    where = f"slot {slot.name!r} is at {slot.confirmed_flush}, the log is {_log_position(definition)}"
    if isinstance(exc, UndecodableWal):
        where += "; the transaction that cannot be decoded comes next"
    return type(exc)(f"{exc.message}: {where}", remedy=_skip(exc, slot) if isinstance(exc, UndecodableWal) else exc.fix)


def _log_position(definition: Definition) -> str:
    try:
        durable = LogReader(definition.log.root).durable
    except LogError as exc:
        return f"unreadable ({exc.code})"
    return "empty" if durable is None else f"at {durable}"


def _skip(exc: UndecodableWal, slot: SlotStatus) -> str:
    """Remedy that skips the transaction; the server reports neither its end nor its tables."""
    cause = "" if exc.fix == UndecodableWal.remedy else exc.fix.partition(": run ")[0] + "; "
    skip = f"'cdc slots recover -c FILE --skip-to {slot.wal_end} --resync \"*\"'"
    return (
        f"{cause}stop the reader, run {skip} (or an earlier LSN behind that transaction, and the tables that were "
        "written up to there), start the reader, then run 'cdc tables resync \"*\"'"
    )
