"""`python -m tests.faults.copying_driver FOLDER UPTO`: merge and publish batches into a target without vectors."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from pipelines.sinks.contract import Published, TableRecord
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import batch, gone, part, put

ENDS = (20, 40, 60, 80)
ROWS = {
    20: [put(key, f"{key}", 10, ordinal=key) for key in range(10)],
    40: [put(key, "new", 30, ordinal=key) for key in range(20, 25)],
    60: [put(1, "changed", 50), gone(2, 51), part(20, 52, {2: "in part"}), put(30, "new", 53)],
    80: [put(1, "again", 70), gone(30, 71), put(2, "back", 72)],
}
"""End of a batch → its rows. From the third batch on, each of them copies files."""
ITEMS = {
    **{key: f"{key}" for key in range(3, 10)},
    **dict.fromkeys(range(21, 25), "new"),
    0: "0",
    1: "again",
    2: "back",
    20: "in part",
}
"""Id → item after all batches."""


def drive(folder: Path, upto: int) -> TableRecord:
    """From the published cut, up to there; return the record of the target."""
    settings = DeltaSettings("lake", f"{folder}/lake/{{schema}}/{{table}}", Writer.COPY_ON_WRITE)
    sink = DeltaSink(replace(settings, index_folder=f"{folder}/index"))
    published = sink.open("log-1") or Published(0, 0)
    begin = published.position
    for before, end in zip((0, *ENDS), ENDS, strict=False):
        if begin < end <= upto:
            record = sink.apply(batch(ROWS[end], before, end))
            sink.publish(Published(end, 0, {record.relation: record}))
    sink.close()
    return record


if __name__ == "__main__":
    drive(Path(sys.argv[1]), int(sys.argv[2]))
