"""`python -m tests.faults.merged_driver FOLDER UPTO`: apply and publish one batch of three shards of one target."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from cdc.config import SinkRule
from cdc.stores.lake import read_target
from cdc.stores.published import Published, TableRecord
from cdc.table import TableSchema
from pipelines.fold import fold
from pipelines.folding.batch import TableControls, take_apart
from pipelines.running.standing import placed
from pipelines.sinks.delta import DeltaSettings, DeltaSink
from pipelines.sinks.sink import TableBatch
from tests.contracts.folded import column
from tests.contracts.histories import TABLE, Table, image_of, whole
from tests.faults.history_driver import HISTORY
from tests.pipelines.lives import SINK, Image, Row, to_arrow

SHARDS = (1, 2, 3)
UNTOUCHED = 3
"""The shard that is neither truncated nor copied."""
NOTED = 2
"""The shard that gets a column in the middle."""
NOTED_AT = 40


def schema_of(shard: int, upto: int) -> TableSchema:
    """The version of a shard that is in force at a position."""
    noted = shard == NOTED and upto >= NOTED_AT
    columns = (*TABLE.columns, column(5, "note")) if noted else TABLE.columns
    return replace(TABLE, relation=shard, oid=shard, name=f"lives_{shard}", columns=columns)


def rows_of(shard: int) -> list[Row]:
    """Its rows of the log: the same keys and places as those of the others."""
    kept = [row for row in HISTORY if shard != UNTOUCHED or row["op"] not in "tg"]
    images = [row["after"] and {**row["after"], 2: f"{shard}{row['after'][2]}"} for row in kept]
    mine = {"relation": shard, "topic": f"t.lives_{shard}"}
    return [{**row, **mine, "after": image} for row, image in zip(kept, images, strict=True)]


@contextmanager
def driver(folder: str) -> Iterator[tuple[DeltaSink, Published]]:
    """A new one, and where the one before it left the sink."""
    rule = SinkRule.model_validate({"match": "t.lives_*", "path": f"{folder}/lives", "merge_tables": True})
    sink = DeltaSink(DeltaSettings(SINK, f"{folder}/{{schema}}/{{table}}", rules=(rule,)))
    try:
        yield sink, sink.open("log-1") or Published(0, 0)
    finally:
        sink.close()


def batch(rows: Sequence[Row], after: int, upto: int, schema: TableSchema) -> TableBatch:
    """The range of one shard as the loop gives it to a target of the latest state."""
    found = to_arrow(row for row in rows if after < row["position"] <= upto)
    told = take_apart(fold(found, sink=SINK))
    controls = told.controls.get(schema.relation, TableControls())
    return TableBatch(
        schema=schema,
        rows=told.rows_of(schema.relation),
        frame=None,
        after=after,
        upto=upto,
        truncated=controls.truncated,
        generation=controls.generation,
    )


def held(folder: str, version: int | None = None) -> dict[int, dict[str, Image]]:
    """What the target has: shard → key → image."""
    found: dict[int, dict[str, Image]] = {shard: {} for shard in SHARDS}
    for row in read_target(f"{folder}/lives", version).read_all().to_pylist():
        assert str(row["id"]) not in found[row["_relation"]]
        found[row["_relation"]][str(row["id"])] = image_of(row)
    return found


def expected(upto: int) -> dict[int, dict[str, Image]]:
    """What the source had at a position."""
    tables: dict[int, Table] = {shard: Table() for shard in SHARDS}
    for shard, table in tables.items():
        for row in rows_of(shard):
            if row["position"] <= upto:
                table.apply(row)
    return {shard: {key: whole(image) for key, (_, image) in table.rows.items()} for shard, table in tables.items()}


def main(folder: str, upto: int) -> None:
    """From where the last one published, up to there, with a stop where a shard was left ahead, as the loop does it."""
    with driver(folder) as (sink, opened):
        published = opened
        while published.position < upto:
            ahead = [table.position for table in published.tables.values() if table.position > published.position]
            end = min([upto, *ahead])
            records = {shard: one(sink, published, shard, end) for shard in SHARDS}
            published = Published(end, 0, {shard: placed(record, end) for shard, record in records.items()})
            sink.publish(published)


def one(sink: DeltaSink, published: Published, shard: int, upto: int) -> TableRecord:
    """One shard brought from where it stands to a position."""
    before = published.tables.get(shard)
    after = min(before.position, upto) if before else 0
    return sink.apply(batch(rows_of(shard), after, upto, schema_of(shard, upto)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
