"""SourceObservation: the state of the slot at one time, as the server process saw it, and the risk of losing the slot.

The ages in an observation are computed when the observation is requested. If the source does not answer, the
observation contains no values, not even the values of an earlier observation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cdc.errors import SlotInvalidated
from cdc.service import number_format
from cdc.service.problem import Problem

STALLED_AFTER: Final = 60.0
"""The slot counts as stalled if WAL stays unconfirmed, or no status update arrives, for more than these seconds."""
SHORT_TIME: Final = 3600.0
"""Seconds that an operator needs to act; a stalled slot is at risk if it may be lost in fewer seconds."""
LOST: Final = frozenset({"lost"})
"""Values of `wal_status` for a slot from which streaming is impossible."""
LOST_AT_CHECKPOINT: Final = frozenset({"unreserved"})
"""Values of `wal_status` for a slot whose WAL is removed at the next checkpoint."""
RAISE_LIMIT: Final = "ALTER SYSTEM SET max_slot_wal_keep_size = '{megabytes}MB'; SELECT pg_reload_conf()"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceObservation:
    """The source at one time; a value is None if it does not exist or is unknown."""

    slot: str
    up: bool
    """True if the source answered."""
    error: str | None = None
    """Why the source did not answer; None if it answered."""
    slot_exists: bool = False
    slot_active: bool | None = None
    """Whether a client streams from the slot; None without a slot."""
    wal_status: str | None = None
    """As in pg_replication_slots: reserved, extended, unreserved, lost."""
    wal_end: int | None = None
    """LSN at which the WAL of Postgres ends."""
    confirmed: int | None = None
    """LSN up to which the reader has confirmed the WAL."""
    retained_bytes: int | None = None
    safe_bytes: int | None = None
    """Bytes of WAL that Postgres can still write before the slot is lost; None without max_slot_wal_keep_size."""
    wal_bytes_per_second: float | None = None
    """Current rate at which Postgres writes WAL."""
    feedback_age_seconds: float | None = None
    """Seconds since the walsender received a status update, or since the last client disconnected."""
    unconfirmed_seconds: float | None = None
    """Age in seconds of the oldest WAL that the reader has not confirmed; 0 if all is confirmed."""

    @property
    def unconfirmed_bytes(self) -> int | None:
        """Return the number of bytes of WAL that the reader has not confirmed."""
        return None if self.wal_end is None or self.confirmed is None else max(0, self.wal_end - self.confirmed)

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds until the slot is lost if the reader confirms nothing and the WAL rate does not change."""
        if self.safe_bytes is None or not self.wal_bytes_per_second:
            return None
        return max(0.0, self.safe_bytes / self.wal_bytes_per_second)

    @property
    def is_at_risk(self) -> bool:
        """Return True if the slot is lost or may be lost soon.

        A slot may be lost soon if it uses more than half of its WAL limit, or if it is stalled with little time left.
        """
        if self.wal_status in LOST | LOST_AT_CHECKPOINT:
            return True
        if self.safe_bytes is None or self.retained_bytes is None:
            return False
        left = self.seconds_left
        # a server that has just started can detect a hung reader only by the age of the last status update
        silent = max(self.unconfirmed_seconds or 0.0, self.feedback_age_seconds or 0.0)
        stalled = self.slot_active is False or silent > STALLED_AFTER
        return self.safe_bytes < self.retained_bytes or (stalled and left is not None and left < SHORT_TIME)

    @property
    def forecast(self) -> str | None:
        """Return a sentence about the retained WAL and the WAL left until the slot is lost; None without a slot."""
        if self.retained_bytes is None:
            return None
        kept = f"the server retains {number_format.format_size(self.retained_bytes)} of WAL for slot {self.slot!r}"
        if self.wal_status in LOST:
            return f"slot {self.slot!r} is lost: the server has removed WAL that the slot needs"
        if self.wal_status in LOST_AT_CHECKPOINT:
            return f"{kept}, more than max_slot_wal_keep_size; the slot is lost at the next checkpoint"
        if self.safe_bytes is None:
            return kept
        lost = f"the slot is lost after {number_format.format_size(self.safe_bytes)} more"
        if self.seconds_left is None:
            return f"{kept}; {lost}"
        return f"{kept}; {lost}, in about {number_format.format_duration(self.seconds_left)} at the present rate"

    @property
    def remedy(self) -> str:
        """Return what an operator must do to keep the slot, or to recover from its loss."""
        if self.wal_status in LOST:
            return SlotInvalidated.remedy
        return f"start the reader, or read in its log why it does not advance; to gain time, run {self.sql}"

    @property
    def sql(self) -> str:
        """Return the SQL statement that doubles max_slot_wal_keep_size."""
        used = (self.retained_bytes or 0) + (self.safe_bytes or 0)
        return RAISE_LIMIT.format(megabytes=max(1, 2 * used // (1 << 20)))

    def problems(self) -> tuple[Problem, ...]:
        """Return the problem of a slot that is at risk or lost; an empty tuple otherwise."""
        if not self.is_at_risk or self.forecast is None:
            return ()
        code = SlotInvalidated.code if self.wal_status in LOST else None
        return (Problem(f"slot {self.slot}", code, self.forecast, self.remedy),)
