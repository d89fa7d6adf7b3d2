"""Verification status: what the continuous verification does, and through when each table of each sink was compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cdc.catalog.verification_state import VerificationRecord, VerificationState
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


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationStatus:
    """What the continuous verification of the pipeline does; times are ISO 8601."""

    state: str
    """`running`, `waiting` (nothing is due), `paused`, `failing`, `off`, or `absent`: no server process runs."""
    every_seconds: float | None
    """Interval in which every row is compared once; null if the verification is off or never ran."""
    reason: str | None
    """Why it is paused, off or absent; null otherwise."""
    error: Mapping[str, Any] | None
    """Code, message and suggestion of the last error while it is failing; null otherwise."""
    next_at: str | None
    """Time at which something is due, or was due; null if the verification is off or never ran."""
    tables: int
    """Number of tables, in all sinks, that were compared as a whole at least once."""
    verified_through: str | None
    """Every row of these tables was compared at this time or later; null if no table was compared as a whole."""

    @property
    def detail(self) -> str:
        """Why it is in its state, or when the next pass begins; empty while it runs."""
        if self.reason is not None:
            return self.reason
        if self.error is not None:
            return f"{self.error['code']} {self.error['message']}"
        if self.next_at is None or self.state != VerificationState.WAITING:
            return ""
        return f"next pass at {self.next_at[:16].replace('T', ' ')} UTC"


def verification_status(
    record: VerificationRecord | None, verified: Sequence[VerifiedStatus], *, has_server: bool
) -> VerificationStatus:
    """Return the status of the continuous verification; has_server: whether the server process reports."""
    through = [table.verified_through for table in verified if table.verified_through is not None]
    state = VerificationState.ABSENT if record is None else record.state
    reason = None if record is None else record.reason
    if record is None or (not has_server and state is not VerificationState.OFF):
        state, reason = VerificationState.ABSENT, "the server process, which verifies, does not run"
    return VerificationStatus(
        state=state.value,
        every_seconds=None if record is None or not record.every else record.every,
        reason=reason,
        error=None if record is None or state is VerificationState.ABSENT else record.error,
        next_at=None if record is None else record.next_at,
        tables=len(through),
        verified_through=min(through, default=None),
    )


def verification_problems(verification: VerificationStatus) -> Iterable[Problem]:
    """Yield a problem if the continuous verification fails."""
    if verification.error is not None:
        error = verification.error
        remedy = str(error.get("suggestion") or "read the log of the server process")
        yield Problem("verification", str(error.get("code")), str(error.get("message")), remedy)


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
