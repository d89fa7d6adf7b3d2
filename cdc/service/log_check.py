"""Log check of the API: whether the newest part of the log is as it was written."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Final

from cdc.config import Definition

MAX_BYTES: Final = 1 << 28
"""Bytes of data files that one request may read: a few seconds."""
MAX_FINDINGS: Final = 1_000
"""Findings that one answer lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingLine:
    """One problem in the log."""

    damage: str
    """missing | size | unreadable | contents | order | duplicate | hole | range | version | commit | misfit | source |
    foreign | unchecked."""
    harmless: bool
    """Whether every read returns correct rows all the same."""
    file: str | None
    """Path in the log; None if it concerns more than one file."""
    message: str
    first: str | None
    """First position that it concerns, as `last` is the last one; None if it concerns none."""
    last: str | None
    tables: list[str]
    remedy: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCheck:
    """What was checked, and the findings."""

    sound: bool
    """Whether no finding can make a read wrong."""
    complete: bool
    """Whether every file was read, not only the newest."""
    summary: str
    files: int
    read: int
    rows: int
    bytes: int
    durable: str | None
    horizon: str | None
    findings: list[FindingLine]


def check_log(definition: Definition, most: int) -> LogCheck:
    """Check all commits, the presence and size of all files, and the rows of the newest files up to `most` bytes.

    Changes nothing. Raises LogError if there is no log.
    """
    # loaded on the first request: a server that never gets one does not need Arrow
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
