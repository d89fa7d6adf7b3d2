"""Every kind of sink as the tests of its contract use it: opens drivers, and reads what they wrote as plain rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from cdc.config import SearchRule, SearchSinkDefinition, SinkRule
from cdc.targets.lake_reader import read_target
from cdc.targets.search_index_reader import SearchIndex
from cdc.targets.search_server.reader import SearchServerReader
from pipelines.folding.folded_parts import PIECES, FoldedParts, FoldedTable, pieces_of
from pipelines.runtime.spark_session import has_delta
from pipelines.sinks.contract import Published, Sink, TableBatch, TableRecord
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.staged_targets import StagedDelta
from pipelines.sinks.search.document_shape import DocumentShapes
from pipelines.sinks.search.sink import SearchSink
from pipelines.sinks.search.staged_index import StagedSearch
from pipelines.sinks.search_server.sink import SearchServerSink
from pipelines.sinks.search_server.staged_indexes import StagedSearchServer
from tests.fixtures.search_sinks import search_sink
from tests.fixtures.skips import NO_PROMISE

LOG = "log-1"
TAKES_PARTS: Final = "takes rows on executors"
PARTS: Final = 2
"""Number of parts into which the rows of a batch on the executors are divided."""
NOT_IN_AN_INDEX: Final = {
    "merged before it is published": "an index has nothing of a batch before it is published",
    "typed columns": "an index stores every value as text, under any name",
    "one target per table": "an index finds documents by relation, so two relations of one name are apart",
    "several drivers may open it": "an index refuses a second driver at `open`, by a lock of the operating system",
    "records the end of a copy": "an index records no end of a copy; the state comes from the table",
    TAKES_PARTS: "the only writer of an index is in the driver",
}
NOT_BY_THIS_WRITER: Final = {TAKES_PARTS: "a definition that names the writer has every batch written by it"}


@dataclass
class Store:
    """One kind of sink at one path: opens drivers and reads what they wrote."""

    make: Callable[[], Sink]
    rows: Callable[[TableRecord], dict[str, dict[str, Any]]]
    stage: Callable[[], StagedDelta | StagedSearch | StagedSearchServer]
    missing: Mapping[str, str] = field(default_factory=dict)
    """Promise → why the sink does not make it."""
    publishes: int = 110
    """Enough for a clean-up of the published record."""

    def opened(self, log_id: str = LOG) -> Sink:
        sink = self.make()
        sink.open(log_id)
        return sink

    def require(self, promise: str) -> None:
        if promise in self.missing:
            pytest.skip(f"{NO_PROMISE}: {self.missing[promise]}")


def delta_rows(record: TableRecord) -> dict[str, dict[str, Any]]:
    rows = read_target(record.target, record.version).read_all().to_pylist()
    plain = [
        {name: None if value is None else str(value) for name, value in row.items() if not name.startswith("_")}
        for row in rows
    ]
    return {row["id"]: {**row} for row in plain if row["id"]}


def index_rows(record: TableRecord) -> dict[str, dict[str, Any]]:
    return {
        row.key[0]: dict(row.source) for row in SearchIndex.open(record.target).documents(record.topic) if row.key[0]
    }


NOT_IN_A_SEARCH_SERVER: Final = {
    "merged before it is published": "an index does not record the end of a batch before it is published",
    "typed columns": "a document stores every value, also one that its field does not take",
    "one target per table": "every relation has an index of its own",
    "records the end of a copy": "an index records no end of a copy; the state comes from the table",
}


def server_rows(sink: SearchSinkDefinition) -> Callable[[TableRecord], dict[str, dict[str, Any]]]:
    def rows(record: TableRecord) -> dict[str, dict[str, Any]]:
        found = SearchServerReader.open(sink).documents(record.topic)
        return {row.key[0]: dict(row.source) for row in found if row.key[0]}

    return rows


KINDS: Final = ("indexed", "copy-on-write", pytest.param("spark", marks=pytest.mark.slow), "search", "opensearch")
"""Parameters of a fixture that gives each kind of sink; the writers are those of a Delta sink."""
EXECUTORS: Final = "spark executors"
"""Parameter for a Delta sink that gets the rows of each batch on Spark's executors."""
EXECUTORS_TO_SERVER: Final = "opensearch, by spark executors"
"""The same for a sink on a search server."""
BOTH_WAYS: Final = pytest.mark.parametrize("store", [*KINDS, EXECUTORS, EXECUTORS_TO_SERVER], indirect=True)
"""Have a test use every kind of sink, and executors as well: what it shows is another code where the rows are there."""


