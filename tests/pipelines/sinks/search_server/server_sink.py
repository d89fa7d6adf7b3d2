"""A sink on the test node, what it wrote, and what searches see of it."""

from __future__ import annotations

from typing import Any

import httpx

from cdc.config import SearchSinkDefinition
from cdc.targets.search_server.reader import SearchServerReader
from pipelines.sinks.contract import Published, TableBatch, TableRecord
from pipelines.sinks.search_server.sink import SearchServerSink
from tests.contracts.folded import ORDERS

LOG = "log-1"


def opened(definition: SearchSinkDefinition, log_id: str = LOG) -> SearchServerSink:
    """Return an open sink."""
    sink = SearchServerSink(definition)
    sink.open(log_id)
    return sink


def publish(sink: SearchServerSink, *records: TableRecord) -> Published:
    """Publish the records of tables at their latest position."""
    published = Published(max(record.position for record in records), 0, {r.relation: r for r in records})
    sink.publish(published)
    return published


def merge(sink: SearchServerSink, *batches: TableBatch) -> TableRecord:
    """Apply batches one after the other, publishing each; return the last record."""
    for one in batches:
        record = sink.apply(one)
        publish(sink, record)
    return record


def rows(definition: SearchSinkDefinition, topic: str = ORDERS.topic) -> dict[str, dict[str, str | None]]:
    """Return key → row, as verification reads them."""
    found = SearchServerReader.open(definition).documents(topic)
    return {row.key[0]: dict(row.source) for row in found if row.key[0] is not None}


def items(definition: SearchSinkDefinition) -> dict[str, str | None]:
    """Return key → item of the orders."""
    return {key: row["item"] for key, row in rows(definition).items()}


class Index:
    """The server as an application or an operator uses it, by the alias of the orders."""

    def __init__(self, definition: SearchSinkDefinition) -> None:
        self.alias = definition.access.index.format(schema="shop", table="orders")
        self._http = httpx.Client(base_url=definition.access.url, timeout=30)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the parsed answer."""
        answer = self._http.request(method, path, json=body)
        answer.raise_for_status()
        return answer.json()

    def status(self, method: str, path: str, body: Any = None) -> int:
        """Send a request and return the status of the answer."""
        return self._http.request(method, path, json=body).status_code

    def search(self, query: Any = None) -> dict[str, dict[str, Any]]:
        """Return id → source of the documents that a search by the alias finds."""
        body = {"query": query or {"match_all": {}}, "size": 1000}
        found = self.ask("POST", f"/{self.alias}/_search", body)
        return {hit["_id"]: hit["_source"] for hit in found["hits"]["hits"]}

    @property
    def name(self) -> str:
        """The index behind the alias."""
        (index,) = self.ask("GET", f"/_alias/{self.alias}")
        return str(index)

    def all(self) -> dict[str, dict[str, Any]]:
        """Return id → source of all documents of the index, those that searches do not see included."""
        self.ask("POST", f"/{self.name}/_refresh")
        found = self.ask("POST", f"/{self.name}/_search", {"size": 1000, "version": True})
        return {hit["_id"]: hit["_source"] for hit in found["hits"]["hits"]}
