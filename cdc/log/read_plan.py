"""Read plan: the files from which a range of positions is read after old segments were compacted and trimmed.

A range that starts at the oldest position or later is read from `changes` alone. An earlier range reads the latest
state of each key up to the horizon from `compacted`, and later changes from `changes`. Folding either gives the same
rows, so readers need not distinguish the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cdc.errors import LogTrimmed
from cdc.log import lost_ranges, ranges
from cdc.log.layout import LogFile
from cdc.position import Position

_ZERO = Position(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSnapshot:
    """One reader's view of both tables; oldest ≤ horizon ≤ durable whenever oldest is above 0."""

    changes: Sequence[LogFile]
    durable: Position
    oldest: Position = _ZERO
    """All changes above this position are in `changes`; 0 while nothing was trimmed."""
    compacted: Sequence[LogFile] = ()
    horizon: Position = _ZERO
    """Position of the state in `compacted`."""
    floor: Position = _ZERO
    """Deletes up to this position are missing in `compacted`: a target older than it must be rebuilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPlan:
    """The files from which every single change of a range is read."""

    changes: Sequence[LogFile]
    """Files of `changes`, ordered by first position."""
    baseline: Sequence[LogFile] = ()
    """Files of `compacted` with the state at the horizon, on which the changes build."""


def files(view: LogSnapshot, after: Position, upto: Position) -> list[LogFile]:
    """The files to read (after, upto] from, ordered by first position, those of `compacted` first.

    Raises LogTrimmed if the range starts below `oldest` and neither at 0 nor at the floor, if it ends below the
    horizon, or if it ends between lost rows and the position that records the loss.
    """
    _check_lost_ranges(view, after, upto)
    if after >= view.oldest or upto <= after:
        return ranges.overlapping(view.changes, after, upto)
    _check_start(view, after)
    if upto < view.horizon:
        raise LogTrimmed(
            f"the log cannot be read up to {upto!s}: single changes up to {view.oldest!s} are trimmed, "
            f"and only their state at {view.horizon!s} is kept",
            remedy=f"end at {view.horizon!s} or later; restart a Spark stream that stopped here with a new checkpoint",
        )
    return [*ranges.overlapping(view.compacted, after, view.horizon), *_after_horizon(view, upto)]


def history(view: LogSnapshot, after: Position, upto: Position) -> HistoryPlan:
    """The plan for every single change; the state at the horizon replaces trimmed changes.

    Raises LogTrimmed if the range starts below `oldest` but not at 0, if it ends below the horizon, or if files()
    would.
    """
    _check_lost_ranges(view, after, upto)
    if after >= view.oldest or upto <= after:
        return HistoryPlan(changes=ranges.overlapping(view.changes, after, upto))
    if after:
        raise LogTrimmed(
            f"single changes after {after!s} cannot be read: changes up to {view.oldest!s} are trimmed",
            remedy=f"start after {view.oldest!s} or later, or start at the beginning with the state at "
            f"{view.horizon!s}",
        )
    if upto < view.horizon:
        raise LogTrimmed(
            f"single changes up to {upto!s} cannot be read: changes up to {view.oldest!s} are trimmed, "
            f"and only their state at {view.horizon!s} is kept",
            remedy=f"start after {view.oldest!s} or later, or end at {view.horizon!s} or later",
        )
    return HistoryPlan(
        baseline=ranges.overlapping(view.compacted, after, view.horizon), changes=_after_horizon(view, upto)
    )


def boundary(view: LogSnapshot, after: Position, max_rows: int | None) -> Position:
    """End of a batch that starts after `after`: as ranges.boundary, or the horizon for a start below `oldest`.

    A batch over lost rows ends at the position that records the loss. Raises LogTrimmed if no batch can start there.
    """
    if after >= view.durable:
        return after
    if after >= view.oldest:
        end = ranges.boundary(view.changes, after, view.durable, max_rows)
    else:
        _check_start(view, after)
        end = view.durable if max_rows is None else view.horizon
    return lost_ranges.end_after_lost_ranges(lost_ranges.lost_ranges_in(view.changes), after, end)


def can_read_range(view: LogSnapshot, after: Position, upto: Position) -> bool:
    """Whether a batch may read (after, upto]: the log has its changes, or the state that they lead to."""
    is_complete = after >= view.oldest or upto >= view.horizon
    return (
        after < upto
        and is_complete
        and lost_ranges.end_after_lost_ranges(lost_ranges.lost_ranges_in(view.changes), after, upto) == upto
    )


def schema_files(view: LogSnapshot, upto: Position) -> list[LogFile]:
    """The files with `s` rows up to a position; the same row may be in two of them."""
    both = (*view.compacted, *view.changes) if view.oldest else view.changes
    return [file for file in both if file.schemas_only and file.first <= upto]


def is_late(after: Position, oldest: Position, floor: Position) -> bool:
    """Whether a reader at the position cannot continue: the following changes and deletes were trimmed."""
    return _ZERO < after < min(oldest, floor)


def _after_horizon(view: LogSnapshot, upto: Position) -> list[LogFile]:
    newer = ranges.overlapping(view.changes, view.horizon, upto)
    return [replace(file, skip_upto=view.horizon) if file.first <= view.horizon else file for file in newer]


def _check_lost_ranges(view: LogSnapshot, after: Position, upto: Position) -> None:
    for gap in lost_ranges.lost_ranges_in(view.changes):
        if gap.cuts(after, upto):
            raise LogTrimmed(
                f"the log cannot be read from {after!s} to {upto!s}: the rows at {gap.first!s} to {gap.last!s} were "
                f"lost with a damaged file, and the log records this loss at {gap.recorded_at!s}",
                remedy=f"end at {gap.recorded_at!s} or later; rebuild a sink at an earlier position with 'cdc "
                "replay SINK'",
            )


def _check_start(view: LogSnapshot, after: Position) -> None:
    if is_late(after, view.oldest, view.floor):
        raise LogTrimmed(
            f"the log cannot be read from {after!s}: changes up to {view.oldest!s} are trimmed, "
            f"and the tombstones of deletes up to {view.floor!s} are removed"
        )
