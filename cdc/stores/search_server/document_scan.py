"""Document scan: reads all documents of an index as it was at one point in time, while writers continue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final

from cdc.stores.search_server.client import SearchClient

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


@contextmanager
def point_in_time(client: SearchClient, index: str) -> Iterator[str]:
    """Keep the refreshed state of an index readable inside the block."""
    point = open_point(client, index)
    try:
        yield point
    finally:
        close_point(client, point)


def scan(client: SearchClient, index: str, query: Mapping[str, Any], size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the hits of a query in lists of up to `size`, all of one point in time."""
    with point_in_time(client, index) as point:
        yield from scan_point(client, point, query, size)


def scan_point(client: SearchClient, point: str, query: Mapping[str, Any], size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the hits of a query at an open point in time, in lists of up to `size`."""
    body: dict[str, Any] = {
        "size": size,
        "query": query,
        "pit": {"id": point, "keep_alive": KEEP_ALIVE},
        "sort": [{"_shard_doc": "asc"}],
        "track_total_hits": False,
    }
    while True:
        hits = client.ask("POST", "/_search", body, exact=True).body["hits"]["hits"]
        if hits:
            yield hits
        if len(hits) < size:
            return
        body["search_after"] = [int(place) for place in hits[-1]["sort"]]
