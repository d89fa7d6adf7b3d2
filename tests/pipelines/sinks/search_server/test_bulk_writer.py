"""What the bulk writer makes of each answer: written, stale, sent again, refused, or an error of the whole index."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cdc.errors import (
    DocumentRefused,
    DocumentTooLarge,
    IndexMissing,
    IndexReadOnly,
    SearchRequestRefused,
    SinkUnavailable,
)
from cdc.targets.search_server.client import SearchClient
from pipelines.sinks.search_server.bulk_writer import BulkWriter, Line
from tests.fixtures.http_relay import Answer, CutAnswer, DropRequest, EditItems, HttpRelay, LoseAnswer, RejectItems
from tests.fixtures.search_sinks import search_sink

BULK = r"^POST .*/_bulk"


@pytest.fixture
def alias(opensearch) -> str:
    """The write alias of an index with a whole number `n`."""
    with SearchClient(search_sink(opensearch).access, "opensearch") as client:
        index = f"{opensearch.prefix}a"
        client.ask("PUT", f"/{index}", {"mappings": {"dynamic": False, "properties": {"n": {"type": "integer"}}}})
        client.ask("PUT", f"/{index}/_alias/{index}.w")
    return f"{index}.w"


@pytest.fixture
def client(opensearch, opensearch_relay: HttpRelay) -> Iterator[SearchClient]:
    with SearchClient(search_sink(opensearch, url=opensearch_relay.url).access, "opensearch") as client:
        yield client


def line(number: int, version: int = 1, value: object = None) -> Line:
    action = {"index": {"_id": str(number), "version": version, "version_type": "external_gte"}}
    source = {"n": number if value is None else value}
    return Line(number, f"{json.dumps(action)}\n{json.dumps(source)}\n".encode())


def stored(client: SearchClient, alias: str) -> dict[str, object]:
    client.ask("POST", f"/{alias}/_refresh")
    hits = client.ask("POST", f"/{alias}/_search", {"size": 1000}).body["hits"]["hits"]
    return {hit["_id"]: hit["_source"]["n"] for hit in hits}


def writer(client: SearchClient, *, size: int = 2_000, retry_for: float = 20.0) -> BulkWriter:
    return BulkWriter(client, size=size, requests=4, retry_for=retry_for)


@pytest.mark.parametrize(
    "action",
    [
        Answer(429, retry_after=0),
        Answer(503),
        LoseAnswer(),
        CutAnswer(),
        DropRequest(),
        RejectItems(frozenset({"3", "70"})),
        EditItems(lambda item: item | {"status": 429, "error": {"type": "es_rejected", "reason": "full"}}),
    ],
    ids=["429", "503", "lost", "cut", "dropped", "items rejected", "written but reported as rejected"],
)
def test_every_line_is_written_whatever_is_rejected_or_lost(client, alias, opensearch_relay: HttpRelay, action):
    fault = opensearch_relay.fault(BULK, action, times=3)
    refused = writer(client).write(alias, [line(number) for number in range(100)])

    assert (refused, fault.done) == ({}, 3)
    assert stored(client, alias) == {str(number): number for number in range(100)}


@pytest.mark.parametrize(
    "content",
    [
        {"error": {"type": "x_content_parse_exception", "reason": "unexpected field"}, "status": 400},
        {"message": "request header or cookie too large"},
    ],
    ids=["the server", "a proxy"],
)
def test_a_request_that_is_refused_as_invalid_is_not_repeated(client, alias, opensearch_relay: HttpRelay, content):
    fault = opensearch_relay.fault(BULK, Answer(400, content=content), times=None)
    with pytest.raises(SearchRequestRefused, match=r"unexpected field|too large"):
        writer(client).write(alias, [line(number) for number in range(10)])

    assert fault.done == 1


def test_fewer_requests_are_sent_at_once_while_the_server_rejects_some(client, alias, opensearch_relay: HttpRelay):
    bulk = writer(client, size=200)
    opensearch_relay.fault(BULK, Answer(429, retry_after=0), times=2)
    bulk.write(alias, [line(number) for number in range(10)])
    assert bulk.limit == 1
    bulk.write(alias, [line(number) for number in range(300)])

    assert bulk.limit == 4


def test_a_server_that_accepts_nothing_is_unavailable(client, alias, opensearch_relay: HttpRelay):
    opensearch_relay.fault(BULK, Answer(429, retry_after=0), times=None)

    with pytest.raises(SinkUnavailable, match="fault of the relay"):
        writer(client, retry_for=0.3).write(alias, [line(1)])


def test_an_older_version_never_replaces_a_newer_one(client, alias):
    bulk = writer(client)
    bulk.write(alias, [line(1, version=7, value=70)])

    assert bulk.write(alias, [line(1, version=6, value=60)]) == {}
    assert stored(client, alias) == {"1": 70}


def test_a_refused_document_has_its_error_without_its_values_and_the_others_are_written(client, alias):
    refused = writer(client).write(alias, [line(1), line(2, value="canary"), line(3)])

    assert list(refused) == [2]
    assert isinstance(refused[2], DocumentRefused)
    assert "failed to parse field [n] of type [integer]" in str(refused[2])
    assert "canary" not in str(refused[2])
    assert stored(client, alias) == {"1": 1, "3": 3}


def test_a_request_that_is_too_large_is_divided(client, alias, opensearch_relay: HttpRelay):
    opensearch_relay.fault(BULK, Answer(413), times=1)

    assert writer(client, size=100_000).write(alias, [line(number) for number in range(50)]) == {}
    assert len(stored(client, alias)) == 50


def test_a_single_document_that_is_too_large_is_refused(client, alias, opensearch_relay: HttpRelay):
    opensearch_relay.fault(BULK, Answer(413), times=1)
    refused = writer(client).write(alias, [line(1)])

    assert isinstance(refused[1], DocumentTooLarge)


def test_a_deleted_index_is_not_created_again(client, alias):
    index = alias.removesuffix(".w")
    client.ask("DELETE", f"/{index}")

    with pytest.raises(IndexMissing):
        writer(client).write(alias, [line(1)])
    assert client.ask("HEAD", f"/{index}", allowed=(404,)).status == 404


def test_an_index_that_a_full_disk_made_read_only_is_named(client, alias):
    index = alias.removesuffix(".w")
    client.ask("PUT", f"/{index}/_settings", {"index.blocks.read_only_allow_delete": True})

    with pytest.raises(IndexReadOnly, match="read-only"):
        writer(client, retry_for=0.5).write(alias, [line(1)])
