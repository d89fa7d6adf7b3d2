"""The log row: an image tells NULL from not sent, through Arrow and through Parquet."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.log_row import LOG_SCHEMA, ROW_OPERATIONS, Operation, RowOrder, control_row

images = st.none() | st.dictionaries(
    st.integers(1, 1600), st.none() | st.text(st.characters(exclude_categories=["Cs"])), max_size=5
)


@given(st.lists(images, max_size=8))
def test_absent_null_and_empty_stay_apart(values: list[dict[int, str | None] | None]) -> None:
    column = pa.array([None if v is None else list(v.items()) for v in values], LOG_SCHEMA.field("after").type)

    assert [None if v is None else dict(v) for v in column.to_pylist()] == values


def test_the_row_survives_parquet_with_its_schema(tmp_path: Path) -> None:
    row = {
        "position": 1, "ordinal": 0, "xid": 700, "committed_at": 0, "relation": 5, "topic": "shop.notes", "op": "u",
        "key": ["a"], "old_key": None, "before": None, "after": [(1, "a"), (2, None)], "partial": True, "payload": None,
        "address": None,
    }  # fmt: skip
    pq.write_table(pa.Table.from_pylist([row], LOG_SCHEMA), tmp_path / "row.parquet")
    found = pq.ParquetFile(tmp_path / "row.parquet").read()

    assert found.schema == LOG_SCHEMA
    assert found["after"].to_pylist() == [[(1, "a"), (2, None)]]


@pytest.mark.parametrize("name", ["position", "ordinal", "xid", "committed_at", "op", "partial"])
def test_what_every_row_has_cannot_be_null(name: str) -> None:
    assert not LOG_SCHEMA.field(name).nullable


def test_operations_are_rows_or_control() -> None:
    assert {op.value for op in ROW_OPERATIONS} == set("cudr")
    assert {op.value for op in Operation} - {op.value for op in ROW_OPERATIONS} == set("tmsg")


def test_a_control_row_has_its_place_and_payload_and_no_image() -> None:
    row = control_row(RowOrder(1, 2, 3, 4), Operation.SCHEMA, 5, "shop.notes", b"{}")

    assert row.schema == LOG_SCHEMA
    found = {name: value for name, value in row.to_pylist()[0].items() if value is not None}
    assert found.pop("committed_at") == datetime.fromtimestamp(0, UTC) + timedelta(microseconds=4)
    assert found == {
        "position": 1, "ordinal": 2, "xid": 3, "relation": 5, "topic": "shop.notes", "op": "s", "partial": False,
        "payload": b"{}",
    }  # fmt: skip
