"""Reading of Delta sinks: the rows of a table at the newest version and at that of a kept cut."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake

from cdc.config import DeltaSinkDefinition
from cdc.postgres.key_range_digests import KeyRange
from cdc.targets.delta_reading import DeltaReading, PublishedVersions, open_table
from cdc.targets.published_record import Published, TableRecord

LAKE = DeltaSinkDefinition.model_validate({"type": "delta", "name": "lake", "path": "/lake/{schema}/{table}"})


def published_table(folder: Path) -> TableRecord:
    """A target with row 1 at version 0, which is published, and rows 1 and 2 at version 1."""
    uri = str(folder / "orders")
    write_deltalake(uri, pa.table({"id": [1], "item": ["mug"], "_position": [10]}))
    write_deltalake(uri, pa.table({"id": [2], "item": ["cup"], "_position": [20]}), mode="append")
    return TableRecord(7, "shop.orders", uri, 10, 0, "streaming")


def test_a_table_at_a_cut_has_the_rows_of_the_version_that_was_kept(tmp_path: Path) -> None:
    record = published_table(tmp_path)

    def ids(handle: str) -> list[int]:
        table = DeltaReading().table_at_cut(LAKE, handle, record, ["id"])
        return sorted(value for batch in table.rows(["id"]) for value in batch["id"].to_pylist())

    assert ids(json.dumps({record.target: 1})) == [1, 2]
    assert ids("{}") == [1]  # the version of the record


def test_a_published_state_opens_the_published_version_or_the_newest(tmp_path: Path) -> None:
    record = published_table(tmp_path)
    state = PublishedVersions(Published(10, 0, {7: record}))

    assert state.has_newer_versions
    assert state.table(record, ["id"], newest=True).count(["id"]) == 2
    assert state.table(record, ["id"], newest=False).count(["id"]) == 1


def test_columns_come_in_the_order_of_their_names_and_a_missing_column_has_no_type(tmp_path: Path) -> None:
    table = open_table(published_table(tmp_path), None, ["id"])

    (batch,) = [batch for batch in table.rows(["item", "id"], KeyRange("id", "2", None)) if batch.num_rows]

    assert batch.schema.names == ["item", "id"]
    assert batch.to_pylist() == [{"item": "cup", "id": 2}]
    assert (table.kind("id"), table.kind("nothing")) == (pa.int64(), None)
    assert table.count([], KeyRange("id", None, "2")) == 1


def test_a_target_that_cannot_be_opened_has_a_reason_instead_of_rows(tmp_path: Path) -> None:
    gone = TableRecord(7, "shop.orders", str(tmp_path / "gone"), 10, 0, "streaming")

    table = open_table(gone, None, ["id"])

    assert "has no readable table" in str(table.refusal)
    assert (list(table.rows(["id"])), table.count(["id"]), table.kind("id"), table.reads_ranges) == ([], 0, None, False)
