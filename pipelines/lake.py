"""Past and present of a Delta sink in Spark: all its tables as they were together at one cut."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from cdc.config import DeltaSinkDefinition
from cdc.position import Position
from cdc.stores.lake import Lake, Moment, ReadAt, aliases, parse_at, tables_by_shared_target
from cdc.stores.published import Published, TableRecord, TargetState
from cdc.stores.target_rules import TargetRules
from cdc.target_names import RELATION_COLUMN
from pipelines.sinks.delta.merge import require_delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def cut(sink: DeltaSinkDefinition | str, moment: Moment | str = "published") -> Published:
    """The record of the last kept cut with nothing that came after `moment`: where each table stood, in what state.

    sink: of a definition, or its path with the placeholders. moment: `published` or `latest`, the newest cut; a
    position, a time, or either as text. Raises ConfigError for other text, CutUnavailable where no cut is kept.
    """
    found = moment if isinstance(moment, Position | datetime) else parse_at(moment)
    lake = Lake.open(sink if isinstance(sink, str) else sink.path)
    return lake.cut(ReadAt.PUBLISHED if found is ReadAt.LATEST else found)


def at(
    spark: SparkSession, sink: DeltaSinkDefinition | str, moment: Moment | str | Published = "published"
) -> dict[str, DataFrame]:
    """Topic → the rows of the table at one cut, as `cut` finds it, for every table that belongs to the cut.

    A target that several tables share is there as well, under the name of its directory, if all of them belong to it.
    moment: also a record that `cut` gave. The frames are read lazily, at versions that are kept as long as the cut is.
    Left out are tables that were being copied or had stopped at that cut (the record has their state), and, if the sink
    of a definition is given, tables whose rows were made under other rules (`cdc.stores.target_rules`).
    Raises as `cut`, and DeltaJarMissing for a session without Delta.
    """
    record = moment if isinstance(moment, Published) else cut(sink, moment)
    versions = record.versions
    named = {table.topic: [table] for table in sorted(record.tables.values(), key=lambda table: table.topic)}
    named = {**tables_by_shared_target(record.tables.values()), **named}
    lake = Lake.open(sink) if isinstance(sink, str) else Lake.open(sink.path, TargetRules.of(sink))
    return {
        name: _frame(spark, parts, versions[parts[0].target])
        for name, parts in named.items()
        if all(part.state == TargetState.STREAMING for part in parts)
        and lake.is_shown(parts, versions[parts[0].target])
    }


def views(
    spark: SparkSession, sink: DeltaSinkDefinition | str, moment: Moment | str | Published = "published"
) -> dict[str, str]:
    """Make a temporary view of every table of one cut; topic → name of its view.

    Views have no schema: a table's is called as the table where no other schema has one of that name, else
    `schema__table`. One that has the name already is replaced. Raises as `at`.
    """
    record = moment if isinstance(moment, Published) else cut(sink, moment)
    frames = at(spark, sink, record)
    names = aliases({*frames, *(table.topic for table in record.tables.values())})
    for topic, frame in frames.items():
        frame.createOrReplaceTempView(names[topic])
    return {topic: names[topic] for topic in frames}


def _frame(spark: SparkSession, parts: Sequence[TableRecord], version: int) -> DataFrame:
    rows = require_delta(spark).read.format("delta").option("versionAsOf", version).load(parts[0].target)
    if RELATION_COLUMN not in rows.columns:
        return rows
    # rows of another table in the same target may be ahead of the cut
    return rows.where(rows[RELATION_COLUMN].isin(*(part.relation for part in parts)))
