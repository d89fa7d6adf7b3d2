"""Executor writer: tasks write what the driver would write, and the driver gets only the first error of each task."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from cdc.config import SearchSinkDefinition
from cdc.config.search_server import SearchServer
from cdc.errors import DocumentRefused, IndexMissing, MissingBase, TooManyMovedRows
from cdc.position import Position
from cdc.table import TableState
from cdc.targets.search_server.index_mapping import document_columns
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.folding.folded_parts import PIECES, FoldedParts, FoldedTable, Piece, pieces_of
from pipelines.sinks.contract import Published, TableBatch, TableRecord
from pipelines.sinks.search.document_shape import DocumentShapes
from pipelines.sinks.search_server.document_lines import TableIndex
from pipelines.sinks.search_server.executor_writer import ExecutorWriter
from pipelines.sinks.search_server.sink import SearchServerSink
from tests.contracts.folded import ORDERS, batch, folded, gone, part, put
from tests.fixtures.opensearch import SharedOpenSearch
from tests.fixtures.search_sinks import search_sink
from tests.fixtures.waiting import until

OnExecutors = Callable[[SparkSession, TableBatch], TableBatch]
PARTS = 3
COPYING = replace(ORDERS, state=TableState.SNAPSHOTTING)
SHAPE = DocumentShapes().of(ORDERS)
TABLE = TableIndex("shop.orders.r16384.1", SHAPE, document_columns(SHAPE.columns, {}), 0)
ROUNDS = [
    batch([put(1, "a", 10), put(2, 'b"\n', 11), put(3, None, 12), put(4, "d", 13)], 0, 20),
    batch([gone(1, 30), part(2, 31, {3: None}), part(7, 32, {3: "5.00"}, base=("1",)), put(8, "x", 33)], 20, 40),
    batch([part(4, 45, {3: "7.00"}, base=("3",)), part(3, 46, {3: "8.00"}, base=("4",))], 40, 50),
    batch([put(7, "y", 50, ordinal=2), put(9, "z", 51)], 50, 60, truncated=(50, 1)),
    batch([part(7, 70, {3: "6.00"}), part(8, 71, {3: None}), gone(9, 72)], 60, 80, COPYING),
]


def as_frame(spark: SparkSession, whole: TableBatch) -> TableBatch:
    assert whole.rows is not None
    return replace(whole, rows=None, frame=frame_of(spark, whole.rows))


def frame_of(spark: SparkSession, rows: pa.Table) -> DataFrame:
    return spark.createDataFrame(rows.drop_columns(["payload"])).repartition(3, "key")


def as_parts(spark: SparkSession, whole: TableBatch) -> TableBatch:
    """The batch with its rows on the executors: three parts, of which each has its rows in pieces of two."""
    assert whole.rows is not None
    return replace(whole, rows=None, parts=parts_of(spark, whole.rows))


def parts_of(spark: SparkSession, rows: pa.Table) -> FoldedParts:
    batches: list[pa.RecordBatch] = []
    for number in range(PARTS):
        own = rows.filter(pa.array([sum(map(ord, key)) % PARTS == number for (key,) in rows["key"].to_pylist()]))
        batches += [piece for start in range(0, own.num_rows, 2) for piece in pieces_of(number, own.slice(start, 2))]
    pieces = pa.Table.from_batches(batches)
    sizes = {name: sum(pieces[name].to_pylist()) for name in ("rows", "keys", "size", "incomplete", "keyless")}
    frame = spark.createDataFrame(pieces).repartitionById(PARTS, "part")
    return FoldedParts(frame, FoldedTable(ORDERS.relation, committed_at=0, **sizes), PARTS)


def many_rows(numbers: Iterable[int]) -> pa.Table:
    return folded([put(number, "x" * 40, 100 + number) for number in numbers])


def many_as_frame(spark: SparkSession, many: int) -> TableBatch:
    schema = spark.createDataFrame(many_rows([1]).drop_columns(["payload"])).schema

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for numbers in batches:
            yield from many_rows(numbers["id"].to_pylist()).drop_columns(["payload"]).to_batches()

    frame = spark.range(0, many, 1, 4).mapInArrow(rows, schema)
    return replace(ROUNDS[0], rows=None, frame=frame, upto=many + 100)


def many_as_parts(spark: SparkSession, many: int) -> TableBatch:
    def pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for numbers in batches:
            yield from pieces_of(numbers["id"][0].as_py() % PARTS, many_rows(numbers["id"].to_pylist()))

    table = FoldedTable(ORDERS.relation, many, many, size=0, incomplete=0, keyless=0, committed_at=0)
    parts = FoldedParts(spark.range(0, many, 1, 4).mapInArrow(pieces, PIECES), table, PARTS)
    return replace(ROUNDS[0], rows=None, parts=parts, upto=many + 100)


def opened(sink: SearchSinkDefinition) -> SearchServerSink:
    writer = SearchServerSink(sink)
    writer.open("log")
    return writer


def applied(sink: SearchServerSink, rounds: Sequence[TableBatch]) -> TableRecord:
    for whole in rounds:
        record = sink.apply(whole)
        sink.publish(Published(whole.upto, 0, {record.relation: record}))
    return record


def documents(server: SharedOpenSearch, record: TableRecord) -> dict[str, dict[str, Any]]:
    """Return id → source of every document, deleted rows included."""
    httpx.post(f"{server.url}/{record.target}/_refresh").raise_for_status()
    answer = httpx.post(
        f"{server.url}/{record.target}/_search", json={"size": 1_000, "version": True}
    ).raise_for_status()
    return {hit["_id"]: {**hit["_source"], "version": hit["_version"]} for hit in answer.json()["hits"]["hits"]}


def has_documents(index: str) -> bool:
    httpx.post(f"{index}/_refresh").raise_for_status()
    return bool(httpx.get(f"{index}/_count").json()["count"])


def renamed(server: SharedOpenSearch, name: str) -> SharedOpenSearch:
    return replace(server, prefix=f"{server.prefix}{name}-")


@pytest.mark.parametrize("on_executors", [as_frame, as_parts])
def test_tasks_write_the_documents_that_the_driver_writes(
    spark: SparkSession, opensearch: SharedOpenSearch, on_executors: OnExecutors
) -> None:
    by_driver = applied(opened(search_sink(renamed(opensearch, "a"))), ROUNDS)
    by_tasks = applied(opened(search_sink(renamed(opensearch, "b"))), [on_executors(spark, whole) for whole in ROUNDS])

    assert documents(opensearch, by_tasks) == documents(opensearch, by_driver)
    assert documents(opensearch, by_tasks)["4"]["price"] == 7.00
    assert by_tasks.position == by_driver.position


def test_a_late_attempt_of_a_task_changes_nothing(opensearch: SharedOpenSearch) -> None:
    sink = search_sink(opensearch)
    record = applied(opened(sink), [*ROUNDS[:1], batch([put(1, "later", 60), gone(2, 61)], 50, 70)])
    before = documents(opensearch, record)

    assert ROUNDS[0].rows is not None
    assert list(task_of(sink, record).write_partition(iter([ROUNDS[0].rows]))) == []

    assert documents(opensearch, record) == before


@dataclass(frozen=True)
class MortalParts(FoldedParts):
    """Parts of which one task dies after it has sent its first piece, once."""

    death: Path = Path()
    """A file that exists from then on."""
    index: str = ""

    def map_parts(self, convert: Callable[[Iterator[Piece]], Iterator[pa.RecordBatch]], columns: Any) -> DataFrame:
        die = partial(die_once, death=self.death, index=self.index)
        return FoldedParts.map_parts(self, lambda pieces: convert(die(pieces)), columns)


def die_once(pieces: Iterator[Piece], death: Path, index: str) -> Iterator[Piece]:
    for number, piece in enumerate(pieces):
        if number and not death.exists():
            until(lambda: has_documents(index), "a request was sent")
            death.touch()
            os._exit(1)
        yield piece


def test_a_batch_whose_task_died_between_two_requests_is_written_by_the_next_attempt(
    spark: SparkSession, opensearch: SharedOpenSearch, tmp_path: Path
) -> None:
    sink = opened(search_sink(opensearch, bulk_size=1))
    whole = batch([put(number, f"row {number}", 10 + number) for number in range(1, 13)], 0, 30)
    assert whole.rows is not None
    index = f"{opensearch.url}/{opensearch.prefix}shop.orders.r{ORDERS.relation}.1"
    parts = parts_of(spark, whole.rows)
    mortal = MortalParts(parts.pieces, parts.table, PARTS, death=tmp_path / "dead", index=index)
    dying = replace(whole, rows=None, parts=mortal)
    with pytest.raises((PySparkException, Py4JJavaError)):
        sink.apply(dying)
    assert mortal.death.exists()
    record = applied(sink, [dying])

    expected = applied(opened(search_sink(renamed(opensearch, "a"))), [whole])
    assert documents(opensearch, record) == documents(opensearch, expected)


@pytest.mark.parametrize("on_executors", [many_as_frame, many_as_parts])
def test_no_row_of_the_batch_is_sent_to_the_driver(
    spark: SparkSession, opensearch: SharedOpenSearch, on_executors: Callable[[SparkSession, int], TableBatch]
) -> None:
    many = 3_000
    whole = on_executors(spark, many)
    frame = whole.frame if whole.parts is None else whole.parts.pieces
    assert frame is not None
    sink = opened(search_sink(opensearch))
    conf = spark.sparkContext._jsc.sc().conf()
    conf.set("spark.driver.maxResultSize", "100k")
    try:
        with pytest.raises(Py4JJavaError, match="maxResultSize"):
            frame.toArrow()
        assert sink.find_refused_in_parts(whole, 10).rows.num_rows == 0
        record = sink.apply(whole)
    finally:
        conf.remove("spark.driver.maxResultSize")

    httpx.post(f"{opensearch.url}/{record.target}/_refresh").raise_for_status()
    assert httpx.get(f"{opensearch.url}/{record.target}/_count").json()["count"] == many


def test_not_many_more_refused_rows_than_the_caller_wants_come_to_the_driver(
    spark: SparkSession, opensearch: SharedOpenSearch
) -> None:
    sink = opened(search_sink(opensearch, field_types={"item": "date"}))
    rows = [put(number, "no date", 10 + number) for number in range(20)] + [put(90, "2026-01-01", 50)]
    whole = as_parts(spark, batch(rows, 0, 60))

    first, every = (sink.find_refused_in_parts(whole, limit) for limit in (5, 20))
    assert (first.rows.num_rows, first.is_complete, every.is_complete) == (6, False, True)
    refused = every.rows
    assert sorted(key for (key,) in refused["key"].to_pylist()) == sorted(map(str, range(20)))
    assert refused.schema == FOLDED_ARROW


def test_a_row_on_the_driver_is_completed_from_the_document_that_executors_replace(
    spark: SparkSession, opensearch: SharedOpenSearch
) -> None:
    """A row of a parked key is on the driver, where the quarantine tries it after executors have written the others."""
    sink = opened(search_sink(opensearch))
    applied(sink, [batch([put(1, "of the moved row", 10)], 0, 20)])
    moved = folded([part(2, 31, {3: "2.00"}, base=("1",))])
    whole = replace(as_parts(spark, batch([put(1, "another row", 32)], 20, 40)), rows=moved)

    assert sink.find_refused_in_parts(whole, 10).rows.num_rows == 0
    assert sink.find_refused(whole, 10) == []
    record = applied(sink, [whole])

    assert {i: source["item"] for i, source in documents(opensearch, record).items()} == {
        "1": "another row",
        "2": "of the moved row",
    }


def test_more_moved_rows_than_the_driver_completes_stop_the_table_before_anything_is_written(
    spark: SparkSession, opensearch: SharedOpenSearch
) -> None:
    sink = opened(search_sink(opensearch))
    applied(sink, [batch([put(1, "a", 10), put(2, "b", 11)], 0, 20)])
    sink.max_moved = 1
    rows = [part(3, 31, {3: "2.00"}, base=("1",)), part(4, 32, {3: "2.00"}, base=("2",)), put(5, "e", 33)]

    with pytest.raises(TooManyMovedRows, match=r"2 rows of table 'shop.orders'"):
        sink.apply(as_parts(spark, batch(rows, 20, 40)))

    record = applied(sink, [batch([put(6, "f", 34)], 20, 40)])
    assert documents(opensearch, record).keys() == {"1", "2", "6"}


def test_the_first_refused_document_is_reported_with_its_code(
    spark: SparkSession, opensearch: SharedOpenSearch
) -> None:
    sink = opened(search_sink(opensearch, field_types={"item": "date"}))
    rows = [put(1, "2026-01-01", 10), put(2, "late", 13), put(3, "early", 12), put(4, None, 11)]

    with pytest.raises(DocumentRefused) as refused:
        sink.apply(as_parts(spark, batch(rows, 0, 20)))

    assert refused.value.code == "CDC-3038"
    assert "early" not in refused.value.message


def test_a_partial_image_without_a_base_row_is_reported_with_its_position(
    spark: SparkSession, opensearch: SharedOpenSearch
) -> None:
    sink = opened(search_sink(opensearch))

    with pytest.raises(MissingBase, match=str(Position(11))):
        sink.apply(as_parts(spark, batch([part(1, 12, {2: "x"}), part(2, 11, {2: "x"}), put(3, "y", 10)], 0, 20)))
    with pytest.raises(MissingBase, match=str(Position(14))):
        sink.apply(as_parts(spark, batch([part(1, 14, {2: "x"}, base=("9",))], 0, 20)))


def test_an_error_of_the_whole_index_is_raised_with_its_class(
    spark: SparkSession, opensearch: SharedOpenSearch
) -> None:
    sink = opened(search_sink(opensearch))
    record = applied(sink, ROUNDS[:1])
    httpx.delete(f"{opensearch.url}/{record.target}").raise_for_status()

    with pytest.raises(IndexMissing):
        sink.apply(as_parts(spark, batch([put(1, "b", 30)], 20, 40)))


def test_tasks_share_the_requests_of_the_definition(opensearch: SharedOpenSearch) -> None:
    task = ExecutorWriter(search_sink(opensearch).access, "opensearch", "find", TABLE, -1, is_copying=False)

    assert [task.with_share_of_requests(tasks).access.bulk_requests for tasks in (1, 2, 3, 100)] == [4, 2, 1, 1]


def test_executors_get_the_password_and_nothing_prints_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_PASSWORD", "hunter2")
    keys = {"url": "https://search.example.com", "user": "cdc", "password": {"env": "SEARCH_PASSWORD"}}
    access = SearchServer.model_validate(keys)

    received = pickle.loads(pickle.dumps(ExecutorWriter(access, "opensearch", "find", TABLE, -1, is_copying=False)))

    assert received.access.password.current() == "hunter2"
    assert "hunter2" not in repr(received)


def task_of(sink: SearchSinkDefinition, record: TableRecord) -> ExecutorWriter:
    return ExecutorWriter(sink.access, sink.engine, sink.name, replace(TABLE, index=record.target), -1, False)
