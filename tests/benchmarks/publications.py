"""Publications: when each record of a Delta sink stood on disk, noted while it does: the sink keeps its log short."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from cdc.target_names import published_uri


class Publications:
    """The records of one sink, as far as somebody looked while the last hundred of them held each one."""

    def __init__(self, template: str) -> None:
        """template: the sink's path."""
        self._log = Path(published_uri(template)) / "_delta_log"
        self._seen: dict[str, tuple[float, int]] = {}

    def look(self) -> None:
        """Note what is new."""
        for commit in sorted(self._log.glob("*.json")):
            if commit.name not in self._seen:
                self._seen[commit.name] = commit.stat().st_mtime_ns / 1e9, _position(commit)

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """(when records stood on disk, in seconds since 1970; the positions that they say), by position.

        An older record is visible until a later one is, so of equal positions the first counts.
        """
        said = sorted((moment, position) for moment, position in self._seen.values() if position)
        moments, positions = (np.array(column) for column in zip(*said, strict=True))
        return moments, np.maximum.accumulate(positions)


def _position(commit: Path) -> int:
    """Of the record in a commit; 0 of one without."""
    actions = map(json.loads, commit.read_text(encoding="utf-8").splitlines())
    return next((int(action["txn"]["version"]) for action in actions if "txn" in action), 0)
