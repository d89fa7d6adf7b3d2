"""Search: how many documents per second search sinks index, against opensearch-py, and how fresh searches are.

Our sinks get their documents from a change log, through the loop of the apply process: read, fold, index, publish. The
peer gets them as Python values in memory. Both write into an index with the same mapping on one node, one after the
other, and end with a refresh. The clock of a change starts with its commit in Postgres and
stops when the published record that contains it is visible; the sink refreshes its indexes before it publishes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import tantivy
from opensearchpy import OpenSearch
from opensearchpy.helpers import parallel_bulk

from cdc.config import EngineChoice, SearchSinkDefinition
from cdc.targets.search_index_reader import layout, rows_of
from pipelines.engine_decision import SLICE_ROWS
from pipelines.sinks.contract import Sink
from pipelines.sinks.search.sink import SearchSink
from pipelines.sinks.search_server.sink import SearchServerSink
from tests.benchmarks.apply_loop import ApplyLoop
from tests.benchmarks.figures import Figure
from tests.benchmarks.search_driver import ENGINES_OF_APPLY, peak_mib
from tests.benchmarks.search_freshness import measure_freshness
from tests.benchmarks.search_input import ITEMS, documents, write_log
from tests.fixtures.opensearch import OpenSearchServer

PARTS: Final = ("tantivy", "opensearch", "fresh", "memory")
QUICK_PARTS: Final = PARTS[:3]
ROWS, QUICK_ROWS, MEMORY_ROWS = 1_000_000, 100_000, 5_000_000
THREADS: Final = 4
"""Requests at once, on both sides."""
SECONDS, QUICK_SECONDS, WARM, QUICK_WARM = 60.0, 8.0, 20.0, 3.0
"""Seconds of load that are measured, and before."""
JVM: Final = ("-Xms1g", "-Xmx1g")
ENGINES: Final = {"tantivy": 600, "opensearch": 1_200}
"""Engine → limit of the median in milliseconds."""


def run(
    *, quick: bool, rows: int = 0, seconds: float = 0, runs: int = 0, parts: Sequence[str] = ()
) -> tuple[int, dict[str, Figure]]:
    """Return (runs, figures by key); parts that are not asked for stay unmeasured."""
    runs, parts = runs or (1 if quick else 3), parts or (QUICK_PARTS if quick else PARTS)
    rows = rows or (QUICK_ROWS if quick else ROWS)
    load = (QUICK_WARM if quick else WARM, seconds or (QUICK_SECONDS if quick else SECONDS))
    figures = empty_figures()
    with tempfile.TemporaryDirectory(prefix="cdc-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server runs as another user
        for number in range(runs):
            if "tantivy" in parts:
                with _folder() as place:
                    index = place / "index"
                    speed = _docs_per_second(place / "run", SearchSink("find", index), write_log(place, rows), rows)
                    _check_count(_rows_in(index), rows)
                figures["tantivy_docs_per_second"].values.append(speed)
            if set(parts) - {"tantivy"}:
                with _node(folder / f"node{number}") as url:
                    if "opensearch" in parts:
                        for key, value in _on_node(url, rows):
                            figures[key].values.append(value)
                    for choice in ENGINES_OF_APPLY if "memory" in parts and number == 0 else ():
                        with _folder() as place:
                            peak = _memory(place, url, choice, QUICK_ROWS if quick else MEMORY_ROWS)
                        figures[f"apply_rss_mib.opensearch_5m.{choice.value}"].values.append(peak)
                    for engine in ENGINES if "fresh" in parts else ():
                        lag = measure_freshness(folder / f"{engine}{number}", engine, url, load)
                        figures[f"search_p50_ms.{engine}"].values.append(lag)
    return runs, figures


def empty_figures() -> dict[str, Figure]:
    """Return the figures without values."""
    return {
        "tantivy_docs_per_second": Figure("docs/s", at_least=50_000),
        "opensearch_vs_parallel_bulk": Figure("ratio", at_least=0.9),
        "opensearch_docs_per_second": Figure("docs/s"),
        "parallel_bulk_docs_per_second": Figure("docs/s"),
        **{f"search_p50_ms.{engine}": Figure("ms", at_most=limit) for engine, limit in ENGINES.items()},
        **{f"apply_rss_mib.opensearch_5m.{engine.value}": Figure("MiB", at_most=2_048) for engine in ENGINES_OF_APPLY},
    }


@contextmanager
def _node(folder: Path) -> Iterator[str]:
    server = OpenSearchServer(folder, jvm=JVM)
    server.start()
    try:
        yield server.url
    finally:
        server.kill()


def _on_node(url: str, rows: int) -> Iterator[tuple[str, float]]:
    """Yield (key, value) of the figures of indexing on a node."""
    with _folder() as folder:
        write_log(folder / "warm", QUICK_ROWS)
        write_log(folder / "full", rows)
        for side in (_ours, _peer):  # the JVM compiles what both sides use
            side(url, folder / "warm", QUICK_ROWS)
        # a slow change of the machine or of the JVM is the same for both sides
        seconds = [side(url, folder / "full", rows) for side in (_ours, _peer, _peer, _ours)]
    ours, peer = seconds[0] + seconds[3], seconds[1] + seconds[2]
    yield "opensearch_docs_per_second", 2 * rows / ours
    yield "parallel_bulk_docs_per_second", 2 * rows / peer
    yield "opensearch_vs_parallel_bulk", peer / ours


def _ours(url: str, folder: Path, rows: int) -> float:
    """Return the seconds in which the loop indexes the log of a folder; it creates its index again."""
    _drop_index(url)
    with _folder() as place:
        speed = _docs_per_second(place / "run", SearchServerSink(search_server(url)), folder / "log", rows)
    _check_count(httpx.get(f"{url}/ours-shop.items/_count").raise_for_status().json()["count"], rows)
    return rows / speed


def _drop_index(url: str) -> None:
    httpx.delete(f"{url}/ours-*", params={"expand_wildcards": "all"}).raise_for_status()


def search_server(url: str) -> SearchSinkDefinition:
    """Return a sink whose indexes have names of their own."""
    server = {"url": url, "index": "ours-{schema}.{table}", "bulk_requests": THREADS}
    return SearchSinkDefinition.model_validate(
        {"type": "search", "name": "find", "engine": "opensearch", "server": server}
    )


def _docs_per_second(folder: Path, sink: Sink, log: Path, rows: int) -> float:
    """Return the documents per second of the loop, from the log to the published record. folder: of its catalog."""
    loop = ApplyLoop(folder, log, sink)
    began = time.perf_counter()
    loop.catch_up(SLICE_ROWS)
    seconds = time.perf_counter() - began
    sink.close()
    return rows / seconds


def _rows_in(index: Path) -> int:
    searcher = tantivy.Index.open(str(index)).searcher()
    return int(searcher.search(rows_of(layout(), ITEMS.relation), limit=1, count=True).count or 0)


def _check_count(documents_indexed: int, rows: int) -> None:
    if documents_indexed != rows:
        raise RuntimeError(f"the index has {documents_indexed:,} documents: expected {rows:,}")


def _memory(folder: Path, url: str, engine: EngineChoice, rows: int) -> float:
    """Return the peak memory of an apply process, and of its JVM, that indexes so many rows of a log."""
    _drop_index(url)
    peak = peak_mib(folder, write_log(folder, rows), search_server(url), engine)
    _check_count(httpx.get(f"{url}/ours-shop.items/_count").raise_for_status().json()["count"], rows)
    return peak


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cdc-bench-") as name:
        yield Path(name)


def _peer(url: str, _folder: Path, rows: int) -> float:
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
