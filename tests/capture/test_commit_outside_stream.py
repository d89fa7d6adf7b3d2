"""Snapshot commit: schema rows, table rows and ends of generations become one commit at one position."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

from cdc.capture.commit_outside_stream import SnapshotCommit
from cdc.log.disk_format import CommitSource
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.position import Position
from cdc.table import TableState
from tests.log.rows import IDENTITY, LIMITS, schema_of

AT = Position(9)


def committed_rows(root: Path) -> list[dict[str, Any]]:
    rows = [row for batch in LogReader(root).rows(Position(0), AT) for row in batch.to_pylist()]
    return sorted(rows, key=itemgetter("ordinal"))


def test_a_copied_table_is_its_schema_its_rows_and_the_end_of_its_generation(tmp_path: Path) -> None:
    counted: list[tuple[str, int]] = []
    writer = LogWriter.open(tmp_path, IDENTITY, LIMITS)
    commit = SnapshotCommit(writer, AT, lambda topic, rows: counted.append((topic, rows)))

    commit.table(schema_of(7, "note"), iter([b"1\ta\n2\tb\n"]))
    assert writer.durable is None
    commit.commit(CommitSource(1, "7000", 5))

    rows = committed_rows(tmp_path)
    assert [(row["op"], row["ordinal"], row["position"]) for row in rows] == [
        ("s", 0, AT),
        ("r", 1, AT),
        ("r", 2, AT),
        ("g", 3, AT),
    ]
    assert (counted, commit.tables, commit.table_rows) == ([("shop.orders", 2)], 1, 2)
    last = LogReader(tmp_path).last_commit
    assert last is not None
    assert (last.last, last.rows, last.transactions, last.publication) == (AT, 4, 1, 5)


def test_a_marked_table_has_only_its_schema_row(tmp_path: Path) -> None:
    commit = SnapshotCommit(LogWriter.open(tmp_path, IDENTITY, LIMITS), AT)
    commit.mark(schema_of(7).flagged(TableState.NEEDS_RESYNC, "changes were skipped"))
    commit.mark(schema_of(8), ended=True)
    commit.commit(CommitSource(1, "7000", 5))

    assert [(row["op"], row["relation"]) for row in committed_rows(tmp_path)] == [("s", 7), ("s", 8), ("g", 8)]
    assert LogReader(tmp_path).schemas()[7].state is TableState.NEEDS_RESYNC
