"""Restart policy: the pauses before a failed process starts again, and the signs that end a pause early.

The pause after exit status HALTED ends early if an operator acts: the definition changes, or the catalog's audit log
gets an entry. Every command that changes something writes such an entry. A separate thread reads the audit log, so a
database that does not answer cannot block the supervisor.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC
from hashlib import sha256
from pathlib import Path
from threading import Event, Thread
from typing import Final, Protocol

from cdc.back_off import BackOff
from cdc.catalog import Catalog
from cdc.errors import CdcError, ExitCode

HEALTHY_AFTER: Final = 60.0
"""Seconds for which a process must run so that its earlier failures no longer count."""
DEADLINE: Final = 20.0
"""Maximum seconds for a child process to finish its batch after SIGTERM; a batch lasts at most 10 s."""
ENVIRONMENT_WAIT: Final = 5.0
"""Minimum seconds before the next start if the environment is wrong: time for an operator to act."""
HALTED_WAIT: Final = 300.0
"""Seconds before the next start of a child that ended with exit status HALTED; the cause may disappear meanwhile."""
POLL_INTERVAL: Final = 1.0
"""Seconds between two reads of the newest entry in the catalog's audit log."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Computes the pause before a failed child starts again; all durations are in seconds."""

    first: float = 0.5
    most: float = 30.0
    jitter: float = 0.5
    healthy_after: float = HEALTHY_AFTER
    deadline: float = DEADLINE
    halted: float = HALTED_WAIT

    def wait(self, failures: int, exit_code: int) -> float:
        """Return the number of seconds before the next start of a failed child.

        `failures` is the number of failures in a row; `exit_code` is the exit status of the last failure.
        """
        if exit_code == ExitCode.HALTED:
            return self.halted
        pause = BackOff(self.first, self.most, self.jitter).seconds(failures)
        if exit_code == ExitCode.ENVIRONMENT:
            return max(pause, BackOff(ENVIRONMENT_WAIT, self.most, self.jitter).seconds(1))
        return pause


class Triggers(Protocol):
    """Signs that an operator acted after a child was started; both methods return without waiting."""

    def definition_digest(self) -> str:
        """Return a digest of the current definition."""

    def last_change(self) -> float | None:
        """Return the time of the last command that changed something, in seconds since 1970; None if unknown."""


class RestartTriggers:
    """Reads the definition file and the catalog's audit log to notice changes that an operator made."""

    def __init__(self, file: Path, url: str) -> None:
        """`file` is the path of the definition, `url` the URL of the catalog."""
        self._file, self._url = file, url
        self._last_change: float | None = None
        self._thread = Thread(target=self._poll_audit, name="restart triggers", daemon=True)

    def definition_digest(self) -> str:
        """Return a digest of the definition file; "" if the file cannot be read."""
        try:
            return sha256(self._file.read_bytes()).hexdigest()
        except OSError:
            return ""

    def last_change(self) -> float | None:
        """Return the time of the last audit entry, in seconds since 1970; None if unknown."""
        if self._thread.ident is None:
            self._thread.start()
        return self._last_change

    def _poll_audit(self) -> None:
        never = Event()
        while not never.wait(POLL_INTERVAL):
            with suppress(CdcError), Catalog.open(self._url, migrate=False) as catalog:
                for line in catalog.audit.ls(limit=1):
                    written = line.written_at
                    self._last_change = (written if written.tzinfo else written.replace(tzinfo=UTC)).timestamp()
