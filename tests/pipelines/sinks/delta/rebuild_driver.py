"""`python -m tests.pipelines.sinks.delta.rebuild_driver URI`: small batches while the index of a target is built.

Batch n changes one row of the target and deletes another one. The driver ends when all keys are in the index.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from deltalake import DeltaTable, write_deltalake

from pipelines.sinks.delta.background_indexing import IndexingThread
from pipelines.sinks.delta.target_columns import OP
from tests.fixtures.waiting import until
from tests.pipelines.sinks.delta.vector_tables import (
    APP,
    COLUMNS,
    Row,
    VectorTable,
    delete,
    source_of,
    upsert,
    without_op,
)

FILES, ROWS = 4, 5
"""Files of the target, and rows of each."""
BATCHES = 3
"""Batches before all keys are known to be read, and after that."""


def fill(uri: str) -> None:
    """Append the files, as executors or another driver wrote them."""
    for first in range(0, FILES * ROWS, ROWS):
        new = [_filled(number) for number in range(first, first + ROWS)]
        write_deltalake(uri, source_of(COLUMNS, new).select(COLUMNS.names), mode="append")


def batch(number: int) -> list[Row]:
    """Return the source rows of a batch."""
    position = 10 * number
    changed, gone = 7 * number % (FILES * ROWS), 3 * number % (FILES * ROWS)
    upserted = upsert(position, id=changed, item=f"batch {number}")
    return [upserted] if changed == gone else [upserted, delete(position, 1, id=gone)]


def expected(uri: str) -> list[dict[str, Any]]:
    """Return the rows after the batches that the target has, by its `txn`."""
    rows = {number: without_op(_filled(number)) for number in range(FILES * ROWS)}
    for number in range(1, (DeltaTable(uri).transaction_version(APP) or 0) + 1):
        for row in batch(number):
            rows.pop(row["id"], None)
            if row[OP] == "u":
                rows[row["id"]] = without_op(row)
    return sorted(rows.values(), key=repr)


def drive(uri: str) -> None:
    """Merge batches until the index has been built, and a few more."""
    table = VectorTable(uri, thread=partial(IndexingThread, at_once=0, group_rows=1))
    for _ in range(BATCHES):
        _merge_next(table)
    until(lambda: not table.table.waiting_files, "the keys of all files")
    for _ in range(BATCHES):
        _merge_next(table)
    table.close()


def _merge_next(table: VectorTable) -> None:
    number = (DeltaTable(table.uri).transaction_version(APP) or 0) + 1
    table.merge(*batch(number))


def _filled(number: int) -> Row:
    return upsert(0, number, id=number, item=str(number))


if __name__ == "__main__":
    drive(sys.argv[1])
