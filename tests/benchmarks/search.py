"""Search: how many documents per second search sinks index, against opensearch-py, and how fresh searches are.

Both sides write the same documents into an index with the same mapping on one node, one after the other, and end with
a refresh. The peer gets its documents as Python values. The clock of a change starts with its commit in Postgres and
stops when the published record that contains it is visible; the sink refreshes its indexes before it publishes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from opensearchpy import OpenSearch
from opensearchpy.helpers import parallel_bulk

from cdc.config import SearchSinkDefinition
from cdc.stores.published_record import Published
from pipelines.sinks.contract import Sink
from pipelines.sinks.search.sink import SearchSink
from pipelines.sinks.search_server.sink import SearchServerSink
from tests.benchmarks.figures import Figure
from tests.benchmarks.search_freshness import measure_freshness
from tests.benchmarks.search_input import batches, documents
from tests.fixtures.opensearch import OpenSearchServer

PARTS: Final = ("tantivy", "opensearch", "fresh", "memory")
QUICK_PARTS: Final = PARTS[:3]
ROWS, QUICK_ROWS, MEMORY_ROWS = 1_000_000, 100_000, 5_000_000
BATCH: Final = 200_000
"""Rows of one batch, as the apply process divides a large range."""
THREADS: Final = 4
"""Requests at once, on both sides."""
SECONDS, QUICK_SECONDS, WARM, QUICK_WARM = 60.0, 8.0, 20.0, 3.0
"""Seconds of load that are measured, and before."""
JVM: Final = ("-Xms1g", "-Xmx1g")
ENGINES: Final = {"tantivy": 600, "opensearch": 1_200}
"""Engine → limit of the median in milliseconds."""
_TIMEOUT: Final = 1_800


def run(
    *, quick: bool, rows: int = 0, seconds: float = 0, runs: int = 0, parts: Sequence[str] = ()
) -> tuple[int, dict[str, Figure]]:
    """Return (runs, figures by key); parts that are not asked for stay unmeasured."""
    runs, parts = runs or (1 if quick else 3), parts or (QUICK_PARTS if quick else PARTS)
    rows = rows or (QUICK_ROWS if quick else ROWS)
    load = (QUICK_WARM if quick else WARM, seconds or (QUICK_SECONDS if quick else SECONDS))
    figures = _figures()
    with tempfile.TemporaryDirectory(prefix="cdc-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server runs as another user
        for number in range(runs):
            if "tantivy" in parts:
                speed = _docs_per_second(SearchSink("find", folder / f"index{number}"), rows)
                figures["tantivy_docs_per_second"].values.append(speed)
            if set(parts) - {"tantivy"}:
                with _node(folder / f"node{number}") as url:
                    for key, value in _on_node(url, parts, rows, first=number == 0):
                        figures[key].values.append(value)
                    for engine in ENGINES if "fresh" in parts else ():
                        lag = measure_freshness(folder / f"{engine}{number}", engine, url, load)
                        figures[f"search_p50_ms.{engine}"].values.append(lag)
    return runs, figures


def _figures() -> dict[str, Figure]:
    return {
        "tantivy_docs_per_second": Figure("docs/s", at_least=50_000),
        "opensearch_vs_parallel_bulk": Figure("ratio", at_least=0.9),
        "opensearch_docs_per_second": Figure("docs/s"),
        "parallel_bulk_docs_per_second": Figure("docs/s"),
        **{f"search_p50_ms.{engine}": Figure("ms", at_most=limit) for engine, limit in ENGINES.items()},
        "driver_rss_mib.opensearch_5m": Figure("MiB", at_most=2_048),
    }


@contextmanager
def _node(folder: Path) -> Iterator[str]:
    server = OpenSearchServer(folder, jvm=JVM)
    server.start()
    try:
        yield server.url
    finally:
        server.kill()


def _on_node(url: str, parts: Sequence[str], rows: int, *, first: bool) -> Iterator[tuple[str, float]]:
    """Yield (key, value) of the figures of indexing on a node. first: whether this is the first run."""
    if "opensearch" in parts:
        for warm in (_ours, _peer):  # the JVM compiles what both sides use
            warm(url, QUICK_ROWS)
        # a slow change of the machine or of the JVM is the same for both sides
        seconds = [side(url, rows) for side in (_ours, _peer, _peer, _ours)]
        ours, peer = seconds[0] + seconds[3], seconds[1] + seconds[2]
        yield "opensearch_docs_per_second", 2 * rows / ours
        yield "parallel_bulk_docs_per_second", 2 * rows / peer
        yield "opensearch_vs_parallel_bulk", peer / ours
    if "memory" in parts and first:
        yield "driver_rss_mib.opensearch_5m", _driver_mib(url, MEMORY_ROWS)


def _ours(url: str, rows: int) -> float:
    """Return the seconds in which the sink indexes so many rows; it creates its index again."""
    httpx.delete(f"{url}/ours-*", params={"expand_wildcards": "all"}).raise_for_status()
    return rows / _docs_per_second(SearchServerSink(search_server(url)), rows)


def search_server(url: str) -> SearchSinkDefinition:
    """Return a sink whose indexes have names of their own."""
    server = {"url": url, "index": "ours-{schema}.{table}", "bulk_requests": THREADS}
    return SearchSinkDefinition.model_validate(
        {"type": "search", "name": "find", "engine": "opensearch", "server": server}
    )


def _docs_per_second(sink: Sink, rows: int) -> float:
    prepared = list(batches(rows, BATCH))
    sink.open("bench")
    began = time.perf_counter()
    for batch in prepared:
        record = sink.apply(batch)
        sink.publish(Published(batch.upto, 0, {record.relation: record}))
    seconds = time.perf_counter() - began
    sink.close()
    return rows / seconds


def _peer(url: str, rows: int) -> float:
    """Return the seconds in which opensearch-py indexes the same documents, with the mapping of our index."""
    (index,) = httpx.get(f"{url}/ours-shop.items/_mapping").raise_for_status().json().values()
    body = {"settings": {"index": {"number_of_shards": 1, "refresh_interval": "-1"}}, "mappings": index["mappings"]}
    httpx.delete(f"{url}/peer")
    httpx.put(f"{url}/peer", json=body).raise_for_status()
    client, prepared = OpenSearch([url], timeout=60), documents(0, rows)
    actions = ({"_index": "peer", "_id": str(document["id"]), "_source": document} for document in prepared)
    began = time.perf_counter()
    for _ in parallel_bulk(client, actions, thread_count=THREADS):
        pass
    client.indices.refresh(index="peer")
    return time.perf_counter() - began


def _driver_mib(url: str, rows: int) -> float:
    """Return the most memory of a driver and its JVM while executors index so many rows."""
    httpx.delete(f"{url}/ours-*", params={"expand_wildcards": "all"}).raise_for_status()
    command = [sys.executable, "-m", "tests.benchmarks.search_driver", url, str(rows)]
    done = subprocess.run(command, check=True, timeout=_TIMEOUT, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["documents"] != rows:
        raise RuntimeError(f"the index has {found['documents']} documents: expected {rows}")
    return float(found["mib"])
