"""Catalog store of the continuous verification: its state and next time, as the server process records them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from cdc.catalog.commands import Commands

VERIFICATION: Final = "verification"
"""Kind of the command whose progress is the state; a pipeline has one, which is never finished."""
NEXT_AT: Final = "next_at"
"""Key in the last envelope of a scheduled verification: the time at which something is due again, ISO 8601."""


class VerificationState(StrEnum):
    """State of the continuous verification of a pipeline."""

    #: The definition turns it off, or there is nothing to verify.
    OFF = "off"
    #: Every table was compared within the interval.
    WAITING = "waiting"
    #: Tables are being compared, within the budget.
    RUNNING = "running"
    #: Something is due, but it must wait; the reason says for what.
    PAUSED = "paused"
    #: The last attempts failed; the error says why.
    FAILING = "failing"
    #: No server process runs, so nothing is verified.
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationRecord:
    """The state of the continuous verification at one time."""

    state: VerificationState
    every: float = 0.0
    """Seconds from the start of a pass to the start of the next one, by the definition; 0 if it is off."""
    reason: str | None = None
    """Why it is paused or off."""
    error: Mapping[str, Any] | None = None
    """Code, message and suggestion of the last error; None unless it is failing."""
    next_at: str | None = None
    """Time at which something is due, ISO 8601; None if it is off."""


class VerificationRecords:
    """The store of the record of each pipeline."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    def get(self, pipeline: str) -> VerificationRecord | None:
        """Return the last record of a pipeline; None before the first one."""
        found = next(iter(self._commands.pending(pipeline, VERIFICATION)), None)
        if found is None or found.result is None:
            return None
        return VerificationRecord(**{**found.result, "state": VerificationState(found.result["state"])})

    def put(self, pipeline: str, record: VerificationRecord) -> None:
        """Replace the record of a pipeline."""
        found = next(iter(self._commands.pending(pipeline, VERIFICATION)), None)
        number = self._commands.post(pipeline, VERIFICATION, {}) if found is None else found.id
        self._commands.record(number, asdict(record))
