"""Search: both sides of the benchmark index the same rows."""

from __future__ import annotations

from pathlib import Path

from cdc.log.reader import LogReader
from cdc.position import Position
from tests.benchmarks.search_input import FIRST, ITEMS, documents, write_log

ROWS = 20


def test_the_log_has_the_documents_of_the_peer(tmp_path: Path) -> None:
    log = LogReader(write_log(tmp_path, ROWS))

    assert log.durable == FIRST + ROWS - 1
    rows = [row for batch in log.rows(Position(0), log.durable) for row in batch.to_pylist() if row["op"] == "c"]
    names = {column.id: column.name for column in ITEMS.columns}
    images = [{names[column]: value for column, value in row["after"]} for row in rows]
    assert [row["key"] for row in rows] == [[image["id"]] for image in images]
    for image, document in zip(images, documents(0, ROWS), strict=True):
        assert (image["name"], image["note"], int(image["id"])) == (document["name"], document["note"], document["id"])
