"""TableFiles: which files of a Delta table nobody needs any more, and for how long that was seen.

A file is *needed* while the newest version has it, or a version that a kept cut lists. One that is seen not needed is
marked, and may go when it was seen so for a while without a break; the marks are in memory, so a new driver begins
the wait anew. A file that this driver never saw in the table may be another client's, which has yet to commit it, or
what a killed writer left: that one goes when it is a day old as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

READ_AT_ONCE: Final = 20
"""Versions whose files are read in one go; each takes some 20 ms."""
STRANGER_AFTER: Final = 86_400.0
"""Seconds of age at which a file goes that may still be committed by another client: no job takes a day."""


@dataclass(slots=True)
class TableFiles:
    """What one driver knows of the files of one table; pure but for `files_of`, which reads a version's paths."""

    marks: dict[str, float] = field(default_factory=dict)
    """File that is not needed → since when it was seen so."""
    seen: dict[int, float] = field(default_factory=dict)
    """Version that cuts list → since when it was seen listed."""
    read: dict[int, frozenset[str]] = field(default_factory=dict)
    """Version → its files; a version never changes."""
    known: set[str] = field(default_factory=set)
    """Files that were in the table when this driver looked, or in a version that it read."""

    def needed(
        self, listed: Iterable[int], now: float, after: float, files_of: Callable[[int], frozenset[str]]
    ) -> frozenset[str] | None:
        """The files of the versions that kept cuts list; None while some of them are left to be read the next time.

        A version that was listed only lately is not read: of its files none can have left as long ago as `after`.
        """
        self.seen = {version: self.seen.get(version, now) for version in listed}
        due = [version for version, since in self.seen.items() if now - since >= after / 2]
        unread = [version for version in due if version not in self.read]
        fresh = {version: files_of(version) for version in unread[:READ_AT_ONCE]}
        self.read = {version: files for version, files in (self.read | fresh).items() if version in due}
        found = frozenset[str]().union(*self.read.values())
        self.known |= found
        return found if len(fresh) == len(unread) else None

    def removable(self, present: Mapping[str, float], needed: frozenset[str], now: float, after: float) -> list[str]:
        """Files that were marked for as long as `after`; marks what is seen not needed for the first time.

        present: file → its age in seconds.
        """
        self.marks = {path: self.marks.get(path, now) for path in present if path not in needed}
        self.known &= present.keys()
        return sorted(
            path
            for path, since in self.marks.items()
            if now - since >= after and (path in self.known or present[path] >= STRANGER_AFTER)
        )
