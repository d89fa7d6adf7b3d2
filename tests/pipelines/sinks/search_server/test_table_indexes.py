"""The indexes of tables: created once, shared names refused, aliases set in one request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc.errors import IndexFieldLimitExceeded, IndexMappingConflict, IndexOfAnotherOwner
from cdc.targets.search_server.client import SearchClient
from pipelines.sinks.search.document_shape import DocumentShapes
from pipelines.sinks.search_server.row_writer import open_row_writer
from pipelines.sinks.search_server.table_indexes import TableIndexes
from tests.contracts.folded import ORDERS
from tests.fixtures.http_relay import HttpRelay, LoseAnswer
from tests.fixtures.search_sinks import search_sink

SHAPE = DocumentShapes().of(ORDERS)


@pytest.fixture
def client(opensearch, opensearch_relay: HttpRelay) -> Iterator[SearchClient]:
    with SearchClient(search_sink(opensearch, url=opensearch_relay.url).access, "opensearch") as client:
        yield client


def indexes(opensearch, client: SearchClient, sink: str = "find", **access) -> TableIndexes:
    server = search_sink(opensearch, **access).access
    return TableIndexes(client, server, ("log-1", sink), open_row_writer(client, server, sink).writer)


def test_an_index_is_created_although_answers_are_lost(opensearch, client, opensearch_relay: HttpRelay):
    fault = opensearch_relay.fault(r"^PUT", LoseAnswer(), times=2)
    table = indexes(opensearch, client).of(SHAPE, None, 1)

    assert fault.done == 2  # the second attempt is told that the index exists
    assert client.ask("GET", f"/{table.index}/_alias").body[table.index]["aliases"] == {f"{table.index}.w": {}}
    assert indexes(opensearch, client).of(SHAPE, table.index, 1) == table


def test_an_index_without_its_alias_for_writing_gets_it_back(opensearch, client):
    table = indexes(opensearch, client).of(SHAPE, None, 1)
    client.ask("DELETE", f"/{table.index}/_alias/{table.index}.w")
    indexes(opensearch, client).of(SHAPE, table.index, 1)

    assert client.ask("GET", f"/{table.index}/_alias").body[table.index]["aliases"] == {f"{table.index}.w": {}}


def test_another_sink_or_log_does_not_get_the_index(opensearch, client):
    table = indexes(opensearch, client).of(SHAPE, None, 1)

    with pytest.raises(IndexOfAnotherOwner):
        indexes(opensearch, client, "other").of(SHAPE, table.index, 1)


@pytest.mark.parametrize(
    ("access", "error"),
    [
        ({"settings": {"mapping.total_fields.limit": 2}}, IndexFieldLimitExceeded),
        ({"field_types": {"item": "no_such_type"}}, IndexMappingConflict),
        ({"settings": {"no_such_setting": 1}}, IndexMappingConflict),
    ],
    ids=["too many fields", "unknown type", "unknown setting"],
)
def test_a_wrong_setting_is_an_error_of_its_table(opensearch, client, access, error):
    with pytest.raises(error):
        indexes(opensearch, client, **access).of(SHAPE, None, 1)


def test_aliases_change_together_and_only_if_something_changed(opensearch, client, opensearch_relay: HttpRelay):
    tables = indexes(opensearch, client)
    one = tables.of(SHAPE, None, 1)
    alias = tables.alias(ORDERS)
    for floor in (0, 0, 7):
        tables.sync_aliases({alias: (one.index, floor)}, {})

    assert len([request for request in opensearch_relay.seen if request == "POST /_aliases"]) == 2
