"""Log check: whether the newest part of the log is as it was written, for who asks over the API."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Final

from cdc.config import Definition

MAX_BYTES: Final = 1 << 28
"""Bytes of data files that one call may read: a few seconds."""
MAX_FINDINGS: Final = 1_000
"""Findings that are fields one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingLine:
    """One thing that is wrong with the log."""

    damage: str
    """missing | size | unreadable | contents | order | duplicate | hole | range | version | commit | misfit | source |
    foreign | unchecked."""
    harmless: bool
    """Every read is right all the same."""
    file: str | None
    """Relative to the log; None if it is about more than one."""
    message: str
    first: str | None
    """Position, as is `last`; None if it is about none."""
    last: str | None
    tables: list[str]
    remedy: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCheck:
    """What was looked at, and what was found."""

    sound: bool
    """Nothing was found that could make a read wrong."""
    complete: bool
    """Every file was read, not the newest alone."""
    summary: str
    files: int
    read: int
    rows: int
    bytes: int
    durable: str | None
    horizon: str | None
    findings: list[FindingLine]


def check_log(definition: Definition, most: int) -> LogCheck:
    """Look at all commits, at the place and size of all files, and at the rows of the newest files up to so many bytes.

    Changes nothing. Raises LogError if there is no log.
    """
    # loaded when somebody first asks: who serves without ever looking needs no Arrow
    audit = import_module("cdc.log.audit.verify")
    report = audit.verify(definition.log.root, audit.AuditScope(most=most, grace=definition.log.retain.grace))
    fields = report.to_json()
    return LogCheck(
        **{
            **fields,
            "sound": report.is_sound,
            "complete": report.read == report.files,
            "summary": report.summary,
            "findings": [FindingLine(**finding) for finding in fields["findings"][:MAX_FINDINGS]],
        }
    )
