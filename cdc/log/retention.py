"""Retention: which segments of `changes` may be trimmed, and which removed files may be deleted; no I/O.

Segments are trimmed whole, oldest first, and only after their changes are in `compacted`.
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
    """How long compacted changes stay readable one by one."""

    max_age: float
    """Seconds for which a segment is kept for consumers that have not read it yet."""
    grace: float
    """Seconds for which files removed from a table stay on the disk for readers of older versions."""


def trimmable(
    files: Sequence[LogFile],
    *,
    horizon: Position,
    consumers: Collection[Consumer],
    max_age: float,
    now_us: int,
) -> tuple[list[int], Position]:
    """The segments of `changes` that may be trimmed, oldest first, and their last position (0 if there are none).

    Such a segment ends at or below the horizon, and either all consumers have read it or it is older than max_age
    (seconds). The newest segment is never trimmed. Without registered consumers only max_age counts.
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
    """The records whose removed files may be deleted now.

    held: by table, the paths of its current version. pinned: the lowest version of `compacted` that a consumer reads.
    The grace period (seconds) of a record starts when a vacuum first finds it committed.
    """
    notes = list(notes)
    # a writer that was killed or fenced leaves a record with an earlier version than the commit that removed the files
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
    """Whether the commit that the record announces was made: none of its files is in the table."""
    return not set(note.paths) & set(held.get(note.table, ()))


def _older(files: Iterable[LogFile], than_us: int) -> bool:
    latest = max(file.committed_at for file in files)
    return 0 < latest < than_us
