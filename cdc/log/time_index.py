"""Instants: where in the log a time of the source's clock lies.

Commit times are the source's own and may go back a little where positions do not. A moment therefore stands before
the first transaction that was committed later, whatever the times behind it.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.layout import LogFile
from cdc.log.reader import read_file
from cdc.position import Position

_MILLISECOND = 1_000
"""What the statistics of a file cut its latest commit time to."""


def position_before(files: Iterable[LogFile], durable: Position, moment: int) -> Position:
    """The last position before the first transaction in files that was committed later than a moment, else durable.

    moment: microseconds UTC. Of each file only positions and commit times are read, and of most not even those.
    """
    later = durable + 1
    for file in sorted(files, key=lambda file: file.first):
        if file.first < later and file.committed_at + _MILLISECOND > moment:
            rows = read_file(file, Position(0), durable, ["position", "committed_at"])
            after = pc.greater(rows["committed_at"].cast(pa.int64()), moment)
            first = pc.min(rows.filter(after)["position"]).as_py()
            later = later if first is None else min(later, first)
    return Position(later - 1)
