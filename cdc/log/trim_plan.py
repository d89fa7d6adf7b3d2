"""Trim plan: which segments of `changes` may be trimmed, and a request to trim them now.

Segments are trimmed whole, oldest first, and only after their changes are in `compacted`. A trim removes segments from
the table. Their files stay on disk for readers of older versions, until a vacuum deletes them (`vacuum.py`). Only the
reader process commits to `changes`, so another process leaves a request in the log's directory.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cdc.boot_clock import SECOND
from cdc.bucket_files import Root, as_root
from cdc.log.compacted_table import secured_horizon
from cdc.log.consumers import Consumer, list_consumers
from cdc.log.disk_format import COMPACTED, LogFile
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.table import TableState

REQUEST_FILE: Final = "_trim"
"""Name of the file under the log's root that requests a trim; it exists until the reader has planned the trim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Time limits of retention: how long segments wait for consumers, and how long removed files stay on disk."""

    max_age: float
    """Seconds for which a segment is kept for consumers that have not read it yet."""
    grace: float
    """Seconds for which removed files stay on disk for readers of older versions."""


@dataclass(frozen=True, slots=True)
class TrimPlan:
    """The segments that the next trim removes."""

    segments: tuple[int, ...]
    upto: Position
    """Last position in the segments to remove."""


def trimmable(
    files: Sequence[LogFile],
    *,
    horizon: Position,
    consumers: Collection[Consumer],
    max_age: float,
    now_us: int,
) -> tuple[list[int], Position]:
    """Return the numbers of the segments of `changes` that may be trimmed, oldest first, and their last position.

    Such a segment ends at or below the horizon. In addition, all consumers have passed it, or it is older than
    `max_age` seconds. Without registered consumers only `max_age` counts. The newest segment is never trimmed, nor is a
    segment after one that must stay. The position is 0 if no segment may be trimmed.
    """
    passed = min((consumer.position for consumer in consumers), default=Position(0))
    numbers = sorted({file.segment for file in files})
    chosen: list[int] = []
    upto = Position(0)
    for number in numbers[:-1]:
        own = [file for file in files if file.segment == number]
        last = max(file.last for file in own)
        if last > horizon or not (last <= passed or _is_older(own, now_us - int(max_age * SECOND))):
            break
        chosen.append(number)
        upto = max(upto, last)
    return chosen, upto


def plan_trim(root: str | Root, retention: Retention) -> TrimPlan | None:
    """Return the trim that the log under `root` needs now; None if no segment may be trimmed."""
    root = as_root(root)
    if not (root / COMPACTED).is_dir():
        return None
    view = LogReader(root)
    segments, upto = trimmable(
        view.segments(),
        horizon=secured_horizon(root, view.log_id),
        consumers=list_consumers(root),
        max_age=retention.max_age,
        now_us=int(time.time() * SECOND),
    )
    # a running copy looks up in the log what changed since it began
    if segments and (began := oldest_copy_start(view)) is not None and began < upto:
        allowed = [segment for segment in view.segments() if segment.segment in segments and segment.last <= began]
        segments, upto = [one.segment for one in allowed], max((one.last for one in allowed), default=Position(0))
    return TrimPlan(tuple(segments), upto) if segments else None


def request_trim(root: str | Root) -> None:
    """Ask the reader of the log under `root` to plan a trim now; the reader removes the request file afterwards."""
    (as_root(root) / REQUEST_FILE).touch()


def oldest_copy_start(view: LogReader) -> Position | None:
    """Return the position at which the earliest unfinished copy of a table began; None if no copy runs."""
    open_since: dict[int, Position] = {}
    for place, schema in view.schema_history():
        if schema.state is TableState.SNAPSHOTTING:
            open_since.setdefault(schema.relation, place.position)
        else:
            open_since.pop(schema.relation, None)
    return min(open_since.values(), default=None)


def _is_older(files: Iterable[LogFile], than_us: int) -> bool:
    latest = max(file.committed_at for file in files)
    return 0 < latest < than_us
