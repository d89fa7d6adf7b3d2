"""The search sink: what a published index holds, after any sequence of batches and any death."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cdc.config import SearchSettings
from cdc.errors import MissingBase, SchemaNotApplicable, SinkFenced, SinkOfAnotherLog, SinkUnavailable
from cdc.failpoint import VARIABLE
from cdc.table import Column, ReplicaIdentity, TableSchema, TableState
from cdc.targets.published_record import TargetState
from cdc.targets.search_index_reader import PUBLISHED_ID, SearchIndex
from pipelines.sinks.contract import Published, TableBatch, TableRecord
from pipelines.sinks.search.document_shape import DocumentShapes
from pipelines.sinks.search.documents import replace_reserved
from pipelines.sinks.search.row_documents import ROWS_AT_ONCE
from pipelines.sinks.search.sink import SearchSink
from tests.fixtures import forked

LOG = "6b1f8b64-0000-0000-0000-000000000001"
PRODUCTS = TableSchema(
    relation=16385,
    oid=16385,
    schema="shop",
    name="products",
    replica_identity=ReplicaIdentity.DEFAULT,
    columns=(
        Column(id=1, name="id", type_oid=20, type_name="bigint", key=0, not_null=True),
        Column(id=2, name="name", type_oid=25, type_name="text"),
        Column(id=3, name="description", type_oid=25, type_name="text"),
    ),
)
ROWS = pa.schema(
    [
        ("op", pa.string()),
        ("key", pa.list_(pa.string())),
        ("position", pa.int64()),
        ("ordinal", pa.int64()),
        ("after", pa.map_(pa.int32(), pa.string())),
        ("complete", pa.bool_()),
        ("base", pa.list_(pa.string())),
    ]
)
COPYING = replace(PRODUCTS, state=TableState.SNAPSHOTTING)
BLUE = {1: "1", 2: "blue mug", 3: "holds tea"}
RED = {1: "2", 2: "red mug", 3: None}


def upsert(image: Mapping[int, str | None], position: int, **other: Any) -> dict[str, Any]:
    plain = {"op": "u", "key": [image[1]], "ordinal": 0, "complete": True, "base": None}
    return {**plain, "position": position, "after": list(image.items()), **other}


def delete(key: str, position: int) -> dict[str, Any]:
    return {"op": "d", "key": [key], "position": position, "ordinal": 0, "after": None, "complete": False, "base": None}


def batch(after: int, upto: int, *rows: dict[str, Any], **control: Any) -> TableBatch:
    schema = control.pop("schema", PRODUCTS)
    return TableBatch(schema, pa.Table.from_pylist(list(rows), schema=ROWS), None, after, upto, **control)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def sink(path: Path) -> Iterator[SearchSink]:
    opened = SearchSink("find", path)
    assert opened.open(LOG) is None
    yield opened
    opened.close()


def cut(position: int, *tables: TableRecord) -> Published:
    return Published(position, position * 1000, {table.relation: table for table in tables})


def publish(sink: SearchSink, *batches: TableBatch) -> Published:
    records = [sink.apply(one) for one in batches]
    record = cut(max(one.upto for one in batches), *records)
    sink.publish(record)
    return record


def names(path: Path, topic: str = "shop.products") -> dict[str, str | None]:
    return {str(row.key[0]): row.source["name"] for row in SearchIndex.open(path).documents(topic)}


def found(path: Path, words: str) -> set[str | None]:
    return {row.source["name"] for row in SearchIndex.open(path).search("shop.products", words)}


def test_a_value_error_of_our_own_code_is_not_an_unavailable_index(sink: SearchSink, path: Path) -> None:
    """A text that is not UTF-8 can be applied; it fails when `publish` makes its document."""
    publish(sink, batch(0, 10, upsert(BLUE, 5)))
    broken = batch(10, 20, upsert(BLUE | {2: "green mug"}, 15), upsert(RED, 16))
    assert broken.rows is not None
    after = broken.rows["after"].chunk(0)
    texts = pa.StringArray.from_buffers(6, *pa.array([b"1", b"\xff mug", b"x", b"2", b"red mug", b""]).buffers()[1:])
    maps = pa.MapArray.from_arrays(after.offsets, after.keys, texts)
    record = sink.apply(replace(broken, rows=broken.rows.set_column(4, "after", maps)))
    with pytest.raises(UnicodeDecodeError):
        sink.publish(cut(20, record))

    publish(sink, batch(10, 20, upsert(RED, 16)))
    assert names(path) == {"1": "blue mug", "2": "red mug"}


def test_a_failing_disk_is_an_unavailable_index(sink: SearchSink, path: Path) -> None:
    publish(sink, batch(0, 10, upsert(BLUE, 5)))
    record = sink.apply(batch(10, 20, upsert(RED, 16)))
    path.rename(path.with_name("moved"))
    with pytest.raises(SinkUnavailable, match="cannot commit"):
        sink.publish(cut(20, record))


def test_published_rows_are_found_by_their_words(sink: SearchSink, path: Path) -> None:
    publish(sink, batch(0, 10, upsert(BLUE, 5), upsert(RED, 6)))
    assert found(path, "mug") == {"blue mug", "red mug"}
    assert found(path, "blue tea") == {"blue mug"}
    assert found(path, "description:tea") == {"blue mug"}
    assert found(path, "name:tea") == set()
    assert found(path, '"unfinished (') == set()


@pytest.mark.parametrize("text", ["2020-01-01T00:00:00Z", "9999-12-31T23:59:59-23:00"])
def test_a_text_that_reads_like_a_time_is_words_like_any_other(sink: SearchSink, path: Path, text: str) -> None:
    publish(sink, batch(0, 10, upsert({**BLUE, 2: text}, 5)))
    assert found(path, f"name:{text[:4]}") == found(path, text[:4]) == {text}


def test_a_row_keeps_every_column_and_null_stays_null(sink: SearchSink, path: Path) -> None:
    publish(sink, batch(0, 10, upsert(RED, 6)))
    (row,) = SearchIndex.open(path).documents("shop.products")
    assert (row.key, row.position) == (("2",), 6)
    assert row.source == {"id": "2", "name": "red mug", "description": None}


def test_only_the_configured_columns_are_stored_and_searched(path: Path) -> None:
    narrow = SearchSink("find", path, DocumentShapes(SearchSettings(fields=("description",))))
    narrow.open(LOG)
    publish(narrow, batch(0, 10, upsert(BLUE, 5)))
    narrow.close()
    (row,) = SearchIndex.open(path).search("shop.products", "tea")
    assert row.source == {"id": "1", "description": "holds tea"}
    assert SearchIndex.open(path).search("shop.products", "mug") == []


def test_nothing_is_seen_before_it_is_published(sink: SearchSink, path: Path) -> None:
    publish(sink, batch(0, 10, upsert(BLUE, 5)))
    sink.apply(batch(10, 20, upsert(RED, 15), delete("1", 16)))
    assert names(path) == {"1": "blue mug"}


def test_an_update_replaces_and_a_delete_removes(sink: SearchSink, path: Path) -> None:
    publish(sink, batch(0, 10, upsert(BLUE, 5), upsert(RED, 6)))
    publish(sink, batch(10, 20, upsert({**BLUE, 2: "navy cup"}, 11), delete("2", 12)))
    assert names(path) == {"1": "navy cup"}
    assert found(path, "mug") == set()


def test_rows_of_several_parts_are_replaced_and_removed(sink: SearchSink, path: Path) -> None:
    count = ROWS_AT_ONCE + 2
    for number, name in enumerate(("first", "second")):
        rows = [upsert({1: str(n), 2: f"{name} {n}", 3: None}, 10 * number + 5) for n in range(count)]
        publish(sink, batch(10 * number, 10 * number + 10, *rows))
        assert names(path) == {str(n): f"{name} {n}" for n in range(count)}
    publish(sink, batch(20, 30, *(delete(str(n), 25) for n in range(1, count))))
    assert names(path) == {"0": "second 0"}


def test_a_batch_that_comes_again_changes_nothing(sink: SearchSink, path: Path) -> None:
    publish(sink, batch(0, 10, upsert(BLUE, 5)))
    record = publish(sink, batch(10, 20, delete("1", 11)))
    assert sink.apply(batch(0, 10, upsert(BLUE, 5))) == record.tables[PRODUCTS.relation]
    sink.publish(record)
    assert names(path) == {}


def test_of_an_overlapping_batch_only_what_is_newer_is_written(sink: SearchSink, path: Path) -> None:
    publish(sink, batch(0, 10, upsert(BLUE, 5), upsert(RED, 6)))
    publish(sink, batch(0, 20, delete("1", 4), delete("2", 15), truncated=(3, 0)))
    assert names(path) == {"1": "blue mug"}


def test_a_truncate_removes_what_is_older_and_keeps_what_follows(sink: SearchSink, path: Path) -> None:
    publish(sink, batch(0, 10, upsert(BLUE, 5), upsert(RED, 6)))
    publish(sink, batch(10, 20, upsert(RED, 15), truncated=(12, 0)))
    assert names(path) == {"2": "red mug"}


def test_a_generation_end_removes_rows_older_than_its_beginning(sink: SearchSink, path: Path) -> None:
    publish(sink, batch(0, 10, upsert(BLUE, 5), upsert(RED, 6)))
    publish(sink, batch(10, 20, upsert({**RED, 2: "ruby"}, 15), generation=15))
    assert names(path) == {"2": "ruby"}


def test_control_rows_of_one_table_leave_others_alone(sink: SearchSink, path: Path) -> None:
    other = TableSchema.from_json(PRODUCTS.to_json().replace(b"16385", b"16999").replace(b"products", b"drinks"))
    publish(sink, batch(0, 10, upsert(BLUE, 5)), batch(0, 10, upsert(RED, 5), schema=other))
    publish(sink, batch(10, 20, truncated=(12, 0)), batch(10, 20, schema=other))
    assert (names(path), names(path, "shop.drinks")) == ({}, {"2": "red mug"})


def test_unsent_columns_come_from_the_stored_row(sink: SearchSink, path: Path) -> None:
    publish(sink, batch(0, 10, upsert(BLUE, 5)))
    publish(sink, batch(10, 20, upsert({1: "1", 2: "navy mug"}, 11, complete=False)))
    (row,) = SearchIndex.open(path).documents("shop.products")
    assert row.source == {"id": "1", "name": "navy mug", "description": "holds tea"}


def test_unsent_columns_of_a_moved_row_come_from_the_old_key(sink: SearchSink, path: Path) -> None:
    publish(sink, batch(0, 10, upsert(BLUE, 5)))
    moved = upsert({1: "9", 2: "blue mug"}, 11, complete=False, base=["1"])
    publish(sink, batch(10, 20, delete("1", 11), moved))
    (row,) = SearchIndex.open(path).documents("shop.products")
    assert (row.key, row.source["description"]) == (("9",), "holds tea")


def test_unsent_columns_of_an_unknown_row_are_a_missing_base_and_write_nothing(sink: SearchSink, path: Path) -> None:
    record = publish(sink, batch(0, 10, upsert(BLUE, 5)))
    with pytest.raises(MissingBase):
        sink.apply(batch(10, 20, delete("1", 11), upsert({1: "7"}, 12, complete=False)))
    sink.publish(Published(20, 0, record.tables))
    assert names(path) == {"1": "blue mug"}


def test_during_a_copy_an_image_without_base_makes_no_row_and_everything_else_counts(
    sink: SearchSink, path: Path
) -> None:
    publish(sink, batch(0, 10, upsert(BLUE, 5), schema=COPYING))
    moved = upsert({1: "8", 2: "from 2"}, 13, complete=False, base=["2"])
    waiting = [upsert({1: "7", 2: "later"}, 12, complete=False), delete("2", 13), moved]
    record = publish(sink, batch(10, 20, delete("1", 11), *waiting, upsert({**RED, 1: "3"}, 14), schema=COPYING))
    assert names(path) == {"3": "red mug"}
    assert record.tables[PRODUCTS.relation].state == TargetState.SNAPSHOTTING


def test_a_table_is_snapshotting_until_the_generation_end_of_its_copy(sink: SearchSink) -> None:
    batches = [
        batch(0, 10, upsert(BLUE, 5), schema=COPYING),
        batch(10, 20, schema=PRODUCTS),
        batch(20, 30, generation=5),
        batch(30, 40, upsert(RED, 35)),
        batch(40, 50, schema=COPYING),
    ]
    states = [publish(sink, one).tables[PRODUCTS.relation].state for one in batches]
    assert states == ["snapshotting", "snapshotting", "streaming", "streaming", "snapshotting"]


def test_a_table_without_a_key_is_refused(sink: SearchSink) -> None:
    with pytest.raises(SchemaNotApplicable, match="no key"):
        sink.apply(batch(0, 10, upsert(BLUE, 5, key=None)))


def test_renamed_columns_and_tables_need_no_rewriting(sink: SearchSink, path: Path) -> None:
    publish(sink, batch(0, 10, upsert(BLUE, 5)))
    renamed = TableSchema.from_json(
        PRODUCTS.to_json().replace(b"description", b"about").replace(b'"products"', b'"goods"')
    )
    publish(sink, batch(10, 20, schema=renamed))
    (row,) = SearchIndex.open(path).documents("shop.goods")
    assert row.source["about"] == "holds tea"
    assert names(path) == {}


def test_a_column_added_later_has_its_default_in_older_rows(sink: SearchSink, path: Path) -> None:
    publish(sink, batch(0, 10, upsert(BLUE, 5)))
    stock = Column(id=4, name="stock", type_oid=23, type_name="integer", missing="0")
    wider = TableSchema.from_json(PRODUCTS.to_json())
    publish(sink, batch(10, 20, schema=wider.__class__(**{**_fields(wider), "columns": (*wider.columns, stock)})))
    (row,) = SearchIndex.open(path).documents("shop.products")
    assert row.source["stock"] == "0"


def _fields(schema: TableSchema) -> dict[str, Any]:
    names = ("relation", "oid", "schema", "name", "replica_identity", "columns", "state", "reason")
    return {name: getattr(schema, name) for name in names}


def test_the_record_survives_closing(sink: SearchSink, path: Path) -> None:
    record = publish(sink, batch(0, 10, upsert(BLUE, 5)))
    sink.close()
    again = SearchSink("find", path)
    assert again.open(LOG) == record
    again.close()


def test_a_second_driver_is_refused_while_the_first_lives(sink: SearchSink, path: Path) -> None:
    with pytest.raises(SinkUnavailable, match="another process"):
        SearchSink("find", path).open(LOG)
    sink.close()
    second = SearchSink("find", path)
    second.open(LOG)
    second.close()


def test_a_record_that_another_driver_wrote_is_never_overwritten(sink: SearchSink, path: Path) -> None:
    record = sink.apply(batch(0, 10, upsert(BLUE, 5)))
    writer = sink._open_writer()
    replace_reserved(writer, PUBLISHED_ID, cut(99).to_json())
    writer.commit()
    with pytest.raises(SinkFenced):
        sink.publish(cut(10, record))
    assert names(path) == {}


def test_an_index_of_another_log_is_refused_and_left_free(sink: SearchSink, path: Path) -> None:
    sink.close()
    other = SearchSink("find", path)
    with pytest.raises(SinkOfAnotherLog):
        other.open("another log")
    assert sink.open(LOG) is None


def test_a_kept_cut_stays_as_it_was_until_it_is_released(sink: SearchSink, path: Path) -> None:
    record = publish(sink, batch(0, 10, upsert(BLUE, 5)))
    handle = sink.pin(record)
    for step in range(11, 23):
        publish(sink, batch(step - 1, step, upsert({**RED, 1: str(step)}, step), delete("1", step)))
    assert names(Path(handle)) == {"1": "blue mug"}
    assert SearchIndex.open(handle).published == record
    assert len(names(path)) == 12
    sink.release(handle)
    sink.release(handle)
    assert not Path(handle).exists()


def change(path: str) -> None:
    """Replace the one row of an index by another, as a driver does."""
    sink = SearchSink("find", path)
    sink.open(LOG)
    publish(sink, batch(10, 20, delete("1", 11), upsert(RED, 12)))


@pytest.mark.parametrize(
    ("failpoint", "expected"),
    [("search_before_commit", {"1": "blue mug"}), ("search_after_commit", {"2": "red mug"})],
)
def test_a_driver_killed_around_its_commit_leaves_one_of_the_two_cuts(
    sink: SearchSink, path: Path, failpoint: str, expected: dict[str, str]
) -> None:
    publish(sink, batch(0, 10, upsert(BLUE, 5)))
    sink.close()
    died = forked.run(__name__, path, environment={VARIABLE: failpoint})
    assert died.status == -signal.SIGKILL, died.errors
    assert names(path) == expected
    sink.open(LOG)
    publish(sink, batch(10, 20, delete("1", 11), upsert(RED, 12)))
    assert names(path) == {"2": "red mug"}


if __name__ == "__main__":
    change(sys.argv[1])
