"""Commits of other clients in the targets of a sink, as progress and metrics report them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True, slots=True)
class ForeignCommit:
    """A commit of another client that changed rows."""

    version: int
    operation: str
    """As the client's commit names it, for instance DELETE."""

    def __str__(self) -> str:
        return f"another client committed version {self.version} ({self.operation}): 'cdc verify' shows what differs"


class ExternalCommitReport:
    """Commits of other clients since a sink was opened; thread-safe."""

    def __init__(self) -> None:
        self._last: dict[str, ForeignCommit] = {}
        self._uncounted: dict[str, int] = {}
        self._lock = Lock()

    def add(self, topic: str, commits: Sequence[ForeignCommit]) -> None:
        """Add commits that were found in a table's target, in order."""
        with self._lock:
            self._last[topic] = commits[-1]
            self._uncounted[topic] = self._uncounted.get(topic, 0) + len(commits)

    def last(self, topic: str) -> ForeignCommit | None:
        """The last commit of another client in a table; None: none since the sink was opened."""
        with self._lock:
            return self._last.get(topic)

    def pop_counts(self) -> dict[str, int]:
        """Number of commits added since the last call, by topic."""
        with self._lock:
            found, self._uncounted = self._uncounted, {}
        return found
