"""Points in time of Elasticsearch: the requests that cdc sends, and answers as Elasticsearch's reference shows them.

No server was available. The requests and answers are those of these pages of the reference, with shorter ids:

- https://www.elastic.co/docs/api/doc/elasticsearch/operation/operation-open-point-in-time, and close-point-in-time
- https://www.elastic.co/docs/reference/elasticsearch/rest-apis/paginate-search-results

Methods, paths and required parameters are those of `open_point_in_time.json` and `close_point_in_time.json` in
`rest-api-spec` of the repository elastic/elasticsearch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from cdc.errors import SinkUnavailable
from cdc.targets.search_server.client import SearchClient
from cdc.targets.search_server.document_scan import KEEP_ALIVE, close_point, open_point, scan, scan_point
from tests.fixtures.http_relay import Answer, HttpRelay, Reply
from tests.fixtures.opensearch import SharedOpenSearch
from tests.fixtures.search_sinks import search_sink

ALL: dict[str, Any] = {"match_all": {}}
OPENED = {"id": "46ToAw-first", "_shards": {"total": 1, "successful": 1, "skipped": 0, "failed": 0}}
CLOSED = {"succeeded": True, "num_freed": 3}
UNKNOWN = {"succeeded": True, "num_freed": 0}
"""The answer, with status 404, for a point that was closed or has expired."""


def found(point: str, places: Mapping[str, int]) -> dict[str, Any]:
    """Return the answer of a search. point: id of the point after it; places: `_id` → its `_shard_doc`."""
    hits = [
        {"_index": "my-index-000001", "_id": key, "_score": None, "_source": {"n": 1}, "sort": [place]}
        for key, place in places.items()
    ]
    shards = {"total": 2, "successful": 2, "skipped": 0, "failed": 0}
    return {
        "pit_id": point,
        "took": 17,
        "timed_out": False,
        "_shards": shards,
        "hits": {"max_score": None, "hits": hits},
    }


@dataclass
class Recorded:
    """Elasticsearch: gives recorded answers in their order, and records the requests."""

    answers: list[tuple[int, dict[str, Any]]]
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    """Method, path with query, and body of each request."""

    def __call__(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Reply:
        assert headers["content-type"] == "application/json"
        self.requests.append((method, target, json.loads(body) if body else None))
        status, content = self.answers.pop(0)
        return Answer(status, content=content).reply(body, lambda _: pytest.fail("the relay has no server"))


@pytest.fixture(name="relay")
def _relay() -> Iterator[HttpRelay]:
    with HttpRelay("http://127.0.0.1:9") as relay:
        yield relay


@pytest.fixture(name="client")
def _client(relay: HttpRelay) -> Iterator[SearchClient]:
    sink = search_sink(SharedOpenSearch(relay.url, "t-"), {"engine": "elasticsearch"})
    with SearchClient(sink.access, sink.engine, retry_for=0.2) as client:
        yield client


def record(relay: HttpRelay, *answers: tuple[int, dict[str, Any]]) -> Recorded:
    """Let the relay give these answers."""
    recorded = Recorded(list(answers))
    relay.check = recorded
    return recorded


def search(point: str, size: int, after: int | None = None) -> tuple[str, str, dict[str, Any]]:
    """Return the request of a search, which may name no index, routing or preference."""
    body = {"size": size, "query": ALL, "sort": [{"_shard_doc": "asc"}], "track_total_hits": False}
    body |= {"pit": {"id": point, "keep_alive": KEEP_ALIVE}} | ({} if after is None else {"search_after": [after]})
    return "POST", "/_search", body


def test_a_point_is_opened_and_closed_by_its_id(relay: HttpRelay, client: SearchClient) -> None:
    recorded = record(relay, (200, OPENED), (200, CLOSED))
    close_point(client, open_point(client, "my-index-000001"))

    assert recorded.requests == [
        ("POST", f"/my-index-000001/_pit?keep_alive={KEEP_ALIVE}", None),
        ("DELETE", "/_pit", {"id": "46ToAw-first"}),
    ]


def test_a_point_that_has_expired_is_closed(relay: HttpRelay, client: SearchClient) -> None:
    recorded = record(relay, (404, UNKNOWN))
    close_point(client, "46ToAw-first")

    assert recorded.answers == []


def test_each_request_of_a_scan_has_the_newest_id(relay: HttpRelay, client: SearchClient) -> None:
    """4294967298 is the first place of the second shard, which has a document with the number of `b` too."""
    lists = [{"a": 0, "b": 2}, {"c": 4294967298, "d": 4294967299}, {"e": 4294967301}]
    answers = [(200, found(f"46ToAw-{n}", places)) for n, places in enumerate(lists)]
    recorded = record(relay, (200, OPENED), *answers, (200, CLOSED))
    hits = [hit["_id"] for hits in scan(client, "my-index-000001", ALL, 2) for hit in hits]

    assert hits == ["a", "b", "c", "d", "e"]
    assert recorded.requests[1:] == [
        search("46ToAw-first", 2),
        search("46ToAw-0", 2, after=2),
        search("46ToAw-1", 2, after=4294967299),
        ("DELETE", "/_pit", {"id": "46ToAw-2"}),
    ]


def test_a_scan_of_an_expired_point_does_not_end_as_if_it_were_complete(relay: HttpRelay, client: SearchClient) -> None:
    cause = {"type": "search_context_missing_exception", "reason": "No search context found for id [1]"}
    error = {"type": "search_phase_execution_exception", "reason": "all shards failed", "root_cause": [cause]}
    record(relay, (200, found("46ToAw-0", {"a": 0})), (404, {"error": error, "status": 404}))
    lists = scan_point(client, "46ToAw-first", ALL, 1)

    assert [hit["_id"] for hit in next(lists)] == ["a"]
    with pytest.raises(SinkUnavailable, match="point in time"):
        next(lists)
