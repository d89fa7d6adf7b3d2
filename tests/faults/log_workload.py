"""The life of a small log in one process: made, appended to, compacted, trimmed, swept; and what is true at any time.

A life goes on from wherever the last one ended, so a killed one is followed by another. Both tables come across a
checkpoint and the clean-up of their commits on the way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any, Final

from cdc.delta_protocol.checkpoints import KEEP
from cdc.log import consumers, retired_files
from cdc.log.consumers import Consumer
from cdc.log.disk_format import CHANGES, COMPACTED
from cdc.log.fenced_table import CHECKPOINT_EVERY
from cdc.log.reader import LogReader
from cdc.log.retrying_writer import RetryingWriter
from cdc.log.trim_plan import Retention, plan_trim
from cdc.log.vacuum import remove_staged_files, vacuum
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.position import Position
from pipelines.compaction.compaction_steps import compact
from tests.log.rows import IDENTITY, info, row, schema_of, table
from tests.log.simple_compaction import Row, latest_state, open_compactor, read_range

FIRST: Final = CHECKPOINT_EVERY * (KEEP // CHECKPOINT_EVERY + 2)
"""Where the first transaction lies; what is before are commits without rows."""
LAST: Final = FIRST + 9
EVERY: Final = 3
"""Transactions between two compactions, each followed by a trim and a sweep."""
ROWS: Final = 4
"""Of one transaction."""
CLOSED: Final = SegmentLimits(size=1, age=3600.0)
"""Every file closes its segment."""
SOON: Final = Retention(max_age=1e9, grace=0.0)

Tell = Callable[[int], object]


def aged(root: Path) -> None:
    """A log without a row, each table of which makes a checkpoint with its next commit and cleans old ones away."""
    writer = LogWriter.open(root, IDENTITY, CLOSED)
    for position in range(1, FIRST):
        writer.commit([], info(position))
    compactor = open_compactor(root)
    for _ in range(1, CHECKPOINT_EVERY):
        compactor.commit([], horizon=Position(FIRST - 1), floor=Position(0))
    for commit in root.glob("*/_delta_log/*"):
        os.utime(commit, (0, 0))


def transaction(position: int) -> list[Row]:
    """What the source did at a position: two tables change, keys come, change and go."""
    schema = (
        [row(position, 0, op="s", key=None, after=None, payload=schema_of().to_json())] if position == FIRST else []
    )
    images = [[(1, str(position + n)), (2, f"{position}.{n}")] for n in range(ROWS)]
    rows = [
        row(position, n, relation=16384 + n % 2, key=[str((position + n) % 7)], after=image)
        for n, image in enumerate(images)
    ]
    rows[-1] |= {"op": "d", "after": None}
    return [*schema, *(one | {"ordinal": n} for n, one in enumerate(rows, len(schema)))]


def transactions(after: int, upto: int) -> list[Row]:
    """The rows of all in (after, upto], in order."""
    return [one for position in range(max(FIRST, after + 1), upto + 1) for one in transaction(position)]


def live_on(root: Path, tell: Tell, *, patient: bool = False) -> None:
    """From wherever the last life ended to LAST; tells each position once its transaction is confirmed.

    patient: storage that refuses is waited for, as the reader does.
    """
    begun = LogWriter.open(root, IDENTITY, CLOSED)
    if (begun.durable or 0) < FIRST:  # the first copy
        append(begun, FIRST, tell)
    remove_staged_files(root)
    writer = RetryingWriter(root, CLOSED, Event(), lambda _on: None) if patient else LogWriter(root, CLOSED)
    for position in range((writer.durable or 0) + 1, LAST + 1):
        append(writer, position, tell)
        if position % EVERY == 0:
            keep_small(root, writer, position)
    keep_small(root, writer, LAST)


def append(writer: LogWriter | RetryingWriter, position: int, tell: Tell) -> None:
    """The transaction at a position."""
    writer.commit(writer.stage(table(*transaction(position))), info(position))
    tell(position)


def keep_small(root: Path, writer: LogWriter | RetryingWriter, passed: int) -> None:
    """What the processes of a log do to it now and then, one after the other; a sink has come to `passed`."""
    compact(None, root)
    consumers.register(root, Consumer("sink", "lake", Position(passed)))
    if (trim := plan_trim(root, SOON)) is not None:
        writer.trim(trim.segments, trim.upto)
    vacuum(root, SOON)


def assert_whole(root: Path, confirmed: int) -> None:
    """Nothing that was confirmed is lost, no change is doubled, and no transaction is there in part."""
    if not (root / CHANGES / "_delta_log").is_dir() or not any((root / CHANGES / "_delta_log").glob("*.json")):
        assert not confirmed
        return
    log = LogReader(root)
    durable = log.durable or Position(0)
    assert durable >= confirmed
    assert between_sorted(log, log.oldest, durable) == normal(transactions(log.oldest, durable))
    assert latest_state(read_range(log, Position(0), durable)) == latest_state(normal(transactions(0, durable)))
    assert len(log.schemas()) == (durable >= FIRST)


def assert_lived(root: Path) -> None:
    """A life came to its end, and what no table holds any more is gone from the disk."""
    log = LogReader(root)
    assert (log.durable, log.oldest > FIRST) == (LAST, True)
    assert_whole(root, LAST)
    held = {file.path for file in log.every_file()}
    held |= {file.path for file in ([] if log.compacted is None else log.compacted.files)}
    noted = {
        str(root / note.table / path) for note in retired_files.list_removals(root).values() for path in note.paths
    }
    on_disk = {str(file) for name in (CHANGES, COMPACTED) for file in (root / name).glob("segment=*/*.parquet")}
    assert on_disk - held - noted == set()


def between_sorted(log: LogReader, after: Position, upto: Position) -> list[Row]:
    """The single changes in (after, upto]."""
    return sorted(read_range(log, after, upto), key=lambda row: (row["position"], row["ordinal"]))


def normal(rows: list[Row]) -> list[dict[str, Any]]:
    """Rows as the log gives them back."""
    return table(*rows).to_pylist()


def main(root: str, confirmed: str, *patient: str) -> None:
    """A life, in a process of its own, which tells what is confirmed by a call that it makes nowhere else."""
    file = os.open(confirmed, os.O_WRONLY)
    live_on(Path(root), lambda at: os.pwritev(file, [at.to_bytes(8, sys.byteorder)], 0), patient=bool(patient))


if __name__ == "__main__":
    main(*sys.argv[1:])
