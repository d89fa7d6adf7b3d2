"""Classification of what Postgres says went wrong into our errors, by SQLSTATE and, where one has to, by text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import psycopg

from cdc import errors
from cdc.errors import CdcError


class Rule(NamedTuple):
    """One line of the table: the first whose SQLSTATE prefix and text fit decides."""

    sqlstate: str
    """A whole SQLSTATE, a class of two characters, or "" for any."""
    text: str
    """A part of the server's message in English, "" for any; servers that speak otherwise get the general rule."""
    error: type[CdcError]
    remedy: str | None = None


RULES: Final = (
    Rule("55006", "", errors.SlotInUse),
    Rule("42704", "replication slot", errors.SlotMissing),
    Rule(
        "42704",
        "publication",
        errors.PreflightFailed,
        "the publication was made after the slot, or made anew: drop the slot and let log and targets be copied anew",
    ),
    Rule("55000", "invalidated", errors.SlotInvalidated),
    Rule("55000", "can no longer get changes", errors.SlotInvalidated),
    Rule(
        "55000",
        "was not created in this database",
        errors.PreflightFailed,
        "name the slot's own database in source.dsn, or choose another source.slot.name",
    ),
    Rule("55000", "wal_level", errors.PreflightFailed, "set wal_level = logical and restart the server"),
    Rule("55000", "", errors.SourceError),
    Rule("53400", "", errors.PreflightFailed, "raise max_replication_slots, or drop slots that nobody reads"),
    Rule("0A000", "proto_version", errors.PreflightFailed, "use Postgres 14 or newer"),
    Rule("22023", "", errors.PreflightFailed, "choose another source.slot.name: this slot has another plugin"),
    Rule("42501", "", errors.PreflightFailed),
    Rule("42602", "", errors.InvalidDefinition, "name the slot with lower-case letters, digits and underscores"),
    Rule("25006", "", errors.PreflightFailed, "point source.dsn at the primary"),
    Rule("28", "", errors.SourceUnreachable),
    Rule("3D000", "", errors.SourceUnreachable, "correct the database's name in source.dsn"),
    Rule("08", "", errors.SourceUnreachable),
    Rule("53", "", errors.SourceUnreachable),
    Rule("57P", "", errors.SourceUnreachable),
    Rule("57014", "", errors.SourceUnreachable),
    Rule("40", "", errors.SourceUnreachable),
    Rule("55P03", "", errors.SourceUnreachable),
    # files that the server loses when it restarts while it decodes: it makes them anew
    Rule("", "spill file", errors.SourceUnreachable),
    Rule("", "snapbuild", errors.SourceUnreachable),
    Rule("XX000", "unrecognized pgoutput option", errors.PreflightFailed, "use Postgres 14 or newer"),
    Rule("XX", "", errors.UndecodableWal),
    Rule("22021", "", errors.UndecodableWal),
    Rule("58", "", errors.SourceUnreachable),
)

_FATAL: Final = re.compile(r"(?:FATAL|ERROR):\s+(.+)")
_REFUSALS: Final = (
    ("password authentication failed", "28P01"),
    ("no password supplied", "28P01"),
    ("does not exist", "3D000"),
    ("pg_hba.conf", "28000"),
    ("must be superuser or replication role", "42501"),
    ("permission denied to start WAL sender", "42501"),
    ("max_wal_senders", "53300"),
)
"""While connecting psycopg gives no SQLSTATE; these texts of the server stand for one."""


def classify(error: psycopg.Error) -> CdcError:
    """Our error for a failed statement; the caller raises it from the original.

    The text is the server's primary message: never the detail, which holds row values.
    """
    if error.sqlstate is None and isinstance(error, psycopg.OperationalError):
        return errors.SourceUnreachable(f"the connection broke: {_first_line(str(error))}")
    if error.sqlstate is None:
        return errors.SourceError(f"the connection cannot be used: {_first_line(str(error))}")
    return classify_message(error.sqlstate, error.diag.message_primary or _first_line(str(error)))


def classify_message(sqlstate: str, message: str) -> CdcError:
    """Our error for a SQLSTATE and the primary message of the server."""
    for rule in RULES:
        if sqlstate.startswith(rule.sqlstate) and rule.text in message:
            return rule.error(f"{message} ({sqlstate})", remedy=rule.remedy)
    return errors.SourceError(f"{message} ({sqlstate})")


def connection_failure(error: psycopg.Error, *, secrets: Sequence[str] = ()) -> CdcError:
    """Our error for a connection that did not come up, with every secret blotted out."""
    text = str(error)
    for secret in secrets:
        text = text.replace(secret, "***")
    said = _FATAL.search(text)
    if said is None:
        return errors.SourceUnreachable(_first_line(text))
    message = said.group(1).strip()
    sqlstate = next((state for part, state in _REFUSALS if part in message), "08006")
    return classify_message(sqlstate, message)


@contextmanager
def mapped() -> Iterator[None]:
    """Raise our errors in place of psycopg's, with those as the cause."""
    try:
        yield
    except psycopg.Error as error:
        raise classify(error) from error


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0].strip() or "no reason given"
