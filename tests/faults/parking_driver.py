"""`python -m tests.faults.parking_driver FOLDER UPTO [KIND]`: one batch of a table with rows that are refused.

KIND: `delta` (default), `search`, or what a Delta target keeps, `scd2`, `soft_delete` or `append`; with `+` behind it
every value fits, and what is parked is tried again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cdc.catalog.dead_letter_requests import DeadLetterAction
from cdc.config.delta_sink import HistoryMode
from tests.contracts.folded import gone, part, put
from tests.contracts.histories import RELATION
from tests.pipelines.dead_letters import parking_history
from tests.pipelines.dead_letters.sink_driver import NAN, Driver, SearchDriver
from tests.pipelines.fold_model import log_row

BEGIN, END = 20, 60
FIRST = [put(1, "a", 10), put(2, "b", 11), put(3, "c", 12, price=NAN), put(4, "d", 13, price=NAN)]
LATER = [put(1, "A", 30, price=NAN), put(2, "B", 31), gone(3, 32), part(4, 33, {3: "4.00"}), part(9, 34, {3: "9.00"})]
HISTORY = [
    *(parking_history.complete_row(10 + key, key, f"{key}.00", "c") for key in (1, 2, 3)),
    parking_history.complete_row(15, 1, NAN),
    parking_history.complete_row(16, 2, "3.00"),
    parking_history.partial_row(30, 1, "4.00"),
    log_row(RELATION, (31, 0), "t"),
    parking_history.complete_row(32, 1, "5.00", "c"),
    parking_history.complete_row(33, 2, "6.00", "c"),
    parking_history.complete_row(51, 2, NAN),
    log_row(RELATION, (52, 0), "t"),
    parking_history.complete_row(53, 1, "7.00", "c"),
]
"""With truncates: where rows end, a batch is two commits of its target."""


def drive(folder: Path, upto: int, kind: str = "delta") -> None:
    """From where the last one published, up to there."""
    if kind not in ("delta", "search"):
        _change_by_change(folder, upto, kind)
        return
    driver = (SearchDriver if kind == "search" else Driver)(folder)
    published = max((table.position for table in driver.tables.values()), default=0)
    rows = [row for row in (*FIRST, *LATER) if published < row.position <= upto]
    driver.take(*rows, upto=upto)
    driver.sink.close()


def _change_by_change(folder: Path, upto: int, kind: str) -> None:
    mended = parking_history.AS_TEXT if kind.endswith("+") else {}
    lake = parking_history.open_parking_sink(folder, HistoryMode(kind.removesuffix("+")), **mended)
    if mended:
        lake.ask(DeadLetterAction.RETRY)
    lake.take(HISTORY, upto)
    lake.sink.close()


if __name__ == "__main__":
    drive(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
