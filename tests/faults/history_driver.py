"""`python -m tests.faults.history_driver FOLDER KEEPING UPTO`: apply and publish one batch of a small table."""

from __future__ import annotations

import sys

from cdc.config.delta_sink import HistoryMode
from tests.contracts.histories import RELATION, SETTINGS, TABLE, Lake
from tests.pipelines.fold_model import Row, log_row


def _put(position: int, ordinal: int, key: int, text: str, *, whole: bool = True) -> Row:
    image = {1: str(key), 2: text} | ({3: "l", 4: "h"} if whole else {})
    op = "c" if whole else "u"
    return log_row(RELATION, (position, ordinal), op, key=[str(key)], after=image, partial=not whole)


HISTORY = [
    *(_put(10, key, key, "a") for key in range(6)),
    _put(20, 0, 1, "b", whole=False),
    _put(20, 1, 6, "new"),
    log_row(RELATION, (30, 0), "t"),
    _put(30, 1, 2, "after"),
    _put(40, 0, 2, "later", whole=False),
    _put(40, 1, 7, "seen"),
    log_row(RELATION, (50, 0), "g", payload=b"35"),
    _put(60, 0, 8, "late"),
    log_row(RELATION, (70, 0), "t"),
]
"""With two truncates and the end of a copy, which close rows that nothing else touches."""
ENDS = (20, 40, 50, 70)


def drive(folder: str, keeping: HistoryMode, upto: int) -> None:
    """From where the last one published, up to there."""
    lake = Lake(folder, SETTINGS[keeping])
    published = lake.sink.open("log-1")
    after = published.position if published else 0
    lake.publish(lake.apply(HISTORY, min(after, upto), upto, TABLE), upto)
    lake.sink.close()


if __name__ == "__main__":
    drive(sys.argv[1], HistoryMode(sys.argv[2]), int(sys.argv[3]))
