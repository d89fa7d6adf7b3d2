"""Search driver: indexes many rows from executors, in a process of its own; prints the most memory that it needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from cdc.stores.published_record import Published
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.runtime.spark_session import SparkSettings, spark_session
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.search_server.sink import SearchServerSink
from tests.benchmarks.search import search_server
from tests.benchmarks.search_input import FIRST, ITEMS, folded_rows

PART: Final = 200_000
"""Rows of one partition, as a replay divides a table."""
AT_ONCE: Final = 10_000


def main() -> int:
    """Take the URL of a node and a number of rows."""
    url, rows = sys.argv[1], int(sys.argv[2])

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch["id"].to_pylist():
                yield from folded_rows(number * AT_ONCE, min(rows, (number + 1) * AT_ONCE)).to_batches()

    session = spark_session(SparkSettings(download=False))
    numbers = session.range(0, -(-rows // AT_ONCE), 1, -(-rows // PART))
    frame = numbers.mapInArrow(read, from_arrow_schema(FOLDED_ARROW))
    sink = SearchServerSink(search_server(url))
    sink.open("bench")
    batch = TableBatch(schema=ITEMS, rows=None, frame=frame, after=0, upto=FIRST + rows)
    record = sink.apply(batch)
    sink.publish(Published(batch.upto, 0, {record.relation: record}))
    count = httpx.get(f"{url}/{record.target}/_count").raise_for_status().json()["count"]
    print(json.dumps({"documents": count, "mib": _peak_mib("self") + sum(map(_peak_mib, _children()))}), flush=True)
    return 0


def _peak_mib(pid: object) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def _children() -> Iterator[int]:
    """Yield the process of the JVM; its own children are executors."""
    for file in Path("/proc/self/task").glob("*/children"):
        yield from map(int, file.read_text(encoding="utf-8").split())


if __name__ == "__main__":
    sys.exit(main())
