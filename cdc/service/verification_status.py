"""Verification status: the time up to which each table of each sink was compared with the source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdc.errors import VerifyMismatch
from cdc.position import Position
from cdc.service.problem import Problem

if TYPE_CHECKING:
    from datetime import datetime

    from cdc.catalog.verified_ranges import VerifiedTable


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedStatus:
    """The verification result of one table in one sink; times are ISO 8601."""

    sink: str
    topic: str
    verified_through: str | None
    """Every row was compared with the source at this time or later; None until every row was compared once."""
    position: str | None
    """Lowest position at which a row was compared."""
    equal_at: str | None
    """Time at which a comparison of all rows last found no difference."""
    mismatched: int
    """Number of rows that differed when they were last compared."""
    rows: int
    ranges: int
    """Number of key ranges that the newest pass over the table has compared."""
    ended: bool
    """Whether the newest pass has compared all key ranges of the table."""


def verified_statuses(tables: Iterable[VerifiedTable]) -> tuple[VerifiedStatus, ...]:
    """Return the verification status of every table that was compared at least once."""
    return tuple(
        VerifiedStatus(
            sink=table.sink,
            topic=table.topic,
            verified_through=_iso(table.through),
            position=None if table.position is None else str(Position(table.position)),
            equal_at=_iso(table.equal_at),
            mismatched=table.mismatched,
            rows=table.rows,
            ranges=table.ranges,
            ended=table.ended,
        )
        for table in tables
    )


def mismatch_problems(tables: Iterable[VerifiedStatus]) -> Iterable[Problem]:
    """Yield a problem for every table with rows that differed when they were last compared."""
    for table in tables:
        if table.mismatched:
            subject = f"table {table.topic} in {table.sink}"
            message = f"{table.mismatched:,} rows differed from the source at the last comparison"
            yield Problem(subject, VerifyMismatch.code, message, VerifyMismatch.remedy)


def _iso(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()
