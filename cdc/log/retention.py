"""Trimming: which segments of `changes` may go, and which files may leave the disk; pure.

A segment goes as a whole, and only from the old end. What goes is in `compacted`, always.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from cdc.log.boot_clock import SECOND, BootTimestamp
from cdc.log.consumers import Consumer
from cdc.log.layout import COMPACTED, LogFile
from cdc.log.removed_files import RemovedFiles
from cdc.position import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long what is compacted stays readable change by change."""

    max_age: float
    """Seconds: for so long a segment waits for consumers that are behind, then it goes without them."""
    grace: float
    """Seconds for which files that left a table stay on the disk for who still reads them."""


def trimmable(
    files: Sequence[LogFile],
    *,
    horizon: Position,
    consumers: Collection[Consumer],
    max_age: float,
    now_us: int,
) -> tuple[list[int], Position]:
    """The segments of `changes` that may go, oldest first, and the last position that goes with them (0 if none do).

    Each lies behind the horizon, and behind every consumer or is older than max_age (seconds). The newest segment
    stays in any case, and so does everything young while nobody is registered: it says nothing about who reads.
    """
    passed = min((consumer.position for consumer in consumers), default=Position(0))
    numbers = sorted({file.segment for file in files})
    chosen: list[int] = []
    upto = Position(0)
    for number in numbers[:-1]:
        own = [file for file in files if file.segment == number]
        last = max(file.last for file in own)
        if last > horizon or not (last <= passed or _older(own, now_us - int(max_age * SECOND))):
            break
        chosen.append(number)
        upto = max(upto, last)
    return chosen, upto


def deletable(
    notes: Iterable[RemovedFiles],
    held: Mapping[str, Collection[str]],
    *,
    pinned: int | None,
    grace: float,
    now: BootTimestamp,
) -> list[RemovedFiles]:
    """Of files that left their table, the notes whose files may be deleted now.

    held: by table, the paths of its current version. pinned: the lowest version of `compacted` that a consumer holds.
    A note that nobody has seen to be in force yet begins its grace (seconds) now.
    """
    notes = list(notes)
    # a writer that died or was refused has left a note of an earlier version than the one that took the files out
    left_at: dict[tuple[str, str], int] = {}
    for note in sorted(notes, key=attrgetter("version")):
        left_at |= {(note.table, path): note.version for path in note.paths}
    return [
        note
        for note in notes
        if is_committed(note, held)
        and note.age_us(now) >= int(grace * SECOND)
        and not (
            note.table == COMPACTED
            and pinned is not None
            and any(pinned < left_at[note.table, path] for path in note.paths)
        )
    ]


def is_committed(note: RemovedFiles, held: Mapping[str, Collection[str]]) -> bool:
    """Whether none of a note's files is in its table any more: the commit that it announced was made."""
    return not set(note.paths) & set(held.get(note.table, ()))


def _older(files: Iterable[LogFile], than_us: int) -> bool:
    latest = max(file.committed_at for file in files)
    return 0 < latest < than_us
