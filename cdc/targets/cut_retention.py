"""Cut retention: which published cuts of a sink are kept as they age, and which kept cut a query reads.

A sink may publish ten times a second. Every cut of the last minute is kept, up to KEEP_ALL_AT_MOST. Of the older cuts
only the last one of every minute is kept, and after an hour only the last one of every hour. The module does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from cdc.errors import CutUnavailable
from cdc.position import Position

KEEP_ALL_FOR: Final = 60
"""Seconds for which every cut is kept."""
KEEP_ALL_AT_MOST: Final = 1_000
"""Maximum number of cuts of the last minute that are kept."""
MINUTE: Final = 60
HOUR: Final = 3600
_MICRO: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ListedCut:
    """The position and times of one kept cut of a sink."""

    position: int
    committed_at: int
    """Commit time of the transaction at position, µs since 1970 UTC; 0 if unknown."""
    published_at: int
    """When the sink published the cut, µs since 1970 UTC; unique."""

    def __str__(self) -> str:
        when = f", committed at {format_time(self.committed_at)}" if self.committed_at else ""
        return f"{Position(self.position)}{when}"


def format_time(micros: int) -> str:
    """Format microseconds since 1970 (UTC) as a time that the option `--at` accepts."""
    return datetime.fromtimestamp(micros / _MICRO, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def kept_cuts(published_at: Sequence[int], now: int, retain: float) -> list[int]:
    """Return the publish times of the cuts to keep; the newest cut is always kept.

    All other cuts that are older than `retain` seconds are dropped. Of the cuts in one interval (see `_interval`), only
    the last is kept. `published_at` contains the sorted publish times of all cuts. `published_at` and `now` are in µs.
    """
    last_of: dict[tuple[int, int], int] = {}
    first_of_all = len(published_at) - KEEP_ALL_AT_MOST
    for place, instant in enumerate(published_at):
        age = (now - instant) / _MICRO
        if age <= retain:
            last_of[_interval(instant, age, alone=place >= first_of_all)] = instant
    return sorted({*last_of.values(), *published_at[-1:]})


def _interval(instant: int, age: float, *, alone: bool) -> tuple[int, int]:
    """Return the interval to which a cut belongs; `kept_cuts` keeps only the last cut of each interval.

    `instant` is the publish time of the cut in µs, and `age` is its age in seconds. If `alone` is true and the cut is
    younger than KEEP_ALL_FOR, its interval contains no other cut.
    """
    if alone and age < KEEP_ALL_FOR:
        return 0, instant
    span = MINUTE if age < HOUR else HOUR
    return span, instant // (span * _MICRO)


def find_cut(cuts: Sequence[ListedCut], moment: Position | datetime, now: datetime) -> ListedCut:
    """Return the newest cut without any change after `moment`; `cuts` must be sorted by time.

    Raises CutUnavailable if there is no cut, or if `moment` is before the oldest cut, after the newest position, or in
    the future.
    """
    if not cuts:
        raise CutUnavailable(
            "the sink has published no cut yet", remedy="wait for the sink's first batch, which 'cdc status' shows"
        )
    newest = cuts[-1]
    ahead = moment > now if isinstance(moment, datetime) else moment > newest.position
    if ahead:
        raise CutUnavailable(f"the sink has no cut at {_text(moment)} yet: the newest cut is {newest}", remedy=_NEWEST)
    found = None
    for cut in cuts:
        if _is_after(cut, moment):
            break
        found = cut
    if found is None:
        raise CutUnavailable(
            f"the cut at {_text(moment)} was removed by retention: the oldest cut is {cuts[0]}", remedy=_OLDEST
        )
    return found


_NEWEST: Final = "omit --at to read the newest cut, or wait until the sink has a cut at the requested time"
_OLDEST: Final = "request the oldest cut or a later one; to keep cuts longer, raise 'cuts: {retain: …}' of the sink"


def _is_after(cut: ListedCut, moment: Position | datetime) -> bool:
    if isinstance(moment, datetime):
        return cut.committed_at > moment.timestamp() * _MICRO
    return cut.position > moment


def _text(moment: Position | datetime) -> str:
    return format_time(round(moment.timestamp() * _MICRO)) if isinstance(moment, datetime) else str(moment)
