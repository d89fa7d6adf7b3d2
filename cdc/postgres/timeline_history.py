"""Timeline history: at which LSN each promotion of a cluster left the previous timeline; parsed without I/O.

A promotion begins a timeline and writes a history file, which lists all earlier timelines of this server, oldest first.
The **switch point** is the first byte of the new timeline. WAL records below it belong to both servers. A record that
begins at or above it exists only on the server that wrote it. A switch point is a boundary between two records, so a
record that begins below it also ends at or below it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from cdc.errors import MalformedFrame
from cdc.lsn import Lsn

_ENTRY: Final = re.compile(r"(\d{1,10})\s+([0-9A-F]{1,8}/[0-9A-F]{1,8})(?:\s+(.*))?", re.IGNORECASE)
_RESTORE: Final = ("before ", "after ", "at ", "reached ")
"""First words of the reason in a history file if the recovery ended at a recovery target (`getRecoveryStopReason`)."""


@dataclass(frozen=True, slots=True)
class TimelineSwitch:
    """One line of a history file: the end of one timeline."""

    timeline: int
    """The timeline that ended."""
    switch_point: Lsn
    """First byte of the timeline that followed."""
    reason: str = ""
    """Why the recovery ended, as the server wrote it."""

    @property
    def is_restore(self) -> bool:
        """True if the server was restored to a recovery target; false if a standby was promoted."""
        return self.reason.startswith(_RESTORE)


@dataclass(frozen=True, slots=True)
class TimelineHistory:
    """The timelines that a server has left, oldest first; empty on timeline 1, or if the server has no history file."""

    switches: tuple[TimelineSwitch, ...] = ()

    @classmethod
    def parse(cls, text: str) -> TimelineHistory:
        """Parse the content of a history file; raises MalformedFrame.

        As the server does, this method ignores empty lines and lines that begin with `#`. The reason of a restore to a
        time or LSN ends with a line break.
        """
        switches: list[TimelineSwitch] = []
        for line in map(str.strip, text.splitlines()):
            if not line or line.startswith("#"):
                continue
            entry = _ENTRY.fullmatch(line)
            if entry is None:
                raise MalformedFrame(f"malformed line {line!r} in the timeline history of the source")
            found = TimelineSwitch(int(entry[1]), Lsn.parse(entry[2]), entry[3] or "")
            if switches and found.timeline <= switches[-1].timeline:
                raise MalformedFrame(
                    f"timeline {found.timeline} follows timeline {switches[-1].timeline} in the timeline history of "
                    "the source: expected increasing numbers"
                )
            switches.append(found)
        return cls(tuple(switches))

    @property
    def switch_point(self) -> Lsn:
        """First byte of the server's own timeline; 0 on timeline 1, or if there is no history file."""
        return self.switches[-1].switch_point if self.switches else Lsn(0)

    def left(self, timeline: int) -> TimelineSwitch | None:
        """Return the switch that ended this timeline; None if the history does not contain the timeline."""
        return next((switch for switch in self.switches if switch.timeline == timeline), None)

    def began(self, timeline: int) -> Lsn:
        """Return the first byte of a timeline of this history, or of the server's own timeline; 0 for the first one."""
        earlier = [switch.switch_point for switch in self.switches if switch.timeline < timeline]
        return earlier[-1] if earlier else Lsn(0)
