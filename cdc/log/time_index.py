"""Conversion of a commit time to a position in the log.

Commit times come from the source's clock and may decrease slightly while positions increase. A time therefore maps
to the position before the first transaction with a later commit time, whatever the times after it.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.layout import LogFile
from cdc.log.reader import read_file
from cdc.position import Position

_MILLISECOND = 1_000
"""Precision in µs of the latest commit time in a file's statistics."""


def position_before(files: Iterable[LogFile], durable: Position, moment: int) -> Position:
    """The last position before the first transaction committed after a time, or durable if there is none.

    moment: microseconds UTC. Only positions and commit times are read, and only of files that can contain the time.
    """
    later = durable + 1
    for file in sorted(files, key=lambda file: file.first):
        if file.first < later and file.committed_at + _MILLISECOND > moment:
            rows = read_file(file, Position(0), durable, ["position", "committed_at"])
            after = pc.greater(rows["committed_at"].cast(pa.int64()), moment)
            first = pc.min(rows.filter(after)["position"]).as_py()
            later = later if first is None else min(later, first)
    return Position(later - 1)
