"""Kept cuts of a sink: which of those that were published stay as they age, and which one a moment means.

Pure. A sink may publish ten times a second: every cut of the last minute stays, then the last one of every minute,
and after an hour the last one of every hour, so that a day is some hundred cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from cdc.errors import CutUnavailable
from cdc.position import Position

EVERY_ONE_FOR: Final = 60
"""Seconds in which every cut stays."""
EVERY_ONE_AT_MOST: Final = 1_000
"""Of which so many; more can only come while a clock that was set back catches up."""
MINUTE: Final = 60
HOUR: Final = 3600
_MICRO: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ListedCut:
    """A cut that a sink keeps, without its tables."""

    position: int
    committed_at: int
    """Commit time of the transaction at position, µs since 1970 UTC; 0 if unknown."""
    published_at: int
    """When the sink published it, µs since 1970 UTC; no two are equal."""

    def __str__(self) -> str:
        when = f", committed at {format_time(self.committed_at)}" if self.committed_at else ""
        return f"{Position(self.position)}{when}"


def format_time(micros: int) -> str:
    """Format microseconds since 1970 (UTC) as `--at` reads them."""
    return datetime.fromtimestamp(micros / _MICRO, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def staying(published_at: Sequence[int], now: int, retain: float) -> list[int]:
    """Those of the instants, in order and in µs, whose cuts stay at `now`: the newest always, none older than retain.

    retain: seconds. What stays later is part of what stays now, whenever that is asked.
    """
    last_of: dict[tuple[int, int], int] = {}
    first_of_all = len(published_at) - EVERY_ONE_AT_MOST
    for place, instant in enumerate(published_at):
        age = (now - instant) / _MICRO
        if age <= retain:
            last_of[_share(instant, age, alone=place >= first_of_all)] = instant
    return sorted({*last_of.values(), *published_at[-1:]})


def _share(instant: int, age: float, *, alone: bool) -> tuple[int, int]:
    """What an instant shares with those of which only the last one stays."""
    if alone and age < EVERY_ONE_FOR:
        return 0, instant
    span = MINUTE if age < HOUR else HOUR
    return span, instant // (span * _MICRO)


def chosen(cuts: Sequence[ListedCut], moment: Position | datetime, now: datetime) -> ListedCut:
    """The last cut, of those in order, with nothing that came after the moment.

    Raises CutUnavailable for a moment before the oldest cut, beyond the newest position, or after now.
    """
    if not cuts:
        raise CutUnavailable("the sink has published no cut yet", remedy="wait for its first batch: 'cdc status'")
    newest = cuts[-1]
    ahead = moment > now if isinstance(moment, datetime) else moment > newest.position
    if ahead:
        raise CutUnavailable(f"no cut at {_said(moment)} yet: the newest is {newest}", remedy=_NEWEST)
    found = None
    for cut in cuts:
        if _is_after(cut, moment):
            break
        found = cut
    if found is None:
        raise CutUnavailable(
            f"the cut at {_said(moment)} was removed by retention: the oldest is {cuts[0]}", remedy=_OLDEST
        )
    return found


_NEWEST: Final = "omit --at to read the newest cut, or wait until the sink has reached that time"
_OLDEST: Final = "request the oldest cut or a later one; to keep cuts longer, raise 'cuts: {retain: …}' of the sink"


def _is_after(cut: ListedCut, moment: Position | datetime) -> bool:
    if isinstance(moment, datetime):
        return cut.committed_at > moment.timestamp() * _MICRO
    return cut.position > moment


def _said(moment: Position | datetime) -> str:
    return format_time(round(moment.timestamp() * _MICRO)) if isinstance(moment, datetime) else str(moment)
