"""Windows of the log: ranges of whole transactions that a delivery sends between two commits, in log order.

Rows are sorted by position and ordinal, because a file of an old segment is sorted by table. A window has at most about
a given number of rows. A larger transaction is a window of its own, which is read in parts.

`next_window` reads one window. `LogWindows` reads the rows of several at once, for a delivery that is behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import LogTrimmed
from cdc.log.disk_format import GROUP, LogFile
from cdc.log.file_selection import EVERY_ROW, TableSelection
from cdc.log.reader import LogReader, RangeReader, read_file
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position

MOST_BYTES: Final = 24 << 20
"""Approximate maximum bytes of the row images of a window, unless one transaction has more."""
EXPANSION: Final = 4
"""Assumed bytes in memory for each byte of a log file."""
READ_ROWS: Final = 2 * GROUP
"""Rows that are read at once if windows are smaller: a read decodes whole row groups, of which it needs only a part."""
_ORDER: Final = [("position", "ascending"), ("ordinal", "ascending")]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogWindow:
    """The rows of (after, upto]."""

    after: Position
    upto: Position
    horizon: Position | None
    """Horizon of the compacted state with which the delivery began; None if the window has single changes."""
    ends_state: bool
    """True if a compacted state has no row after the window."""
    parts: Sequence[tuple[int, int]]
    """Ranges of ordinals, both ends included, which are read one after the other; empty for a window that is read as a
    whole.
    """
    most: int
    """Maximum number of rows of a part."""
    files: Sequence[LogFile]
    is_last: bool
    """True if the log had no later change when the window was made."""
    only: TableSelection
    """The rows that the reader of the window needs."""
    rows: pa.Table | None = None
    """The rows, sorted, if they have been read already."""
    reader: RangeReader | None = None
    """Reads the rows of one window after the other."""

    @property
    def bootstrap(self) -> Position | None:
        """Horizon of the compacted state that the next window continues; None if the next one has single changes."""
        return None if self.ends_state else self.horizon

    @property
    def is_large(self) -> bool:
        """True if the window is one transaction that does not fit into a window."""
        return bool(self.parts) or (self.rows is not None and self.rows.num_rows > self.most)

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows in parts, sorted by position and ordinal."""
        if not self.parts:
            yield from _slices(self._sorted(self.only) if self.rows is None else self.rows, self.most)
        for ordinals in self.parts:
            yield from _slices(self._sorted(replace(self.only, ordinals=ordinals)), self.most)

    def split(self, most: int) -> tuple[LogWindow, LogWindow | None]:
        """Read the rows, and divide the window into one of about `most` rows and the rest; None if nothing is left."""
        rows = self._sorted(self.only) if self.rows is None else self.rows
        most = min(most, self.most)
        positions = rows["position"].to_numpy()
        end = len(positions)
        if end > most:
            end = int(np.searchsorted(positions, positions[most])) or int(
                np.searchsorted(positions, positions[0], "right")
            )
        if end == len(positions):
            return replace(self, most=most, rows=rows), None
        upto = Position(int(positions[end - 1]))
        first = replace(self, upto=upto, ends_state=False, is_last=False, most=most, rows=rows.slice(0, end))
        return first, replace(self, after=upto, rows=rows.slice(end))

    def _sorted(self, only: TableSelection) -> pa.Table:
        read = (self.reader or RangeReader()).read
        found = (read(file, self.after, self.upto, only) for file in self.files)
        rows = pa.concat_tables([LOG_SCHEMA.empty_table(), *found])
        if not _is_sorted(rows):
            rows = rows.take(pc.sort_indices(rows.select(["position", "ordinal"]), sort_keys=_ORDER))
        return rows.combine_chunks()


