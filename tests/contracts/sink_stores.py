"""Every kind of sink as the tests of its contract use it: opens drivers, and reads what they wrote as plain rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from cdc.config import SearchRule, SearchSinkDefinition, SinkRule
from cdc.stores.lake_reader import read_target
from cdc.stores.search_index_reader import SearchIndex
from cdc.stores.search_server.reader import SearchServerReader
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
NOT_IN_AN_INDEX: Final = {
    "merged before it is published": "an index has nothing of a batch before it is published",
    "typed columns": "an index stores every value as text, under any name",
    "one target per table": "an index finds documents by relation, so two relations of one name are apart",
    "several drivers may open it": "an index refuses a second driver at `open`, by a lock of the operating system",
    "records the end of a copy": "an index records no end of a copy; the state comes from the table",
}


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


KINDS: Final = ("indexed", "delta-rs", pytest.param("spark", marks=pytest.mark.slow), "search", "opensearch")
"""Parameters of a fixture that gives each kind of sink; the writers are those of a Delta sink."""


def store_under(request: pytest.FixtureRequest, rule: Mapping[str, Any] | None = None) -> Store:
    """The store that a fixture with the parameters KINDS has, under a rule for every table."""
    folder, matched = request.getfixturevalue("tmp_path"), {"match": "*.*", **(rule or {})}
    if request.param == "opensearch":
        sink = search_sink(request.getfixturevalue("opensearch"), {"rules": [matched]})
        return Store(
            lambda: SearchServerSink(sink),
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
    spark = request.getfixturevalue("spark") if request.param == "spark" else None
    rules = (SinkRule.model_validate(matched),)
    settings = DeltaSettings("lake", f"{folder}/lake/{{schema}}/{{table}}", Writer(request.param), rules=rules)
    return Store(lambda: DeltaSink(settings, spark), delta_rows, lambda: StagedDelta(settings))


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
