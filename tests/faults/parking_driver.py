"""`python -m tests.faults.parking_driver FOLDER UPTO`: one batch of a table with rows that do not fit."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.contracts.folded import gone, part, put
from tests.pipelines.parking.parked import NAN, Driver

BEGIN, END = 20, 60
FIRST = [put(1, "a", 10), put(2, "b", 11), put(3, "c", 12, price=NAN), put(4, "d", 13, price=NAN)]
LATER = [put(1, "A", 30, price=NAN), put(2, "B", 31), gone(3, 32), part(4, 33, {3: "4.00"}), part(9, 34, {3: "9.00"})]


def main(folder: Path, upto: int) -> None:
    """From where the last one published, up to there."""
    driver = Driver(folder)
    published = max((table.position for table in driver.tables.values()), default=0)
    rows = [row for row in (*FIRST, *LATER) if published < row.position <= upto]
    driver.take(*rows, upto=upto)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
