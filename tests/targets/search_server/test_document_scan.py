"""A scan reads every document of an index as it was when the scan began."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc.errors import SinkUnavailable
from cdc.targets.search_server.client import SearchClient
from cdc.targets.search_server.document_scan import close_point, open_point, scan, scan_point
from tests.fixtures.search_sinks import search_sink


@pytest.fixture
def client(opensearch) -> Iterator[SearchClient]:
    with SearchClient(search_sink(opensearch).access, "opensearch") as client:
        yield client


@pytest.fixture(params=[1, 3], ids=["one shard", "three shards"])
def index(request, client, opensearch) -> str:
    name = f"{opensearch.prefix}a"
    client.ask("PUT", f"/{name}", {"settings": {"number_of_shards": request.param}})
    write(client, name, range(25))
    return name


def write(client: SearchClient, index: str, numbers: range) -> None:
    for number in numbers:
        client.ask("PUT", f"/{index}/_doc/{number}", {"n": number})
    client.ask("POST", f"/{index}/_refresh")


@pytest.mark.parametrize("size", [4, 25, 1000])
def test_every_document_is_read_once(client, index, size):
    lists = list(scan(client, index, {"match_all": {}}, size))

    assert sorted(int(hit["_id"]) for hits in lists for hit in hits) == list(range(25))
    assert max(map(len, lists)) <= size


def test_a_point_in_time_does_not_change_and_can_be_read_again(client, index):
    point = open_point(client, index)
    write(client, index, range(20, 40))
    client.ask("DELETE", f"/{index}/_doc/1")
    client.ask("POST", f"/{index}/_refresh")
    for _ in range(2):
        hits = [hit for hits in scan_point(client, point, {"match_all": {}}, 7) for hit in hits]
        assert sorted(int(hit["_id"]) for hit in hits) == list(range(25))
    close_point(client, point)
    close_point(client, point)
    with pytest.raises(SinkUnavailable, match="point in time"):
        next(scan_point(client, point, {"match_all": {}}, 7))


def test_a_query_selects_documents(client, index):
    found = [hit["_id"] for hits in scan(client, index, {"range": {"n": {"lt": 3}}}, 10) for hit in hits]

    assert sorted(found) == ["0", "1", "2"]
