"""Document scan: reads all documents of an index as it was at one point in time, while writers continue.

Hits are in the order of Lucene's document numbers, which costs the server least. Documents of different shards can have
the same number, so a list may end between two of them. Elasticsearch, and OpenSearch since 3.3, can sort by
`_shard_doc`, which is unique; OpenSearch 2 cannot. So on OpenSearch each search begins at the last number of the list
before, and documents that were read already are left out.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final

from cdc.errors import SinkUnavailable
from cdc.targets.search_server.client import SearchClient, error_reason

KEEP_ALIVE: Final = "10m"
"""Time for which the server keeps a point in time after its last use."""


def open_point(client: SearchClient, index: str) -> str:
    """Keep the refreshed state of an index readable; return the id of this point in time."""
    if client.engine == "elasticsearch":
        return str(client.ask("POST", f"/{index}/_pit?keep_alive={KEEP_ALIVE}").body["id"])
    return str(client.ask("POST", f"/{index}/_search/point_in_time?keep_alive={KEEP_ALIVE}").body["pit_id"])


def close_point(client: SearchClient, point: str) -> None:
    """Release a point in time; an unknown one is ignored."""
    allowed = (HTTPStatus.NOT_FOUND, HTTPStatus.BAD_REQUEST)
    if client.engine == "elasticsearch":
        client.ask("DELETE", "/_pit", {"id": point}, allowed=allowed)
    else:
        client.ask("DELETE", "/_search/point_in_time", {"pit_id": [point]}, allowed=allowed)


def scan(client: SearchClient, index: str, query: Mapping[str, Any], size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the hits of a query in lists of up to `size`, all of one point in time; see `scan_point`."""
    point = open_point(client, index)
    try:
        point = yield from scan_point(client, point, query, size)
    finally:
        close_point(client, point)


def scan_point(
    client: SearchClient, point: str, query: Mapping[str, Any], size: int
) -> Generator[list[dict[str, Any]], None, str]:
    """Yield the hits of a query at an open point in time, in lists of up to `size`; return the id of the point.

    size: more than the shards of the index, which are 1,024 at most. The server may give the point a new id with every
    list; the last one must be used for the next request. Raises SinkUnavailable if the point was closed or has expired.
    """
    order = "_shard_doc" if client.engine == "elasticsearch" else "_doc"
    body: dict[str, Any] = {"size": size, "query": query, "sort": [{order: "asc"}], "track_total_hits": False}
    read = set[str]()
    while True:
        body["pit"] = {"id": point, "keep_alive": KEEP_ALIVE}
        answer = client.ask("POST", "/_search", body, allowed=(HTTPStatus.NOT_FOUND,), exact=True)
        if answer.status == HTTPStatus.NOT_FOUND:
            raise SinkUnavailable(
                f"the search server no longer has the point in time of a scan: {error_reason(answer.body)}",
                remedy="repeat the command; a sink repeats the scan without one",
            )
        point, hits = answer.body.get("pit_id", point), answer.body["hits"]["hits"]
        if unread := [hit for hit in hits if hit["_id"] not in read]:
            yield unread
        if len(hits) < size:
            return point
        last = int(hits[-1]["sort"][0])
        if order == "_doc":
            read = {hit["_id"] for hit in hits if int(hit["sort"][0]) == last}
            last -= 1
        body["search_after"] = [last]
