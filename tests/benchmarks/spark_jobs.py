"""What is timed of Spark, each in a process of its own: a replay, and a plain read and write of the same rows.

The session is up before the clock starts; nothing has run in it, so both begin with a cold JVM. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from cdc.config import load
from pipelines.rebuilding.request import ReplayOptions
from pipelines.replay import replay
from pipelines.session import SparkSettings, has_delta, spark_session


def replayed(config: str, sink: str, into: str) -> dict[str, object]:
    """`cdc replay SINK --into PATH`, from its check of the request to the published record."""
    report = replay(load(Path(config)), ReplayOptions(sink=sink, into=into))
    (table,) = report.tables
    if not report.ok:
        raise RuntimeError(f"{table.topic} is {table.state}: {table.reason}")
    return {"seconds": report.seconds, "rows": report.rows, "target": table.target}


def rewritten(target: str, into: str) -> dict[str, object]:
    """The target that a replay built, read and written by Spark alone."""
    session = spark_session(SparkSettings())
    began = time.monotonic()
    session.read.format("delta").load(target).write.format("delta").save(into)
    seconds = time.monotonic() - began
    return {"seconds": seconds, "rows": session.read.format("delta").load(into).count(), "target": into}


def main() -> int:
    """`replay CONFIG SINK INTO` or `rewrite TARGET INTO`."""
    job, *arguments = sys.argv[1:]
    session = spark_session(SparkSettings())
    if not has_delta(session):
        raise RuntimeError("Spark has no Delta here")
    print(json.dumps((replayed if job == "replay" else rewritten)(*arguments)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
