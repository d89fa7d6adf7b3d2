"""Log queries: keys of partial images whose base row the log may not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cdc.log.writer import LogWriter
from cdc.log_row import Operation
from cdc.position import Position
from cdc.snapshot.missing_base_rows import keys_without_base, moved_keys_without_base
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
