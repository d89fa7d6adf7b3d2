"""The Python API for notebooks: all tables of a Delta sink at one past or present cut, as Spark frames or views."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from cdc.config import DeltaSinkDefinition
from cdc.position import Position
from cdc.targets.lake_reader import Lake, Moment, ReadAt, aliases, parse_at, tables_by_shared_target
from cdc.targets.published_record import Published, TargetState, by_topic
from pipelines.sinks.delta.spark_target import frame_at

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def cut(sink: DeltaSinkDefinition | str, moment: Moment | str = "published") -> Published:
    """Return the record of the last kept cut at or before `moment`, with the position and state of each table.

    sink: a sink of a definition, or its path template. moment: a position, a time, or either as text; `published` and
    `latest` mean the newest cut. Raises ConfigError for other text, and CutUnavailable if no such cut is kept.
    """
    point = moment if isinstance(moment, Position | datetime) else parse_at(moment)
    lake = _opened(sink)
    return lake.cut(ReadAt.PUBLISHED if point is ReadAt.LATEST else point)


def at(
    spark: SparkSession, sink: DeltaSinkDefinition | str, moment: Moment | str | Published = "published"
) -> dict[str, DataFrame]:
    """Return topic → frame with the rows of the table, for every table of one cut.

    A target that several tables share is included under the name of its directory, if all of its tables are in the cut.
    moment: as for `cut`, or a record that `cut` returned. Spark reads the frames when they are used, at versions that
    are kept as long as the cut.

    Tables that were being copied or had stopped at the cut are left out. If `sink` is a sink of a definition, tables
    are also left out if their rows were written under earlier rules of the sink (`cdc.targets.target_rule_changes`).
    Raises the same errors as `cut`, and DeltaJarMissing for a session without Delta.
    """
    record = moment if isinstance(moment, Published) else cut(sink, moment)
    versions = record.versions
    tables_by_name = {topic: [table] for topic, table in by_topic(record.tables.values()).items()}
    tables_by_name = {**tables_by_shared_target(record.tables.values()), **tables_by_name}
    lake = _opened(sink)
    return {
        name: frame_at(spark, parts[0].target, versions[parts[0].target], [part.relation for part in parts])
        for name, parts in tables_by_name.items()
        if all(part.state == TargetState.STREAMING for part in parts)
        and lake.is_shown(parts, versions[parts[0].target])
    }


def views(
    spark: SparkSession, sink: DeltaSinkDefinition | str, moment: Moment | str | Published = "published"
) -> dict[str, str]:
    """Create a temporary view for every table of one cut; returns topic → name of the view.

    A view has the name of its table. If tables of several schemas have that name, the view is named `schema__table`.
    Existing views with these names are replaced. Raises the same errors as `at`.
    """
    record = moment if isinstance(moment, Published) else cut(sink, moment)
    frames = at(spark, sink, record)
    names = aliases({*frames, *(table.topic for table in record.tables.values())})
    for topic, frame in frames.items():
        frame.createOrReplaceTempView(names[topic])
    return {topic: names[topic] for topic in frames}


def _opened(sink: DeltaSinkDefinition | str) -> Lake:
    return Lake.open(sink) if isinstance(sink, str) else Lake.of(sink)
