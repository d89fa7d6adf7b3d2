"""Past and present of a Delta sink in Spark: all its tables as they were together at one cut."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from cdc.config import DeltaSink
from cdc.position import Position
from cdc.stores.lake import At, Lake, Moment, aliases, parse_at
from cdc.stores.published import Published, TargetState
from pipelines.sinks.delta_merge import require_delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def cut(sink: DeltaSink | str, moment: Moment | str = "published") -> Published:
    """The record of the last kept cut with nothing that came after `moment`: where each table stood, in what state.

    sink: of a definition, or its path with the placeholders. moment: `published` or `latest`, the newest cut; a
    position, a time, or either as text. Raises ConfigError for other text, CutUnavailable where no cut is kept.
    """
    found = moment if isinstance(moment, Position | datetime) else parse_at(moment)
    lake = Lake.open(sink if isinstance(sink, str) else sink.path)
    return lake.cut(At.PUBLISHED if found is At.LATEST else found)


def at(
    spark: SparkSession, sink: DeltaSink | str, moment: Moment | str | Published = "published"
) -> dict[str, DataFrame]:
    """Topic → the rows of the table at one cut, as `cut` finds it, for every table that belongs to the cut.

    moment: also a record that `cut` gave. A table that was copied or stood still then is not among them; the record
    says in which state it was. The frames are read lazily, at versions that are kept as long as the cut is.
    Raises as `cut`, and DeltaJarMissing for a session without Delta.
    """
    record = moment if isinstance(moment, Published) else cut(sink, moment)
    versions = record.versions
    return {
        table.topic: _frame(spark, table.target, versions[table.target])
        for table in sorted(record.tables.values(), key=lambda table: table.topic)
        if table.state == TargetState.STREAMING
    }


def views(spark: SparkSession, sink: DeltaSink | str, moment: Moment | str | Published = "published") -> dict[str, str]:
    """Make a temporary view of every table of one cut; topic → name of its view.

    Views have no schema: a table's is called as the table where no other schema has one of that name, else
    `schema__table`. One that has the name already is replaced. Raises as `at`.
    """
    record = moment if isinstance(moment, Published) else cut(sink, moment)
    frames = at(spark, sink, record)
    names = aliases(table.topic for table in record.tables.values())
    for topic, frame in frames.items():
        frame.createOrReplaceTempView(names[topic])
    return {topic: names[topic] for topic in frames}


def _frame(spark: SparkSession, target: str, version: int) -> DataFrame:
    return require_delta(spark).read.format("delta").option("versionAsOf", version).load(target)
