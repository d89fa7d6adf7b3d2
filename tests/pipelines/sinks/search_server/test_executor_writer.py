"""Executor writer: tasks write what the driver would write, and the driver gets only the first error of each task."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from cdc.errors import DocumentRefused, IndexMissing, MissingBase
from cdc.position import Position
from cdc.stores.search_server.index_mapping import document_columns
from cdc.table import TableState
from pipelines.sinks.contract import Published, TableBatch, TableRecord
from pipelines.sinks.search.document_shape import DocumentShapes
from pipelines.sinks.search_server.document_lines import TableIndex
from pipelines.sinks.search_server.executor_writer import ExecutorWriter
from pipelines.sinks.search_server.sink import SearchServerSink
from tests.contracts.folded import ORDERS, batch, folded, gone, part, put
from tests.fixtures.opensearch import SharedOpenSearch
from tests.fixtures.search_sinks import search_sink

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


def renamed(server: SharedOpenSearch, name: str) -> SharedOpenSearch:
    return replace(server, prefix=f"{server.prefix}{name}-")


def test_tasks_write_the_documents_that_the_driver_writes(spark: SparkSession, opensearch: SharedOpenSearch) -> None:
    by_driver = applied(opened(search_sink(renamed(opensearch, "a"))), ROUNDS)
    by_tasks = applied(opened(search_sink(renamed(opensearch, "b"))), [as_frame(spark, whole) for whole in ROUNDS])

    assert documents(opensearch, by_tasks) == documents(opensearch, by_driver)
    assert documents(opensearch, by_tasks)["4"]["price"] == 7.00
    assert by_tasks.position == by_driver.position


def test_a_late_attempt_of_a_task_changes_nothing(opensearch: SharedOpenSearch) -> None:
    sink = search_sink(opensearch)
    record = applied(opened(sink), [*ROUNDS[:1], batch([put(1, "later", 60), gone(2, 61)], 50, 70)])
    before = documents(opensearch, record)

    assert ROUNDS[0].rows is not None
    assert list(task_of(sink, record)(iter(ROUNDS[0].rows.to_batches()))) == []

    assert documents(opensearch, record) == before


def test_a_batch_whose_task_died_is_written_by_the_next_attempt(
    spark: SparkSession, opensearch: SharedOpenSearch, tmp_path: Path
) -> None:
    def die_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in batches:
            if ["2"] in rows["key"].to_pylist():
                attempt = len(list(tmp_path.iterdir()))
                (tmp_path / str(attempt)).touch()
                if attempt == 1:  # the first one looks for moved rows, and writes nothing
                    os._exit(1)
            yield rows

    sink = opened(search_sink(opensearch))
    whole = as_frame(spark, ROUNDS[0])
    assert whole.frame is not None
    dying = replace(whole, frame=whole.frame.mapInArrow(die_once, whole.frame.schema))
    with pytest.raises((PySparkException, Py4JJavaError)):
        sink.apply(dying)
    record = applied(sink, [dying])

    expected = applied(opened(search_sink(renamed(opensearch, "a"))), ROUNDS[:1])
    assert len(list(tmp_path.iterdir())) == 4
    assert documents(opensearch, record) == documents(opensearch, expected)


def test_no_row_of_the_batch_is_sent_to_the_driver(spark: SparkSession, opensearch: SharedOpenSearch) -> None:
    many = 5_000
    schema = spark.createDataFrame(folded([put(1, "x", 1)]).drop_columns(["payload"])).schema

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for numbers in batches:
            made = folded([put(number, "x" * 40, 100 + number) for number in numbers["id"].to_pylist()])
            yield from made.drop_columns(["payload"]).to_batches()

    frame = spark.range(0, many, 1, 4).mapInArrow(rows, schema)
    conf = spark.sparkContext._jsc.sc().conf()
    conf.set("spark.driver.maxResultSize", "100k")
    try:
        with pytest.raises(Py4JJavaError, match="maxResultSize"):
            frame.toArrow()
        record = opened(search_sink(opensearch)).apply(replace(ROUNDS[0], rows=None, frame=frame, upto=many + 100))
    finally:
        conf.remove("spark.driver.maxResultSize")

    httpx.post(f"{opensearch.url}/{record.target}/_refresh").raise_for_status()
    assert httpx.get(f"{opensearch.url}/{record.target}/_count").json()["count"] == many


def test_the_first_refused_document_is_reported_with_its_code(
    spark: SparkSession, opensearch: SharedOpenSearch
) -> None:
    sink = opened(search_sink(opensearch, field_types={"item": "date"}))
    rows = [put(1, "2026-01-01", 10), put(2, "late", 13), put(3, "early", 12), put(4, None, 11)]

    with pytest.raises(DocumentRefused) as refused:
        sink.apply(as_frame(spark, batch(rows, 0, 20)))

    assert refused.value.code == "CDC-3038"
    assert "early" not in refused.value.message


def test_a_partial_image_without_a_base_row_is_reported_with_its_position(
    spark: SparkSession, opensearch: SharedOpenSearch
) -> None:
    sink = opened(search_sink(opensearch))

    with pytest.raises(MissingBase, match=str(Position(11))):
        sink.apply(as_frame(spark, batch([part(1, 12, {2: "x"}), part(2, 11, {2: "x"}), put(3, "y", 10)], 0, 20)))
    with pytest.raises(MissingBase, match=str(Position(14))):
        sink.apply(as_frame(spark, batch([part(1, 14, {2: "x"}, base=("9",))], 0, 20)))


def test_an_error_of_the_whole_index_is_raised_with_its_class(
    spark: SparkSession, opensearch: SharedOpenSearch
) -> None:
    sink = opened(search_sink(opensearch))
    record = applied(sink, ROUNDS[:1])
    httpx.delete(f"{opensearch.url}/{record.target}").raise_for_status()

    with pytest.raises(IndexMissing):
        sink.apply(as_frame(spark, batch([put(1, "b", 30)], 20, 40)))


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
