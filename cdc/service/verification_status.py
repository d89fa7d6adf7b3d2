"""Proven: through when each table of each sink is known to equal the source, as status, page and metrics tell it."""

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
    """What verify found of one table in one sink; times are ISO 8601."""

    sink: str
    topic: str
    verified_through: str | None
    """Every row was compared with the source as it was then, or later; None until all were."""
    position: str | None
    """The lowest at which one was."""
    equal_at: str | None
    """When a comparison of all rows last found nothing."""
    mismatched: int
    """Rows that differed when they were last compared."""
    rows: int
    ranges: int
    """Compared in the newest pass."""
    ended: bool
    """Whether that pass is done."""


def verified_statuses(tables: Iterable[VerifiedTable]) -> tuple[VerifiedStatus, ...]:
    """Every table that was ever compared."""
    return tuple(
        VerifiedStatus(
            sink=table.sink,
            topic=table.topic,
            verified_through=_moment(table.through),
            position=None if table.position is None else str(Position(table.position)),
            equal_at=_moment(table.equal_at),
            mismatched=table.mismatched,
            rows=table.rows,
            ranges=table.ranges,
            ended=table.ended,
        )
        for table in tables
    )


def mismatch_problems(tables: Iterable[VerifiedStatus]) -> Iterable[Problem]:
    """Of every table that was found to differ and has not been found equal since."""
    for table in tables:
        if table.mismatched:
            subject = f"table {table.topic} in {table.sink}"
            message = f"{table.mismatched:,} rows differed from the source when they were last compared"
            yield Problem(subject, VerifyMismatch.code, message, VerifyMismatch.remedy)


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
