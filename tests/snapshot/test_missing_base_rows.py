"""Log queries: keys of partial images whose base row the log may not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cdc.log.writer import LogWriter
from cdc.log_row import Operation
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.snapshot.missing_base_rows import keys_without_base, moved_keys_without_base, unconfirmed_xids
from tests.fixtures.postgres import reader_of
from tests.log.rows import IDENTITY, LIMITS, info, row, table

RELATION = 16384
START, END = Position(0), Position(99)


@pytest.fixture(name="writer")
def _writer(tmp_path: Path) -> LogWriter:
    return LogWriter.open(tmp_path, IDENTITY, LIMITS)


def commit(writer: LogWriter, position: int, *rows: dict[str, Any]) -> None:
    changes = [row(position, ordinal) | fields for ordinal, fields in enumerate(rows)]
    writer.commit(writer.stage(table(*changes)), info(position))


def partial(key: str, old_key: str | None = None) -> dict[str, Any]:
    return {"op": Operation.UPDATE.value, "key": [key], "partial": True, "old_key": old_key and [old_key]}


def deleted(key: str) -> dict[str, Any]:
    return {"op": Operation.DELETE.value, "key": [key], "after": None}


def test_only_keys_of_partial_images_of_the_table_are_found(writer: LogWriter, tmp_path: Path) -> None:
    commit(writer, 5, partial("a"), {"key": ["b"]}, partial("c") | {"relation": 7}, partial("a"))
    commit(writer, 6, deleted("d"), partial("e", "d"))
    assert keys_without_base(tmp_path, RELATION, START, END, moved=False) == [("a",), ("e",)]
    assert keys_without_base(tmp_path, RELATION, START, END, moved=True) == [("e",)]
    assert keys_without_base(tmp_path, RELATION, Position(5), END, moved=False) == [("e",)]


def test_a_row_is_followed_over_several_changes_of_its_key(writer: LogWriter, tmp_path: Path) -> None:
    commit(writer, 5, deleted("a"), partial("b", "a"))
    commit(writer, 6, deleted("b"), partial("c", "b"))
    assert moved_keys_without_base(tmp_path, RELATION, START, END, [("a",)]) == [("c",)]
    assert moved_keys_without_base(tmp_path, RELATION, START, END, [("x",)]) == []


def test_a_full_image_is_a_base_row(writer: LogWriter, tmp_path: Path) -> None:
    commit(writer, 5, deleted("a"), partial("b", "a"))
    commit(writer, 6, {"key": ["b"]})
    assert moved_keys_without_base(tmp_path, RELATION, START, END, [("a",)]) == []


def test_an_old_transaction_that_snapshots_do_not_see_is_found_by_a_role_that_sees_no_other_session(
    writer: LogWriter, tmp_path: Path, database: str
) -> None:
    """A commit waits for a synchronous standby as long as the standby is away; an open transaction looks the same."""
    with connect(database, autocommit=False) as waiting, reader_of(database) as own_dsn, connect(own_dsn) as own:
        xid = waiting.execute("SELECT pg_current_xact_id()::xid::text::bigint").fetchone()[0]  # type: ignore[index]
        commit(writer, 5, {"xid": xid})
        commit(writer, 6, {"xid": xid - 1})
        assert own.execute("SELECT count(xact_start) FROM pg_stat_activity").fetchone() == (1,), "its own session only"
        assert unconfirmed_xids(own, tmp_path).tolist() == [xid]
        waiting.commit()
        assert unconfirmed_xids(own, tmp_path).tolist() == []
