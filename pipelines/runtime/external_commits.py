"""Foreign: what other clients changed in the targets of a sink, as it is told to people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True, slots=True)
class ForeignCommit:
    """A commit of another client that changed rows."""

    version: int
    operation: str
    """As the client calls it, for instance DELETE."""

    def __str__(self) -> str:
        return f"another client made version {self.version} ({self.operation}): 'cdc verify' says what differs"


class ExternalCommitReport:
    """Those of one sink since it was opened; any thread may note or ask."""

    def __init__(self) -> None:
        self._last: dict[str, ForeignCommit] = {}
        self._uncounted: dict[str, int] = {}
        self._lock = Lock()

    def note(self, topic: str, commits: Sequence[ForeignCommit]) -> None:
        """Commits of a table's target were found, in order."""
        with self._lock:
            self._last[topic] = commits[-1]
            self._uncounted[topic] = self._uncounted.get(topic, 0) + len(commits)

    def last(self, topic: str) -> ForeignCommit | None:
        """The last one of a table."""
        with self._lock:
            return self._last.get(topic)

    def counted(self) -> dict[str, int]:
        """How many were noted since the last call, by topic."""
        with self._lock:
            found, self._uncounted = self._uncounted, {}
        return found
