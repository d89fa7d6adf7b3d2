"""Read plan: the files from which a range of positions is read after old segments were compacted and trimmed.

A range that starts at the oldest position or later is read from `changes` alone. An earlier range reads the latest
state of each key up to the horizon from `compacted`, and later changes from `changes`. The fold computes the same rows
in both cases, so readers need not distinguish them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cdc.errors import LogTrimmed
from cdc.log import file_selection, lost_range_records
from cdc.log.disk_format import LogFile
from cdc.position import Position

_ZERO = Position(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSnapshot:
    """The files and positions of both tables at one moment; oldest ≤ horizon ≤ durable if `oldest` is above 0."""

    changes: Sequence[LogFile]
    durable: Position
    oldest: Position = _ZERO
    """Position above which `changes` has every single change; 0 while nothing was trimmed."""
    compacted: Sequence[LogFile] = ()
    horizon: Position = _ZERO
    """Position up to which `compacted` contains the state of each key."""
    floor: Position = _ZERO
    """Position up to which tombstones were removed. A target at an earlier position must be rebuilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPlan:
    """The files from which every single change of a range is read."""

    changes: Sequence[LogFile]
    """Files of `changes`, sorted by first position."""
    baseline: Sequence[LogFile] = ()
    """Files of `compacted` with the state at the horizon, to read first; empty if `changes` has the whole range."""


def files(view: LogSnapshot, after: Position, upto: Position) -> list[LogFile]:
    """Return the files to read for (after, upto]: first `compacted`, then `changes`, each sorted by first position.

    Raises LogTrimmed in three cases:

    - The range starts above 0, but below both `oldest` and the floor.
    - The range starts below `oldest` and ends below the horizon.
    - The range includes lost rows, but ends before the position that records their loss.
    """
    _check_lost_ranges(view, after, upto)
    if after >= view.oldest or upto <= after:
        return file_selection.overlapping(view.changes, after, upto)
    _check_start(view, after)
    if upto < view.horizon:
        raise LogTrimmed(
            f"the log cannot be read up to {upto!s}: single changes up to {view.oldest!s} are trimmed, "
            f"and only their state at {view.horizon!s} is kept",
            remedy=f"end at {view.horizon!s} or later; if this error stopped a Spark stream, "
            "restart the stream with a new checkpoint",
        )
    return [*file_selection.overlapping(view.compacted, after, view.horizon), *_after_horizon(view, upto)]


def history(view: LogSnapshot, after: Position, upto: Position) -> HistoryPlan:
    """Return the files from which every single change in (after, upto] is read.

    If changes were trimmed, a range from 0 begins with the state at the horizon instead. Raises LogTrimmed in three
    cases:

    - The range starts above 0, but below `oldest`.
    - The range starts at 0 and ends below the horizon, although changes were trimmed.
    - The range includes lost rows, but ends before the position that records their loss.
    """
    _check_lost_ranges(view, after, upto)
    if after >= view.oldest or upto <= after:
        return HistoryPlan(changes=file_selection.overlapping(view.changes, after, upto))
    if after:
        raise LogTrimmed(
            f"single changes after {after!s} cannot be read: changes up to {view.oldest!s} are trimmed",
            remedy=f"start at {view.oldest!s} or later; or start at the beginning, which returns the state of each key "
            f"at {view.horizon!s} and then the changes after it",
        )
    if upto < view.horizon:
        raise LogTrimmed(
            f"single changes up to {upto!s} cannot be read: changes up to {view.oldest!s} are trimmed, "
            f"and only their state at {view.horizon!s} is kept",
            remedy=f"start at {view.oldest!s} or later, or end at {view.horizon!s} or later",
        )
    return HistoryPlan(
        baseline=file_selection.overlapping(view.compacted, after, view.horizon), changes=_after_horizon(view, upto)
    )


def boundary(
    view: LogSnapshot, after: Position, max_rows: int | None, max_bytes: int = file_selection.MAX_BYTES
) -> Position:
    """Return the position at which a batch that starts after `after` ends.

    If `after` is at or above `oldest`, the batch ends where `file_selection.boundary` says. Otherwise it ends at
    the horizon, or at the durable position if `max_rows` is None. A batch that includes lost rows never ends before
    the position that records their loss. Raises LogTrimmed if no batch can start after `after`.
    """
    if after >= view.durable:
        return after
    if after >= view.oldest:
        end = file_selection.boundary(view.changes, after, view.durable, max_rows, max_bytes)
    else:
        _check_start(view, after)
        end = view.durable if max_rows is None else view.horizon
    return lost_range_records.end_after_lost_ranges(lost_range_records.lost_ranges_in(view.changes), after, end)


def can_read_range(view: LogSnapshot, after: Position, upto: Position) -> bool:
    """Return True if a batch may read the range (after, upto].

    The log must have the changes of the range, or the compacted state that replaces trimmed changes. A range that
    includes lost rows must not end before the position that records their loss.
    """
    is_complete = after >= view.oldest or upto >= view.horizon
    lost = lost_range_records.lost_ranges_in(view.changes)
    return after < upto and is_complete and lost_range_records.end_after_lost_ranges(lost, after, upto) == upto


def schema_files(view: LogSnapshot, upto: Position) -> list[LogFile]:
    """Return the files with `s` rows up to a position; two of the files may contain the same `s` row."""
    both = (*view.compacted, *view.changes) if view.oldest else view.changes
    return [file for file in both if file.schemas_only and file.first <= upto]


def is_late(after: Position, oldest: Position, floor: Position) -> bool:
    """Return True if the log does not have all rows that a reader at position `after` needs to continue.

    Such a reader needs either all single changes or all tombstones after `after`. Position 0 is never late.
    """
    return _ZERO < after < min(oldest, floor)


def _after_horizon(view: LogSnapshot, upto: Position) -> list[LogFile]:
    newer = file_selection.overlapping(view.changes, view.horizon, upto)
    return [replace(file, skip_upto=view.horizon) if file.first <= view.horizon else file for file in newer]


def _check_lost_ranges(view: LogSnapshot, after: Position, upto: Position) -> None:
    for gap in lost_range_records.lost_ranges_in(view.changes):
        if gap.cuts(after, upto):
            raise LogTrimmed(
                f"the log cannot be read from {after!s} to {upto!s}: the rows at {gap.first!s} to {gap.last!s} were "
                f"lost with a damaged file; the loss is recorded at {gap.recorded_at!s}, after the end of this range",
                remedy=f"end at {gap.recorded_at!s} or later; if a sink is at an earlier position, rebuild it: "
                "'cdc replay SINK'",
            )


def _check_start(view: LogSnapshot, after: Position) -> None:
    if is_late(after, view.oldest, view.floor):
        raise LogTrimmed(
            f"the log cannot be read from {after!s}: changes up to {view.oldest!s} are trimmed, "
            f"and the tombstones of deletes up to {view.floor!s} are removed"
        )
