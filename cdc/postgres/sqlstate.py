"""Classification of Postgres errors into errors of cdc, by SQLSTATE and, where necessary, by text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Final, NamedTuple

import psycopg

from cdc import errors
from cdc.errors import CdcError


class ErrorCourse(StrEnum):
    """Reaction of cdc to an error of the source."""

    #: A transient cause: retry at once, then with growing pauses.
    RETRY_FAST = "retry fast"
    #: A cause that may be permanent: retry rarely.
    RETRY_SLOW = "retry slow"
    #: Only an operator can fix the cause.
    OPERATOR = "operator"
    #: Changes are missing in the stream: a new epoch has to copy the rows.
    RESYNC = "resync"


class ErrorRule(NamedTuple):
    """One rule of the classification; the first rule whose SQLSTATE prefix and text match applies."""

    sqlstate: str
    """A complete SQLSTATE, the first characters of several, or "" for any."""
    text: str
    """Text that the English message of Postgres contains, or "" for any.

    For messages in other languages a rule without a text applies.
    """
    course: ErrorCourse
    error: type[CdcError]
    remedy: str | None = None


_FAST, _SLOW, _OPERATOR, _RESYNC = ErrorCourse
_OWN_DATABASE: Final = "set source.dsn to the slot's database, or choose another source.slot.name"
_NEWER: Final = "use Postgres 15 or newer"
PAST_THE_PROXY: Final = (
    "point source.dsn at the server itself: cdc needs replication connections and the settings of its sessions, which "
    "a proxy such as PgBouncer does not pass; applications may use the proxy"
)
_TOO_LARGE: Final = (
    "make the value or row smaller at the source, because a bytea from 512 MiB on or a row from 1 GiB on is too large "
    f"to be sent as text; {errors.UndecodableWal.remedy}"
)

_TIMED_OUT: Final = (
    "remove the timeout that the message names from the proxy or the server that ended the session: cdc sets the "
    "timeouts of its own sessions to 0"
)

RULES: Final = (
    ErrorRule("55006", "", _FAST, errors.SlotInUse),
    ErrorRule("42704", "replication slot", _RESYNC, errors.SlotMissing),
    ErrorRule("42704", "publication", _RESYNC, errors.PublicationReplaced),
    ErrorRule("55000", "invalidated", _RESYNC, errors.SlotInvalidated),
    ErrorRule("55000", "can no longer", _RESYNC, errors.SlotInvalidated),
    ErrorRule("55000", "was not created in this database", _OPERATOR, errors.SlotUnsuitable, _OWN_DATABASE),
    ErrorRule("55000", "physical replication slot", _OPERATOR, errors.SlotUnsuitable),
    ErrorRule(
        "55000", "wal_level", _OPERATOR, errors.PreflightFailed, "set wal_level = logical and restart the server"
    ),
    # a standby: one before version 16, or one that synchronizes the slot from its primary
    ErrorRule("55000", "in recovery", _FAST, errors.SourceInRecovery),
    ErrorRule("55000", "cannot use replication slot", _FAST, errors.SourceInRecovery),
    ErrorRule("55000", "", _OPERATOR, errors.SourceError),
    ErrorRule(
        "53400",
        "temporary file",
        _OPERATOR,
        errors.PreflightFailed,
        "raise temp_file_limit: 'ALTER ROLE NAME SET temp_file_limit = -1', for the role in source.dsn",
    ),
    ErrorRule(
        "53400",
        "",
        _OPERATOR,
        errors.PreflightFailed,
        "raise max_replication_slots, or drop a slot (list them: SELECT slot_name FROM pg_replication_slots)",
    ),
    ErrorRule("0A000", "proto_version", _OPERATOR, errors.PreflightFailed, _NEWER),
    ErrorRule("22023", "", _OPERATOR, errors.SlotUnsuitable),
    ErrorRule("42501", "may not be used as an output plugin", _SLOW, errors.OutputPluginRefused),
    ErrorRule("42501", "", _OPERATOR, errors.PreflightFailed),
    ErrorRule(
        "42602",
        "",
        _OPERATOR,
        errors.InvalidDefinition,
        "name the slot with lower-case letters, digits and underscores",
    ),
    ErrorRule("25006", "", _OPERATOR, errors.PreflightFailed, "point source.dsn at the primary"),
    ErrorRule("28", "", _SLOW, errors.SourceRejectsConnection),
    ErrorRule("3D000", "", _SLOW, errors.SourceRejectsConnection, "correct the database's name in source.dsn"),
    ErrorRule("08", "unsupported startup parameter", _OPERATOR, errors.PreflightFailed, PAST_THE_PROXY),
    ErrorRule("08", "", _FAST, errors.SourceUnreachable),
    ErrorRule(
        "53300",
        "",
        _SLOW,
        errors.SourceRejectsConnection,
        "raise max_wal_senders or max_connections, or end idle sessions",
    ),
    ErrorRule("53", "", _FAST, errors.SourceUnreachable),
    ErrorRule("57P05", "", _FAST, errors.SourceUnreachable, _TIMED_OUT),
    ErrorRule("25P03", "", _FAST, errors.SourceUnreachable, _TIMED_OUT),
    ErrorRule("25P04", "", _FAST, errors.SourceUnreachable, _TIMED_OUT),
    ErrorRule("57014", "timeout", _FAST, errors.SourceUnreachable, _TIMED_OUT),
    ErrorRule("57P", "", _FAST, errors.SourceUnreachable),
    ErrorRule("57014", "", _FAST, errors.SourceUnreachable),
    ErrorRule("40", "", _FAST, errors.SourceUnreachable),
    ErrorRule("55P03", "", _FAST, errors.SourceUnreachable),
    # files that a server restart during decoding removes and that the server creates again
    ErrorRule("", "spill file", _FAST, errors.SourceUnreachable),
    ErrorRule("", "snapbuild", _FAST, errors.SourceUnreachable),
    ErrorRule("XX000", "unrecognized pgoutput option", _OPERATOR, errors.PreflightFailed, _NEWER),
    ErrorRule("XX000", "invalid memory alloc request size", _SLOW, errors.UndecodableWal, _TOO_LARGE),
    ErrorRule("XX", "", _SLOW, errors.UndecodableWal),
    # a message of 1 GiB; if the server is out of memory, the SQLSTATE is another one
    ErrorRule("54000", "", _SLOW, errors.UndecodableWal, _TOO_LARGE),
    ErrorRule("22021", "", _SLOW, errors.UndecodableWal),
    # a character of the database's encoding without a UTF-8 equivalent
    ErrorRule("22P05", "", _SLOW, errors.UndecodableWal),
    ErrorRule("58", "", _FAST, errors.SourceUnreachable),
)
"""All rules in the order in which they are tried; an error that matches none becomes SourceError."""

_ENDED_SESSIONS: Final = (
    ("idle-session timeout", "57P05"),
    ("idle-in-transaction timeout", "25P03"),
    ("transaction timeout", "25P04"),
)
"""Text in the message of Postgres → SQLSTATE, because psycopg has none if the message arrived before a statement."""

_FATAL: Final = re.compile(r"(?:FATAL|ERROR):\s+(.+)")
_REFUSALS: Final = (
    ("password authentication failed", "28P01"),
    ("no password supplied", "28P01"),
    ("is not permitted to log in", "28000"),
    ("does not exist", "3D000"),
    ("pg_hba.conf", "28000"),
    ("must be superuser or replication role", "42501"),
    ("permission denied to start WAL sender", "42501"),
    ("max_wal_senders", "53300"),
    ("too many c", "53300"),
    ("remaining connection slots are reserved", "53300"),
)
"""Text in the message of Postgres → SQLSTATE, because psycopg has no SQLSTATE for failed connections."""


def classify(error: psycopg.Error) -> CdcError:
    """Return the CdcError for a failed statement; the caller raises it with the original error as the cause.

    The text of the CdcError is the primary message of Postgres, never the detail, which contains row values.
    """
    if error.sqlstate is None and isinstance(error, psycopg.OperationalError):
        for part, sqlstate in _ENDED_SESSIONS:
            if part in str(error):
                return classify_message(sqlstate, f"the source ended the session: {part}")
        return errors.SourceUnreachable(f"the connection to the source broke: {_first_line(str(error))}")
    if error.sqlstate is None:
        return errors.SourceError(f"the connection to the source is unusable: {_first_line(str(error))}")
    return classify_message(error.sqlstate, error.diag.message_primary or _first_line(str(error)))


def classify_message(sqlstate: str, message: str) -> CdcError:
    """Return the CdcError for a SQLSTATE and a primary message of Postgres."""
    for rule in RULES:
        if sqlstate.startswith(rule.sqlstate) and rule.text in message:
            return rule.error(f"{message} ({sqlstate})", remedy=rule.remedy)
    return errors.SourceError(f"{message} ({sqlstate})")


def connection_failure(error: psycopg.Error, *, secrets: Sequence[str] = ()) -> CdcError:
    """Return the CdcError for a failed connection attempt; `secrets` in its text are masked."""
    text = str(error)
    for secret in secrets:
        text = text.replace(secret, "***")
    found = _FATAL.search(text)
    if found is None:
        return errors.SourceUnreachable(_first_line(text))
    message = found.group(1).strip()
    sqlstate = next((state for part, state in _REFUSALS if part in message), "08006")
    return classify_message(sqlstate, message)


@contextmanager
def map_errors() -> Iterator[None]:
    """Replace errors of psycopg inside the block by errors of cdc; the original error is the cause."""
    try:
        yield
    except psycopg.Error as error:
        raise classify(error) from error


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0].strip() or "no reason given"
