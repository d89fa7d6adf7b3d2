"""`python -m tests.benchmarks.upkeep LOG BEGUN`: a log's closed segments are compacted one by one, and trimmed at once.

By the same calls as in the apply process, which makes them less often; what is compacted the log's own reader trims.
A third of the log is done first, so that whoever opens it meets compacted changes and trimmed ones; the rest from the
moment on in which the file BEGUN is there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from cdc.log.reader import LogReader
from cdc.log.trim_plan import request_trim
from cdc.position import Position
from pipelines.compaction.compaction_steps import compact
from tests.benchmarks.peers import until

FIRST: Final = 3
"""Which part of the segments is done before: one of so many."""
PATIENCE: Final = 300.0
"""Seconds until the rest has to be wanted."""


def main() -> int:
    """Ends when all that is closed is compacted."""
    root, begun = sys.argv[1], Path(sys.argv[2])
    *closed, _open = LogReader(root).segments()
    first = max(1, len(closed) // FIRST)
    for segment in closed[:first]:
        _compact(root, segment.last)
    until(begun.exists, PATIENCE, pause=0.01)
    for segment in closed[first:]:
        _compact(root, segment.last)
    return 0


def _compact(root: str, upto: Position) -> None:
    compact(None, root, upto=upto)
    request_trim(root)


if __name__ == "__main__":
    sys.exit(main())
