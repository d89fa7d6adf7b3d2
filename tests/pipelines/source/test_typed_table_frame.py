"""Typed changes: one table under its own columns, through added, dropped and renamed columns."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from cdc.errors import InvalidDefinition, SchemaNotApplicable, ValueNotRepresentable
from cdc.log.reader import LogReader
from cdc.table import Column, TableSchema, TableState
from pipelines.source.data_source import LogStreamReader
from tests.log.rows import message_row, row, schema_of
from tests.pipelines.source.frame_rows import commit, frame_of, frame_rows, schema_row

ORDERS = schema_of(16384, "note", "large")
"""id, note and large, numbered 1, 2, 3."""
TABLE = {"table": "shop.orders"}


def text(number: int, name: str, **fields: Any) -> Column:
    return Column(id=number, name=name, type_oid=25, type_name="text", **fields)


def with_columns(*columns: Column, schema: TableSchema = ORDERS) -> TableSchema:
    return replace(schema, columns=columns)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A log with two orders, of which one is updated and one deleted, and with another table."""
    root = tmp_path / "log"
    commit(root, 10, schema_row(10, ORDERS), row(10, 1, key=["1"], after=[(1, "1"), (2, "a"), (3, "x" * 9)]))
    elsewhere: dict[str, Any] = {"relation": 2, "topic": "shop.items"}
    commit(
        root,
        20,
        row(20, 0, key=["2"], after=[(1, "2"), (2, None), (3, None)]),
        row(20, 1, op="u", key=["1"], after=[(1, "1"), (2, "b")], partial=True),
        row(20, 2, **elsewhere),
    )
    commit(root, 30, row(30, 0, op="d", key=["2"], before=[(1, "2")], after=None))
    return root


def listed(root: Path, *names: str, after: int | None = None, **options: str) -> list[tuple[Any, ...]]:
    rows = frame_rows(frame_of(root, **TABLE, **options), after).to_pylist()
    rows.sort(key=lambda row: (row["_position"], row["_ordinal"]))
    return [tuple(row[name] for name in names) for row in rows]


def test_every_change_shows_the_tables_columns_and_what_it_is(root: Path) -> None:
    assert listed(root, "_op", "_position", "_ordinal", "id", "note", "large") == [
        ("c", 10, 1, 1, "a", "x" * 9),
        ("c", 20, 0, 2, None, None),
        ("u", 20, 1, 1, "b", None),
        ("d", 30, 0, 2, None, None),
    ]
    (first, *_) = listed(root, "_committed_at")
    assert first == (datetime.fromtimestamp(1_700_000_000, UTC).replace(microsecond=10),)


def test_columns_that_were_not_sent_are_named_so_that_null_means_null(root: Path) -> None:
    assert listed(root, "_unchanged") == [(None,), (None,), (["large"],), (None,)]


def test_a_deleted_row_has_its_old_image_or_at_least_its_key(tmp_path: Path) -> None:
    whole = [(1, "1"), (2, "a"), (3, "b")]
    commit(
        tmp_path,
        10,
        schema_row(10, with_columns(*ORDERS.columns, text(4, "late", missing="none"))),
        row(10, 1, op="d", key=["1"], before=whole, after=None),
        row(10, 2, op="d", key=["2"], before=[(1, "2")], after=None),
        row(10, 3, op="d", key=["3"], after=None),
    )
    assert listed(tmp_path, "id", "note", "large", "late") == [
        (1, "a", "b", None),
        (2, None, None, None),
        (3, *[None] * 3),
    ]


def test_truncates_and_ended_copies_are_rows_without_values_and_messages_are_none(root: Path) -> None:
    controls: dict[str, Any] = {"key": None, "after": None}
    commit(
        root,
        40,
        row(40, 0, op="t", **controls),
        row(40, 1, op="g", payload=b"39", **controls),
        message_row(40, 2, prefix="40"),
        schema_row(40, ORDERS, 3),
    )
    assert listed(root, "_op", "id", after=30) == [("t", None), ("g", None)]


def test_columns_have_the_types_that_a_sink_gives_them(tmp_path: Path) -> None:
    kinds = {"id": (23, -1), "price": (1700, (10 << 16 | 2) + 4), "at": (1184, -1), "local": (1114, -1), "ok": (16, -1)}
    columns = tuple(
        Column(id=n, name=name, type_oid=oid, type_name="any", typmod=typmod, key=0 if n == 1 else None)
        for n, (name, (oid, typmod)) in enumerate(kinds.items(), 1)
    )
    image = [(1, "7"), (2, "1.50"), (3, "2026-01-31 12:00:00+00"), (4, "2026-01-31 12:00:00"), (5, "t")]
    commit(tmp_path, 10, schema_row(10, with_columns(*columns)), row(10, 1, key=["7"], after=image))
    frame = frame_of(tmp_path, **TABLE)

    assert frame.columns.simpleString() == (
        "struct<id:int,price:decimal(10,2),at:timestamp,local:timestamp_ntz,ok:boolean,"
        "_op:string,_position:bigint,_ordinal:bigint,_committed_at:timestamp,_unchanged:array<string>>"
    )
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert listed(tmp_path, *kinds) == [(7, Decimal("1.50"), noon, noon.replace(tzinfo=None), True)]
    assert listed(tmp_path, *kinds, types="text") == [tuple(value for _, value in image)]


def test_a_value_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    commit(
        tmp_path, 10, schema_row(10, ORDERS), row(10, 1, key=["1"], after=[(1, "99999999999"), (2, None), (3, None)])
    )
    with pytest.raises(ValueNotRepresentable, match="'id'"):
        listed(tmp_path, "id")


