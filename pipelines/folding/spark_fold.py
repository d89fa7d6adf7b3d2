"""The fold as a Spark plan: the same result as `fold`, for large ranges, on one machine or a cluster.

A life is a sequence of changes of one key, see pipelines.folding.fold. Aggregates compute the last life of each key. Of
several partial images with the same columns only the latest counts, so the plan keeps one row per set of columns. Spark
combines these rows before the shuffle and spills them if needed.

An update with a partial image may move a row to another key. The life of the new key then does not contain the
unsent columns. The plan looks for them in the changes of the old key, with one join per key change: two joins for
a → b → c. If the range does not contain all columns, `base` is the key of the target row that has the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from cdc.log_row import ROW_OPERATIONS, Operation
from pipelines.folding.fences_and_statistics import Fence, RangeStatistics, add_fences
from pipelines.folding.fold import FOLDED_ARROW

_IMAGE: Final = "map<int,string>"
FOLDED: Final[StructType] = from_arrow_schema(FOLDED_ARROW)
"""FOLDED_ARROW as a Spark schema."""

_GROUP: Final = ("relation", "key", "apart")
_FACTS: Final = ("position", "ordinal", "committed_at", "op", "after", "payload", "partial", "moved_from")
_MOVE: Final = ("moved_position", "moved_ordinal")


def fold_frame(rows: DataFrame, *, sink: str, statistics: RangeStatistics | None = None) -> DataFrame:
    """Return the plan that folds a frame of log rows for a sink, as `fold` does.

    statistics: the statistics of the range; None: a Spark job collects them first. If partial images change keys, this
    function also runs Spark jobs.
    """
    addressed = rows.where(_addressed(sink))
    known = statistics if statistics is not None else _collect_statistics(addressed)
    remaining = _after_fences(addressed, known.fences)
    if not known.keyless:
        return _by_key(remaining, known)
    return _by_key(remaining.where(~_is_keyless()), known).unionByName(_changes(remaining.where(_is_keyless())))


def collect_parts(folded: DataFrame) -> Iterator[pa.Table]:
    """Yield the rows of each partition of a frame of folded rows, one partition after the other.

    Unlike `DataFrame.toArrow`, this needs the driver's memory for one partition only.
    """

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if received := list(batches):
            rows, written = pa.Table.from_batches(received), pa.BufferOutputStream()
            with pa.ipc.new_stream(written, rows.schema) as stream:
                stream.write_table(rows)
            yield pa.RecordBatch.from_pydict({"part": [written.getvalue().to_pybytes()]})

    for row in folded.mapInArrow(pack, "part binary").toLocalIterator():
        part = pa.ipc.open_stream(bytes(row["part"])).read_all()
        yield part.cast(pa.schema([FOLDED_ARROW.field(name) for name in part.column_names]))


def _by_key(remaining: DataFrame, known: RangeStatistics) -> DataFrame:
    if not known.partial:
        return keep_latest(remaining)
    facts = _facts(remaining)
    if known.moves:
        return _with_bases(facts, known.links).select(*FOLDED.names)
    return _lives(facts).select(*FOLDED.names)


def keep_latest(rows: DataFrame) -> DataFrame:
    """Fold log rows without partial images to FOLDED rows: keep the latest row of each key."""
    latest, columns = _latest_columns()
    return _facts(rows).groupBy(*_GROUP).agg(latest).select(*columns)


# A Column is a tree in the JVM: building it takes one call per node, and all together as long as a small fold.
# Columns belong to no frame, so each is built once.


@cache
def _addressed(sink: str) -> Column:
    return F.col("address").isNull() | (F.col("address") == sink)


@cache
def _is_keyless() -> Column:
    return F.col("key").isNull() & F.col("op").isin(*sorted(ROW_OPERATIONS))


def _changes(rows: DataFrame) -> DataFrame:
    """Convert rows of tables without a key to FOLDED rows: added rows get `u`, removed rows get `d`."""
    added = F.when(F.col("op") != Operation.DELETE.value, F.struct(F.lit("u").alias("op"), F.col("after")))
    removed = F.when(F.col("before").isNotNull(), F.struct(F.lit("d").alias("op"), F.col("before").alias("after")))
    change = F.explode(F.array_compact(F.array(added, removed))).alias("change")
    columns = {"op": F.col("change.op"), "after": F.col("change.after"), "complete": F.lit(True)}
    columns["base"] = F.lit(None).cast(FOLDED["base"].dataType)
    return rows.select("*", change).select(*(columns.get(name, F.col(name)).alias(name) for name in FOLDED.names))


@cache
def _latest_columns() -> tuple[Column, tuple[Column, ...]]:
    complete = F.when(_is_image(F.col("last.op")), F.lit(True))
    columns = {name: F.col(f"last.{name}") for name in FOLDED.names if name in _FACTS}
    columns |= {"complete": complete, "base": F.lit(None).cast(FOLDED["base"].dataType)}
    latest = F.max_by(F.struct(*_FACTS), _order()).alias("last")
    return latest, tuple(columns.get(name, F.col(name)).alias(name) for name in FOLDED.names)


def _order(row: str = "") -> Column:
    return F.struct(F.col(f"{row}position"), F.col(f"{row}ordinal"))


def _is_image(op: Column) -> Column:
    return op.isin("u", "d")


def _collect_statistics(rows: DataFrame) -> RangeStatistics:
    is_fence = F.col("op").isin("t", "g")
    moved = F.col("partial") & F.col("old_key").isNotNull()
    marks = F.when(is_fence, F.struct("relation", "op", "position", "ordinal", "payload"))
    found = F.bool_or("partial"), F.bool_or(moved), F.collect_list(marks), F.bool_or(_is_keyless())
    partial, moves, listed, keyless = rows.agg(*found).first()
    fences: dict[int, Fence] = {}
    add_fences(fences, [mark.asDict() for mark in listed])
    return RangeStatistics(bool(partial), bool(moves), fences, keyless=bool(keyless))


def _after_fences(rows: DataFrame, fences: Mapping[int, Fence]) -> DataFrame:
    if not fences:
        return rows
    listed = ", ".join(f"({r}L, {f.position}L, {f.ordinal}L, {f.generation}L)" for r, f in fences.items())
    text = f"SELECT * FROM VALUES {listed} AS fence(fenced, cleared, cleared_ordinal, generation)"
    fence = F.broadcast(rows.sparkSession.sql(text))
    gone = (_order() < F.struct("cleared", "cleared_ordinal")) | (F.col("position") < F.col("generation"))
    is_row = F.col("op").isin(*sorted(ROW_OPERATIONS))
    joined = rows.join(fence, F.col("relation") == F.col("fenced"), "left")
    return joined.where(~(is_row & F.coalesce(gone, F.lit(False)))).select(*rows.columns)


def _facts(rows: DataFrame) -> DataFrame:
    """Select the columns of the log rows that the fold needs."""
    is_change, columns = _fact_columns()
    return rows.where(is_change).select(*columns)


@cache
def _fact_columns() -> tuple[Column, tuple[Column, ...]]:
    is_row = F.col("op").isin(*sorted(ROW_OPERATIONS))
    # every control row is a group of its own, so that the aggregate keeps all of them
    apart = F.when(~is_row, _order())
    is_delete, is_new = (F.col("op") == op.value for op in (Operation.DELETE, Operation.CREATE))
    nowhere = F.transform("key", lambda _: F.lit(None).cast("string"))
    columns = (
        *map(F.col, ("relation", "key")),
        apart.alias("apart"),
        *map(F.col, ("position", "ordinal", "committed_at")),
        F.when(is_row & ~is_delete, F.lit("u")).otherwise(F.col("op")).alias("op"),
        F.when(~is_delete, F.col("after")).alias("after"),
        *map(F.col, ("payload", "partial")),
        F.when(F.col("partial"), F.when(is_new, nowhere).otherwise(F.col("old_key"))).alias("moved_from"),
    )
    return F.col("op") != Operation.MESSAGE.value, columns


def _lives(facts: DataFrame) -> DataFrame:
    """Return one FOLDED row per key: the merged images since its last complete image, delete or move from another key.

    The result also has the position and ordinal of the key change from which the row got its `base`.
    """
    stages = _life_stages()
    candidates = facts.groupBy(*_GROUP, stages.sent).agg(stages.row)
    keys = candidates.groupBy(*_GROUP).agg(stages.start, stages.rest)
    return keys.select(*keys.columns, stages.later).select("*", stages.last).select(*stages.folded)


@dataclass(frozen=True, slots=True)
class _Stages:
    sent: Column
    row: Column
    start: Column
    rest: Column
    later: Column
    last: Column
    folded: tuple[Column, ...]


@cache
def _life_stages() -> _Stages:
    continues = F.col("partial") & F.col("moved_from").isNull()
    begins, start = F.col("sent").isNull(), F.col("start")
    later = F.filter("rest", lambda row: start.isNull() | _after(row, start))
    return _Stages(
        sent=F.when(continues, F.array_sort(F.map_keys("after"))).alias("sent"),
        row=F.max_by(F.struct(*_FACTS), _order()).alias("row"),
        start=F.max_by(F.when(begins, F.col("row")), F.when(begins, _order("row."))).alias("start"),
        rest=F.collect_list(F.when(~begins, F.col("row"))).alias("rest"),
        later=F.array_sort(later, _compare_order).alias("later"),
        last=F.coalesce(F.get("later", F.size("later") - 1), start).alias("last"),
        folded=_folded_columns(),
    )


def _folded_columns() -> tuple[Column, ...]:
    start, alone = F.col("start"), F.size("later") == 0
    whole = F.coalesce(~start["partial"] & (alone | (start["op"] == "u")), F.lit(False))
    nothing = F.create_map().cast(_IMAGE)
    merged = F.aggregate("later", F.coalesce(start["after"], nothing), lambda image, row: _overlay(image, row["after"]))
    moved = start["moved_from"].isNotNull()
    columns = {
        "relation": F.col("relation"),
        "op": F.col("last.op"),
        "key": F.col("key"),
        "position": F.col("last.position"),
        "ordinal": F.col("last.ordinal"),
        "committed_at": F.col("last.committed_at"),
        "after": F.when(alone, start["after"]).otherwise(merged),
        "complete": F.when(_is_image(F.col("last.op")), whole),
        "base": start["moved_from"],
        "payload": F.col("last.payload"),
        "moved_position": F.when(moved, start["position"]),
        "moved_ordinal": F.when(moved, start["ordinal"]),
    }
    return tuple(column.alias(name) for name, column in columns.items())


def _after(row: Column, other: Column) -> Column:
    return F.struct(row["position"], row["ordinal"]) > F.struct(other["position"], other["ordinal"])


def _compare_order(left: Column, right: Column) -> Column:
    return F.when(_after(left, right), 1).when(_after(right, left), -1).otherwise(0)


def _overlay(older: Column, newer: Column) -> Column:
    """Return the columns of both images; where both have a column, the value of the newer image."""
    return F.map_concat(F.map_filter(older, lambda column, _: ~F.map_contains_key(newer, column)), newer)


def _with_bases(facts: DataFrame, links: int | None) -> DataFrame:
    """Fold to the latest state of each key, and complete the rows whose key changed.

    Their unsent columns come from the changes of the old key, if the range contains these.
    links: maximum number of key changes of one row. None: after each key change a Spark job tests whether another
    follows.
    """
    if links is None:
        facts = facts.localCheckpoint()
    lives = _lives(facts).localCheckpoint()
    settled, open_ = lives.where("base IS NULL"), lives.where("base IS NOT NULL")
    link = 0
    while (link < links) if links is not None else not open_.isEmpty():
        link += 1
        step = _one_link(open_, facts)
        if link == links:
            return settled.unionByName(step.drop("moving"))
        step = step.localCheckpoint()
        settled = settled.unionByName(step.where("NOT moving").drop("moving"))
        open_ = step.where("moving").drop("moving")
    return settled


def _one_link(open_: DataFrame, facts: DataFrame) -> DataFrame:
    """Complete folded rows with a `base`: add the columns that the range contains for the key in `base`.

    The new column `moving` is true if the row of that key was itself moved from a third key.
    """
    asking = open_.select(F.col("relation").alias("in_relation"), F.col("key").alias("asker"), "base", *_MOVE)
    move = F.struct(*_MOVE)
    # the delete of the old key is the row just before the move and not part of the life that moved
    left = (F.col("position") == F.col("moved_position")) & (F.col("ordinal") == F.col("moved_ordinal") - 1)
    of_base = (F.col("relation") == F.col("in_relation")) & (F.col("key") == F.col("base"))
    found = facts.join(asking, of_base & F.col("apart").isNull() & (_order() < move) & ~left)
    lives = _lives(found.withColumn("key", F.col("asker")).select(*facts.columns))
    names = ("after", "op", "complete", "base", *_MOVE)
    state = lives.select("relation", "key", F.struct(*names).alias("was"))
    was = F.col("was")
    # a deleted row cannot have moved: the columns of an invalid log are not guessed
    usable = was.isNotNull() & (was["op"] == "u")
    return open_.join(state, ["relation", "key"], "left").select(
        *(name for name in FOLDED.names if name not in ("after", "complete", "base")),
        F.when(usable, _overlay(was["after"], F.col("after"))).otherwise(F.col("after")).alias("after"),
        F.coalesce(usable & was["complete"], F.lit(False)).alias("complete"),
        F.when(usable & was["complete"], None).otherwise(F.coalesce(was["base"], F.col("base"))).alias("base"),
        *(was[name].alias(name) for name in _MOVE),
        F.coalesce(usable & was["base"].isNotNull(), F.lit(False)).alias("moving"),
    )
