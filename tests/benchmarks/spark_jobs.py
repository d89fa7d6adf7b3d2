"""What is timed of Spark, each in a process of its own: a replay, and a plain read and write of the same rows.

The session is up before the clock starts; nothing has run in it, so both begin with a cold JVM. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from cdc.config import Definition, load_definition
from cdc.log.compacted_table import read_compacted_state
from cdc.log.reader import LogReader
from pipelines.replaying.plan import ReplayOptions
from pipelines.replaying.replay import replay
from pipelines.runtime.spark_session import SparkSettings, has_delta, spark_session

Told = dict[str, Any]


def replayed(_session: SparkSession, config: str, sink: str, into: str, begun: str) -> Told:
    """`cdc replay SINK --into PATH`, from its check of the request to the published record.

    The file `begun` is there from that moment on. Told as well is what became of the log meanwhile.
    """
    definition = load_definition(Path(config))
    before, horizon = LogReader(definition.log.root).segments(), _horizon(definition)
    Path(begun).touch()
    report = replay(definition, ReplayOptions(sink=sink, into=into))
    compacted = [segment for segment in before if horizon < segment.last <= _horizon(definition)]
    left = {segment.segment for segment in LogReader(definition.log.root).segments()}
    (table,) = report.tables
    if not report.ok:
        raise RuntimeError(f"{table.topic} is {table.state}: {table.reason}")
    return {
        "seconds": report.seconds,
        "rows": report.rows,
        "target": table.target,
        "compacted_rows": sum(segment.rows for segment in compacted),
        "trimmed_segments": len({segment.segment for segment in before} - left),
    }


def _horizon(definition: Definition) -> int:
    held = read_compacted_state(definition.log.root)
    return 0 if held is None else held.horizon


def rewritten(session: SparkSession, target: str, into: str) -> Told:
    """The target that a replay built, read and written by Spark alone."""
    began = time.monotonic()
    session.read.format("delta").load(target).write.format("delta").save(into)
    seconds = time.monotonic() - began
    return {"seconds": seconds, "rows": session.read.format("delta").load(into).count(), "target": into}


def compared(session: SparkSession, old: str, new: str) -> Told:
    """How many rows one of two targets has and the other not, each as often as it has it; every column counts."""
    session.conf.set("spark.sql.shuffle.partitions", "32")
    one, other = (session.read.format("delta").load(target) for target in (old, new))
    if set(one.columns) != set(other.columns):
        raise RuntimeError(f"columns differ: {one.columns} and {other.columns}")
    both = one.withColumn("_side", F.lit(1)).unionByName(other.withColumn("_side", F.lit(-1)))
    surplus = both.groupBy(*one.columns).agg(F.abs(F.sum("_side")).alias("_surplus"))
    found = surplus.agg(F.sum("_surplus")).first()
    return {"differing": 0 if found is None else found[0] or 0, "rows": one.count()}


JOBS: Final[dict[str, Callable[..., Told]]] = {"replay": replayed, "rewrite": rewritten, "compare": compared}


def main() -> int:
    """`replay CONFIG SINK INTO BEGUN`, `rewrite TARGET INTO` or `compare OLD NEW`."""
    job, *arguments = sys.argv[1:]
    session = spark_session(SparkSettings())
    if not has_delta(session):
        raise RuntimeError("Spark has no Delta here")
    print(json.dumps(JOBS[job](session, *arguments)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
