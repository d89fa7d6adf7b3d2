"""Windows of the log: ranges of whole transactions that a delivery sends between two commits, in log order.

Rows are sorted by position and ordinal, because a file of an old segment is sorted by table. A window has at most about
a given number of rows. A larger transaction is a window of its own, which is read in parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import LogTrimmed
from cdc.log.disk_format import LogFile
from cdc.log.file_selection import EVERY_ROW, TableSelection
from cdc.log.reader import LogReader, read_file, stream_file
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position

MOST_BYTES: Final = 24 << 20
"""Approximate maximum bytes of the row images of a window, unless one transaction has more."""
EXPANSION: Final = 4
"""Assumed bytes in memory for each byte of a log file."""
_ORDER: Final = [("position", "ascending"), ("ordinal", "ascending")]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogWindow:
    """The rows of (after, upto]."""

    after: Position
    upto: Position
    bootstrap: Position | None
    """Horizon of the compacted state with which the delivery began; None if the window ends with the end of a state, or
    has single changes.
    """
    parts: Sequence[tuple[int, int] | None]
    """Ranges of ordinals, first included and last excluded, of the parts; None is the whole window."""
    files: Sequence[LogFile]
    is_last: bool
    """True if the log had no later change when the window was made."""

    def tables(self, only: TableSelection = EVERY_ROW) -> Iterator[pa.Table]:
        """Yield the rows of each part, sorted by position and ordinal."""
        for part in self.parts:
            tables = [LOG_SCHEMA.empty_table()]
            for file in self.files:
                if part is None:
                    tables.append(read_file(file, self.after, self.upto, only=only))
                else:
                    tables += _between(file, (self.after, self.upto), part, only)
            whole = pa.concat_tables(tables)
            yield whole.take(pc.sort_indices(whole.select(["position", "ordinal"]), sort_keys=_ORDER)).combine_chunks()


def next_window(log: LogReader, after: Position, bootstrap: Position | None, most: int) -> LogWindow | None:
    """Return the window that begins after a position; None if the log has nothing after it.

    bootstrap: horizon of the compacted state that the delivery has begun to send and not sent completely; `after` is
    then a position inside this state. most: maximum number of rows. Raises LogTrimmed if the log has lost changes after
    the position.
    """
    durable = log.durable
    if durable is None or durable <= after:
        return None
    if bootstrap is not None or (not after and log.oldest):
        files, end = _compacted(log, after, bootstrap)
        bootstrap = bootstrap or end
    else:
        files, end = _changes(log, after, most)
    parts: Sequence[tuple[int, int] | None] = (None,)
    most = min(most, _affordable(files))
    last = end
    if sum(file.rows for file in files) > most:
        end, parts = _cut(files, after, end, most)
    return LogWindow(
        after=after,
        upto=end,
        bootstrap=bootstrap if end < last else None,
        parts=parts,
        files=[file for file in files if file.first <= end and file.last > after],
        is_last=end >= durable,
    )


def _changes(log: LogReader, after: Position, most: int) -> tuple[list[LogFile], Position]:
    """Return the files of `changes` with the next rows, and the position up to which these have every change."""
    if after < log.oldest:
        raise LogTrimmed(
            f"the log no longer has single changes after {after!s}, where the delivery is: they were trimmed up to "
            f"{log.oldest!s}",
            remedy="run 'cdc deliveries rewind SINK' to send the state of every row and then the changes after it, or "
            f"'cdc deliveries rewind SINK --to {log.oldest!s}' to skip the lost changes",
        )
    end = log.latest_boundary(after, most)
    return log.files(after, end), end


def _compacted(log: LogReader, after: Position, bootstrap: Position | None) -> tuple[list[LogFile], Position]:
    """Return the files of the state at the present horizon, and the horizon.

    bootstrap: horizon of the state that the delivery has begun with; None if it begins now. Rows that it has sent have
    the same positions in a newer state, and a key that was changed since has a greater one. A key that was deleted
    since has a tombstone, unless a compaction has removed it.
    """
    compacted = log.compacted
    if compacted is None or (bootstrap is not None and compacted.floor > max(bootstrap, after)):
        raise LogTrimmed(
            "the state of the log that a delivery has begun to send is no longer there, because its tombstones were "
            "removed",
            remedy="run 'cdc deliveries rewind SINK' to send everything again",
        )
    return log.files(Position(0), compacted.horizon), compacted.horizon


def _affordable(files: Sequence[LogFile]) -> int:
    """Return the number of rows of these files that fit into MOST_BYTES."""
    widest = max((file.size / file.rows for file in files if file.rows), default=1.0)
    return max(1, int(MOST_BYTES / (widest * EXPANSION)))


def _cut(
    files: Sequence[LogFile], after: Position, end: Position, most: int
) -> tuple[Position, Sequence[tuple[int, int] | None]]:
    """Return the last position of a window of at most `most` rows, and its parts; at least one transaction."""
    found = [read_file(file, after, end, ["position"])["position"] for file in files]
    positions = np.sort(np.concatenate([column.to_numpy() for column in found]) if found else np.empty(0, np.int64))
    if len(positions) <= most:
        return end, (None,)
    inside = positions[positions < positions[most]]
    if len(inside):
        return Position(int(inside[-1])), (None,)
    return Position(int(positions[0])), _ordinal_parts(files, Position(int(positions[0])), most)


def _ordinal_parts(files: Sequence[LogFile], position: Position, most: int) -> list[tuple[int, int] | None]:
    """Return ranges of ordinals that divide one transaction into parts of at most `most` rows."""
    found = [read_file(file, Position(position - 1), position, ["ordinal"])["ordinal"].to_numpy() for file in files]
    ordinals = np.sort(np.concatenate(found))
    bounds = [int(one) for one in ordinals[::most]]
    return list(zip(bounds, [*bounds[1:], int(ordinals[-1]) + 1], strict=True))


def _between(
    file: LogFile, within: tuple[Position, Position], part: tuple[int, int], only: TableSelection
) -> Iterator[pa.Table]:
    for rows in stream_file(file, *within, LOG_SCHEMA.names, only):
        ordinals = rows["ordinal"]
        chosen = rows.filter(pc.and_(pc.greater_equal(ordinals, part[0]), pc.less(ordinals, part[1])))
        if chosen.num_rows:
            yield chosen