def test_a_batch_has_the_columns_of_its_end_for_older_rows_too(root: Path) -> None:
    later = with_columns(ORDERS.columns[0], text(2, "remark"), text(4, "state", missing="open"))
    commit(root, 40, schema_row(40, later), row(40, 1, key=["3"], after=[(1, "3"), (2, "c"), (4, None)]))

    assert listed(root, "id", "remark", "state") == [
        (1, "a", "open"),
        (2, None, "open"),
        (1, "b", None),
        (2, None, None),
        (3, "c", None),
    ]
    assert "note" in frame_of(root, endingPosition="0/1E", **TABLE).columns.names


def test_the_table_is_the_one_that_has_the_name_at_the_end(root: Path) -> None:
    renamed, created_again = replace(ORDERS, name="old"), replace(ORDERS, relation=5, oid=5)
    commit(
        root,
        40,
        schema_row(40, renamed),
        schema_row(40, created_again, 1),
        row(40, 2, relation=5, key=["9"], after=[(1, "9")]),
    )

    assert listed(root, "id") == [(9,)]
    assert len(frame_rows(frame_of(root, table="shop.old"))) == 4
    commit(root, 50, schema_row(50, created_again.flagged(TableState.DROPPED, "gone")))
    assert listed(root, "id") == [(9,)]


def test_only_chosen_columns_are_read(root: Path) -> None:
    frame = frame_of(root, columns="_op, note", **TABLE)

    assert frame.columns.names == ["_op", "note"]
    assert frame.log_columns == ["position", "ordinal", "op", "key", "before", "after", "partial"]
    assert frame_rows(frame).column_names == ["_op", "note"]
    assert frame_of(root, columns="_position", **TABLE).log_columns == ["position", "ordinal", "op"]
    assert sorted(frame_rows(frame_of(root, columns="_position", **TABLE))["_position"].to_pylist()) == [10, 20, 20, 30]


def stream(root: Path, **options: str) -> LogStreamReader:
    return LogStreamReader(frame_of(root, **TABLE, **options))


def test_a_stream_stops_before_an_added_column_and_continues_when_created_again(root: Path) -> None:
    reader = stream(root)
    commit(root, 40, row(40, 0, key=["3"], after=[(1, "3"), (2, "c"), (3, None)]))
    commit(
        root,
        50,
        schema_row(50, with_columns(*ORDERS.columns, text(4, "state"))),
        row(50, 1, key=["4"], after=[(4, "x")]),
    )

    end = reader.latestOffset({"position": 0}, ReadAllAvailable())
    assert end == {"position": 49}
    with pytest.raises(SchemaNotApplicable, match=r"from 0/32 on, column 'state' has type"):
        reader.latestOffset(end, ReadAllAvailable())
    assert stream(root).latestOffset(end, ReadAllAvailable()) == {"position": 50}
    assert reader._frame.typed is not None
    with pytest.raises(SchemaNotApplicable):
        frame_rows(reader._frame)


@pytest.mark.parametrize(
    "changed",
    [
        (ORDERS.columns[0], text(2, "renamed"), ORDERS.columns[2]),
        ORDERS.columns[:2],
        (
            ORDERS.columns[0],
            replace(ORDERS.columns[1], type_oid=1043, type_name="character varying"),
            ORDERS.columns[2],
        ),
    ],
    ids=["a rename", "a drop", "a type that is text as well"],
)
def test_a_stream_continues_through_renamed_and_dropped_columns(root: Path, changed: tuple[Column, ...]) -> None:
    reader = stream(root)
    commit(root, 40, schema_row(40, with_columns(*changed)), row(40, 1, key=["3"], after=[(1, "3"), (2, "c")]))

    assert reader.latestOffset({"position": 30}, ReadAllAvailable()) == {"position": 40}
    (shown,) = frame_rows(reader._frame, 30).to_pylist()
    assert (shown["id"], shown["note"], shown["large"]) == (3, "c", None)


def test_another_type_is_an_error_and_other_columns_than_the_chosen_ones_are_not(root: Path) -> None:
    reader, narrow = stream(root), stream(root, columns="id")
    wider = replace(ORDERS.columns[0], type_oid=20, type_name="bigint")
    commit(
        root,
        40,
        schema_row(40, with_columns(*ORDERS.columns, text(4, "state"))),
        row(40, 1, key=["3"], after=[(1, "3")]),
    )
    assert narrow.latestOffset({"position": 30}, ReadAllAvailable()) == {"position": 40}
    commit(root, 50, schema_row(50, with_columns(wider, *ORDERS.columns[1:])), row(50, 1, key=["4"], after=[(1, "4")]))
    with pytest.raises(SchemaNotApplicable, match="from 0/32 on, column 'id' has type 'bigint'"):
        narrow.latestOffset({"position": 40}, ReadAllAvailable())
    with pytest.raises(SchemaNotApplicable, match="'state'"):
        reader.latestOffset({"position": 30}, ReadAllAvailable())


@pytest.mark.parametrize(
    "options",
    [{"table": "shop.none"}, {"table": "orders"}, TABLE | {"endingPosition": "0/1"}, TABLE | {"columns": "id, price"}],
)
def test_an_unknown_table_or_column_is_an_error_of_the_options(root: Path, options: dict[str, str]) -> None:
    with pytest.raises(InvalidDefinition, match=r"option '(table|columns)'"):
        frame_of(root, **options)


def test_it_reads_nothing_of_other_tables(root: Path) -> None:
    frame = frame_of(root, **TABLE)
    assert frame.tables.relations == (16384, 16384)
    assert LogReader(root).durable == 30