class LogWindows:
    """Reads windows one after the other. Rows that were read together with a window are kept for the next ones."""

    def __init__(self, log: LogReader, only: TableSelection, at_once: int = READ_ROWS) -> None:
        self._log = log
        self._only = only
        self._at_once = at_once
        self._rest: LogWindow | None = None
        self._reader = RangeReader()

    def next(self, after: Position, bootstrap: Position | None, most: int) -> LogWindow | None:
        """Return what `next_window` returns; fast if the caller continues after the last window."""
        rest, self._rest = self._rest, None
        if rest is None or (rest.after, rest.horizon) != (after, bootstrap):
            self._log.refresh()
            together = most * max(1, self._at_once // most)  # so that no window with few rows is left over
            rest = next_window(self._log, after, bootstrap, together, self._only)
            if rest is None:
                return None
            if rest.is_large:
                return next_window(self._log, after, bootstrap, most, self._only)
            rest = replace(rest, reader=self._reader)
        first, self._rest = rest.split(most)
        return first


def next_window(
    log: LogReader, after: Position, bootstrap: Position | None, most: int, only: TableSelection = EVERY_ROW
) -> LogWindow | None:
    """Return the window that begins after a position; None if the log has nothing after it.

    bootstrap: horizon of the compacted state that the delivery has begun to send and not sent completely; `after` is
    then a position inside this state. most: maximum number of rows, counted before `only` selects those that are
    needed. Raises LogTrimmed if the log has lost changes after the position.
    """
    durable = log.durable
    if durable is None or durable <= after:
        return None
    if bootstrap is not None or (not after and log.oldest):
        files, end = _compacted(log, after, bootstrap)
        bootstrap = bootstrap or end
    else:
        files, end = _changes(log, after, most)
    parts: Sequence[tuple[int, int]] = ()
    affordable, last = _affordable(files), end
    most = min(most, affordable)
    if sum(file.rows for file in files) > most:
        end, is_large = _cut(files, after, end, most)
        parts = _ordinal_ranges(files, end, max(most, min(GROUP, affordable))) if is_large else ()
    return LogWindow(
        after=after,
        upto=end,
        horizon=bootstrap,
        ends_state=end == last,
        parts=parts,
        most=most,
        files=[file for file in files if file.first <= end and file.last > after],
        is_last=end >= durable,
        only=only,
    )


def _slices(rows: pa.Table, most: int) -> Iterator[pa.Table]:
    if not rows.num_rows:
        yield rows
    for start in range(0, rows.num_rows, most):
        yield rows.slice(start, most)


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


def _is_sorted(rows: pa.Table) -> bool:
    """Whether no row comes before the one above it; so it is in files that were not rewritten."""
    positions, ordinals = rows["position"].to_numpy(), rows["ordinal"].to_numpy()
    steps = np.diff(positions)
    return bool(((steps > 0) | ((steps == 0) & (np.diff(ordinals) >= 0))).all())


def _cut(files: Sequence[LogFile], after: Position, end: Position, most: int) -> tuple[Position, bool]:
    """Return the last position of a window of at most `most` rows, and whether its first transaction has more."""
    found = [read_file(file, after, end, ["position"])["position"] for file in files]
    positions = np.concatenate([column.to_numpy() for column in found]) if found else np.empty(0, np.int64)
    if (positions[1:] < positions[:-1]).any():  # the rows of a file that was not rewritten are in order
        positions.sort()
    if len(positions) <= most:
        return end, False
    inside = positions[positions < positions[most]]
    return (Position(int(inside[-1])), False) if len(inside) else (Position(int(positions[0])), True)


def _ordinal_ranges(files: Sequence[LogFile], position: Position, most: int) -> list[tuple[int, int]]:
    """Return ranges of ordinals that divide a transaction: each has at most `most` rows.

    `most` is not less than a row group, if so many rows are affordable, because a row group is always read as a whole.
    """
    found = [read_file(file, Position(position - 1), position, ["ordinal"])["ordinal"].to_numpy() for file in files]
    ordinals = np.sort(np.concatenate(found))
    firsts = ordinals[::most]
    lasts = [*(firsts[1:] - 1).tolist(), int(ordinals[-1])]
    return list(zip(firsts.tolist(), lasts, strict=True))