class SinkOnExecutors(DeltaSink):
    """A Delta sink whose batches have their rows where the fold of a large range leaves them."""

    def __init__(self, settings: DeltaSettings, spark: SparkSession) -> None:
        super().__init__(settings, spark)
        self._spark = spark

    def apply(self, batch: TableBatch) -> TableRecord:
        assert self.takes_parts(batch.schema)
        if batch.rows is None:
            return super().apply(batch)
        return super().apply(replace(batch, rows=None, parts=folded_parts(self._spark, batch.rows)))


class ServerSinkOnExecutors(SearchServerSink):
    """A sink on a search server whose batches have their rows there."""

    def __init__(self, sink: SearchSinkDefinition, spark: SparkSession) -> None:
        super().__init__(sink)
        self._spark = spark

    def apply(self, batch: TableBatch) -> TableRecord:
        if batch.rows is None or not batch.rows.num_rows:
            return super().apply(batch)
        return super().apply(replace(batch, rows=None, parts=folded_parts(self._spark, batch.rows)))


def folded_parts(spark: SparkSession, folded: pa.Table) -> FoldedParts:
    """Folded rows of one table on the executors, in PARTS parts; no two of the rows have the same key."""
    divided = [folded.take(pa.array(range(part, folded.num_rows, PARTS), pa.int64())) for part in range(PARTS)]
    pieces = [piece for part, rows in enumerate(divided) for piece in pieces_of(part, rows)]
    frame = pa.Table.from_batches(pieces).combine_chunks()
    sums = {name: pc.sum(frame[name]).as_py() for name in ("rows", "keys", "size", "incomplete", "keyless")}
    (relation,) = set(frame["relation"].to_pylist())
    table = FoldedTable(relation=relation, committed_at=0, **sums)
    return FoldedParts(spark.createDataFrame(frame, PIECES), table, PARTS)


def store_under(
    request: pytest.FixtureRequest, spark: SparkSession | None, rule: Mapping[str, Any] | None = None
) -> Store:
    """The store that a fixture with the parameters KINDS has, under a rule for every table.

    spark: for the parameters that name Spark; the fixture asks for it, so that its tests go to the worker that has it.
    """
    folder, matched = request.getfixturevalue("tmp_path"), {"match": "*.*", **(rule or {})}
    if request.param in {"opensearch", EXECUTORS_TO_SERVER}:
        sink = search_sink(request.getfixturevalue("opensearch"), {"rules": [matched]})
        return Store(
            lambda: SearchServerSink(sink) if spark is None else ServerSinkOnExecutors(sink, spark),
            server_rows(sink),
            lambda: StagedSearchServer(sink),
            NOT_IN_A_SEARCH_SERVER,
            publishes=10,
        )
    if request.param == "search":
        shapes = DocumentShapes(rules=(SearchRule.model_validate(matched),))
        return Store(
            lambda: SearchSink("find", folder / "find", shapes),
            index_rows,
            lambda: StagedSearch("find", folder / "find", shapes),
            NOT_IN_AN_INDEX,
            publishes=10,
        )
    rules = (SinkRule.model_validate(matched),)
    path = f"{folder}/lake/{{schema}}/{{table}}"
    if spark is not None and request.param == EXECUTORS:
        if not has_delta(spark):
            pytest.skip("no Delta jars on this machine")
        automatic = DeltaSettings("lake", path, Writer.AUTO, rules=rules)
        return Store(lambda: SinkOnExecutors(automatic, spark), delta_rows, lambda: StagedDelta(automatic))
    settings = DeltaSettings("lake", path, Writer(request.param), rules=rules)
    missing = NOT_BY_THIS_WRITER if spark is None else {}
    return Store(lambda: DeltaSink(settings, spark), delta_rows, lambda: StagedDelta(settings), missing)


def publish(sink: Sink, *records: TableRecord, position: int | None = None) -> Published:
    position = max(record.position for record in records) if position is None else position
    published = Published(position, 0, {record.relation: record for record in records})
    sink.publish(published)
    return published


def merge(sink: Sink, whole: TableBatch) -> TableRecord:
    """One round: apply and publish."""
    record = sink.apply(whole)
    publish(sink, record)
    return record


def items(store: Store, record: TableRecord) -> dict[str, str]:
    return {key: row["item"] for key, row in store.rows(record).items()}
