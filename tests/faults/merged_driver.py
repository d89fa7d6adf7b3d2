"""`python -m tests.faults.merged_driver FOLDER UPTO [apart]`: apply and publish a batch of three shards of one target.

apart: each of them in a target of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from cdc.config import SinkRule
from cdc.table import TableSchema
from cdc.targets.lake_reader import read_target
from cdc.targets.published_record import Published
from pipelines.folding.folded_batch import ControlEvents, fold_by_table
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.record_after_batch import with_progress_state
from tests.contracts.folded import column
from tests.contracts.histories import TABLE, Table, image_of, whole
from tests.pipelines.fold_model import SINK, Image, Row, log_row, to_arrow

SHARDS = (1, 2, 3)
UNTOUCHED = 3
"""The shard that is neither truncated nor copied."""
NOTED = 2
"""The shard that gets a column in the middle."""
NOTED_AT = 40


def _put(position: int, ordinal: int, key: int, text: str, *, op: str = "c") -> Row:
    """One image; of an update only a part was sent."""
    image = {1: str(key), 2: text} | ({} if op == "u" else {3: "l", 4: "h"})
    return log_row(0, (position, ordinal), op, key=[str(key)], after=image, partial=op == "u")


HISTORY = [
    *(_put(10, key, key, "a") for key in range(6)),
    _put(20, 0, 1, "b", op="u"),
    _put(20, 1, 6, "new"),
    log_row(0, (30, 0), "t"),
    _put(30, 1, 2, "after"),
    _put(30, 2, 3, "not copied"),
    _put(40, 0, 2, "later", op="u"),
    _put(40, 1, 7, "seen"),
    *(_put(45, key, key, "copied", op="r") for key in (2, 7)),
    log_row(0, (50, 0), "g", payload=b"35"),
    _put(60, 0, 8, "late"),
    _put(60, 1, 7, "last", op="u"),
    log_row(0, (60, 2), "d", key=["2"]),
    {**_put(60, 3, 9, "moved", op="u"), "old_key": ["2"]},
]
"""Of one shard, with a truncate, the end of a copy that did not find a row, and a row that moves."""
ENDS = (20, 40, 50, 60)


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
def driver(folder: str, *, apart: bool = False) -> Iterator[tuple[DeltaSink, Published]]:
    """A new one, and where the one before it left the sink."""
    rule = SinkRule.model_validate({"match": "t.lives_*", "path": f"{folder}/lives", "merge_tables": True})
    rules = () if apart else (rule,)
    sink = DeltaSink(DeltaSettings(SINK, f"{folder}/{{schema}}/{{table}}", rules=rules))
    try:
        yield sink, sink.open("log-1") or Published(0, 0)
    finally:
        sink.close()


def batch(shard: int, published: Published, upto: int) -> TableBatch:
    """What a shard gets of the range that begins at the published cut, as the loop gives it."""
    rows = [row for row in rows_of(shard) if published.position < row["position"] <= upto]
    folded = fold_by_table(to_arrow(rows), sink=SINK)
    controls = folded.controls.get(shard, ControlEvents())
    before = published.tables.get(shard)
    return TableBatch(
        schema=schema_of(shard, upto),
        rows=folded.rows_of(shard),
        frame=None,
        after=min(before.position, upto) if before else 0,
        upto=upto,
        truncated=controls.truncated,
        generation=controls.generation,
    )


def held_apart(folder: str) -> dict[int, dict[str, Image]]:
    """What targets of their own have: shard → key → image."""
    targets = {shard: f"{folder}/t/lives_{shard}" for shard in SHARDS}
    return {
        shard: {str(row["id"]): image_of(row) for row in read_target(uri).read_all().to_pylist()}
        for shard, uri in targets.items()
    }


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


def drive(folder: str, upto: int, *, apart: bool = False) -> None:
    """From where the last one published, up to there, with a stop where a shard was left ahead, as the loop does it."""
    with driver(folder, apart=apart) as (sink, opened):
        published = opened
        while published.position < upto:
            end = stop(published, upto)
            records = {shard: sink.apply(batch(shard, published, end)) for shard in SHARDS}
            published = Published(
                end, 0, {shard: with_progress_state(record, end) for shard, record in records.items()}
            )
            sink.publish(published)


def stop(published: Published, upto: int) -> int:
    """Where the next range ends: at a shard that was left ahead, if there is one before upto."""
    ahead = [table.position for table in published.tables.values() if table.position > published.position]
    return min([upto, *ahead])


if __name__ == "__main__":
    drive(sys.argv[1], int(sys.argv[2]), apart="apart" in sys.argv)
