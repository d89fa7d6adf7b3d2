"""Folded parts: what the driver splits off, and what stays on the executors."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import SparkSession

from pipelines.folding.fold import FOLDED_ARROW
from pipelines.folding.folded_parts import (
    IMAGES,
    FoldedParts,
    FoldedTable,
    collect_images,
    divide_in_steps,
    piece_of_images,
    pieces_of,
    sum_by_table,
)
from pipelines.folding.history_changes import fold_with_history
from pipelines.folding.key_parts import from_ipc
from tests.pipelines.fold_model import SINK, Row, log_row, to_arrow

WIDE = "x" * 10_000


def folded_parts(spark: SparkSession, rows: list[Row], *, history: bool = False) -> FoldedParts:
    """The parts of relation 1 among the folded rows, or with every change, which are all in one part."""
    folded = fold_with_history(to_arrow(rows), {1} if history else set(), 0, sink=SINK)
    pieces = pa.Table.from_batches(list(pieces_of(0, folded)))
    own = [row for row in pieces.to_pylist() if row["relation"] == 1]
    sizes = {name: sum(row[name] for row in own) for name in ("rows", "keys", "size", "incomplete", "keyless")}
    return FoldedParts(spark.createDataFrame(pieces), FoldedTable(1, committed_at=0, **sizes), 1)


def test_the_sizes_of_a_table_are_those_of_its_pieces_and_the_median_counts_rows() -> None:
    def piece(relation: int, rows: int, committed_at: int) -> dict[str, int]:
        numbers = {"keys": rows - 1, "size": rows * 10, "incomplete": 1, "keyless": 0}
        return {"relation": relation, "rows": rows, "committed_at": committed_at, **numbers}

    pieces = [piece(7, 3, 500), piece(2, 5, 40), piece(7, 9, 100), piece(7, 4, 900)]

    assert sum_by_table(pieces) == [
        FoldedTable(relation=2, rows=5, keys=4, size=50, incomplete=1, keyless=0, committed_at=40),
        FoldedTable(relation=7, rows=16, keys=13, size=160, incomplete=3, keyless=0, committed_at=100),
    ]
    assert sum_by_table([]) == []


def keys_of(rows: pa.Table) -> list[str]:
    return sorted(key for (key,) in rows["key"].to_pylist())


def left_in(parts: FoldedParts) -> list[str]:
    """The keys of the rows on the executors."""
    return keys_of(collect_images(parts.map_pieces(lambda part, rows: [piece_of_images(part, rows)], IMAGES)))


def change(ordinal: int, key: str, relation: int = 1) -> Row:
    return log_row(relation, (5, ordinal), "u", key=[key], after={1: key})


def test_rows_of_a_key_and_rows_based_on_it_are_split_off_and_the_others_stay(spark: SparkSession) -> None:
    moved = log_row(1, (5, 9), "u", key=["d"], old_key=["c"], after={1: "d"}, partial=True)
    parts = folded_parts(spark, [change(0, "a"), change(1, "b"), change(2, "a", relation=2), moved])
    assert (parts.table.rows, parts.table.incomplete) == (3, 1)

    rows, left = parts.split_off(["a", "c", "x"])

    assert keys_of(rows) == ["a", "d"]
    assert left_in(left) == ["b"]
    assert left.table.rows == 1
    assert left.split_off(["a"])[0].num_rows == 0


def test_rows_without_a_key_and_incomplete_rows_are_counted(spark: SparkSession) -> None:
    keyless = log_row(1, (5, 3), "c", after={1: "a"})
    partial = log_row(1, (5, 4), "u", key=["b"], after={1: "b"}, partial=True)
    parts = folded_parts(spark, [keyless, partial, change(5, "c")])

    assert (parts.table.rows, parts.table.keyless, parts.table.incomplete) == (3, 1, 1)


def test_all_changes_of_a_key_are_split_off_or_left_out_up_to_a_position(spark: SparkSession) -> None:
    changes = [
        log_row(1, (position, n), "u", key=[key], after={1: key})
        for position in (5, 6, 7)
        for n, key in enumerate("ab")
    ]
    parts = folded_parts(spark, [*changes, change(9, "c")], history=True)
    assert (parts.table.rows, parts.table.keys) == (7, 3)

    rows, left = parts.split_off(["a"])
    assert keys_of(rows) == ["a"] * 3
    assert (left.table.rows, left.table.keys) == (4, 2)

    later = left.after(5)
    assert left_in(later) == ["b", "b"]
    assert (later.table.rows, later.table.keys) == (2, 1)
    assert later.has_any(lambda read: 7 in read["position"].to_pylist())
    assert not later.has_any(lambda read: 5 in read["position"].to_pylist())


def test_no_job_sends_much_more_than_the_bytes_of_a_step() -> None:
    rows = [{"op": op, "key": [str(number)], "after": [(1, WIDE)]} for number, op in enumerate("uuduuu")]
    pieces = [piece_of_images(0, pa.Table.from_pylist(own, FOLDED_ARROW)) for own in (rows[:4], rows[4:])]
    divided = pa.Table.from_batches(list(divide_in_steps(iter(pieces), 2 * len(WIDE))))
    sent = [from_ipc(stream.as_buffer()) for stream in divided["images"]]
    sizes: dict[int, int] = {}
    for step, own in zip(divided["step"].to_pylist(), sent, strict=True):
        sizes[step] = sizes.get(step, 0) + own.num_rows

    assert pa.concat_tables(sent)["key"].to_pylist() == [row["key"] for row in rows]
    assert sum(divided["upserts"].to_pylist()) == 5
    assert len(sizes) >= 3
    assert max(sizes.values()) <= 3
