"""The fold: one range of the log becomes the latest state of every key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from pipelines.folding.fences_and_statistics import RangeStatistics, collect_statistics
from pipelines.folding.fold import FOLDED_ARROW, fold
from pipelines.folding.spark_fold import fold_frame
from tests.fixtures.examples import examples
from tests.pipelines.fold_model import SINK, Row, Source, Target, log_row, replay, to_arrow

HISTORIES = 60
RANGES = 100  # relation numbers of one history: each of its ranges is folded as a relation of its own


Fold = Callable[[list[Row]], list[Row]]


@pytest.fixture(params=["arrow", "spark"])
def folded(request: pytest.FixtureRequest) -> Fold:
    """Both folds in turn; the Spark fold gets the statistics of the range, as in the apply process."""
    if request.param == "arrow":
        return lambda rows: in_order(fold(to_arrow(rows), sink=SINK))
    spark = request.getfixturevalue("spark")
    return lambda rows: in_order(in_spark(spark, rows, collect_statistics([to_arrow(rows)], sink=SINK)))


def in_spark(spark: SparkSession, rows: list[Row], known: RangeStatistics | None = None) -> pa.Table:
    return fold_frame(spark.createDataFrame(to_arrow(rows)), sink=SINK, statistics=known).toArrow()


def in_order(table: pa.Table) -> list[Row]:
    rows = table.cast(FOLDED_ARROW).to_pylist(maps_as_pydicts="strict")
    return sorted(rows, key=lambda row: (row["relation"] or 0, row["position"], row["ordinal"]))


def state(rows: list[Row]) -> list[tuple[Any, ...]]:
    return [(row["op"], row["key"], row["after"], row["complete"], row["base"]) for row in rows]


def change(place: int, op: str, key: str, **fields: Any) -> Row:
    return log_row(1, (1, place), op, key=[key], **fields)


def partial(place: int, key: str, after: dict[int, str | None], old: str | None = None) -> Row:
    return change(place, "u", key, after=after, partial=True, old_key=None if old is None else [old])


def in_ranges(source: Source, random: Random) -> list[Row]:
    """The history with the number of its range added to each row's relation; cuts only between transactions."""
    positions = sorted({row["position"] for row in source.log})
    cuts = sorted(random.sample(positions, random.randint(0, min(6, len(positions)))))
    return [row | {"relation": row["relation"] + sum(c < row["position"] for c in cuts)} for row in source.log]


def histories(seed: int, count: int = HISTORIES) -> tuple[list[Source], list[Row]]:
    """Random histories, each a relation, and their rows in ranges and in no order."""
    sources = [Source(number * RANGES, Random(f"{seed} {number}")) for number in range(count)]
    rows: list[Row] = []
    for source in sources:
        for _ in range(source.random.randint(2, 14)):
            source.transaction()
        rows += in_ranges(source, source.random)
    return sources, Random(seed).sample(rows, len(rows))


@examples(12)
@given(seed=st.integers(0, 2**32 - 1))
def test_applying_folds_range_by_range_equals_replaying_the_history(seed: int) -> None:
    sources, rows = histories(seed)
    by_history: dict[int, list[Row]] = defaultdict(list)
    for row in in_order(fold(to_arrow(rows), sink=SINK)):
        by_history[row["relation"] // RANGES * RANGES].append(row)

    for source in sources:
        assert replay(source.log) == source.table
        target = Target()
        ranges = sorted({row["relation"] for row in by_history[source.relation]})
        for number in ranges:
            target.apply([row for row in by_history[source.relation] if row["relation"] == number])
        assert target.table == source.table, source.log


@pytest.mark.parametrize("with_partial", [False, True], ids=["keep latest", "lives"])
def test_a_null_value_stays_null_and_an_absent_column_absent(folded: Fold, with_partial: bool) -> None:
    rows = [change(0, "c", "a", after={1: "a", 2: None, 3: ""})]
    if with_partial:
        rows.append(partial(1, "a", {1: "a", 3: None}))

    expected = {1: "a", 2: None, 3: None if with_partial else ""}
    assert state(folded(rows)) == [("u", ["a"], expected, True, None)]


def test_partial_images_of_one_life_are_merged_and_wait_for_the_row_of_their_own_key(folded: Fold) -> None:
    rows = [partial(0, "a", {1: "a", 2: "x", 3: "old"}), partial(1, "a", {1: "a", 2: "y"}), partial(2, "a", {4: None})]

    assert state(folded(rows)) == [("u", ["a"], {1: "a", 2: "y", 3: "old", 4: None}, False, None)]


def test_a_delete_hides_the_images_before_it(folded: Fold) -> None:
    rows = [partial(0, "a", {1: "a", 2: "x"}), change(1, "d", "a", before={1: "a"})]

    assert state(folded(rows)) == [("d", ["a"], None, True, None)]


def test_a_new_life_takes_nothing_from_the_one_before(folded: Fold) -> None:
    rows = [
        change(0, "c", "a", after={1: "a", 2: "x", 3: "y"}),
        change(1, "d", "a"),
        change(2, "c", "a", after={1: "a", 2: None}),
        partial(3, "a", {1: "a"}),
    ]

    assert state(folded(rows)) == [("u", ["a"], {1: "a", 2: None}, True, None)]


def test_a_partial_move_onto_a_deleted_key_waits_for_the_old_key(folded: Fold) -> None:
    rows = [change(0, "d", "b"), change(1, "d", "a"), partial(2, "b", {1: "b"}, old="a")]

    assert state(folded(rows)) == [("d", ["a"], None, True, None), ("u", ["b"], {1: "b"}, False, ["a"])]


def test_a_chain_of_moves_names_the_key_the_target_knows(folded: Fold) -> None:
    rows = [
        partial(0, "a", {1: "a", 2: "x"}),
        change(1, "d", "a"),
        partial(2, "b", {1: "b", 3: "y"}, old="a"),
        change(3, "d", "b"),
        partial(4, "c", {1: "c"}, old="b"),
        partial(5, "c", {1: "c", 4: "z"}),
    ]

    assert state(folded(rows))[-1] == ("u", ["c"], {1: "c", 2: "x", 3: "y", 4: "z"}, False, ["a"])


def test_a_chain_that_begins_with_a_full_image_is_complete(folded: Fold) -> None:
    rows = [
        change(0, "c", "a", after={1: "a", 2: "x", 3: None}),
        change(1, "d", "a"),
        partial(2, "b", {1: "b"}, old="a"),
        change(3, "c", "a", after={1: "a", 2: "later"}),
        change(4, "d", "b"),
        partial(5, "c", {1: "c"}, old="b"),
    ]

    assert state(folded(rows))[-1] == ("u", ["c"], {1: "c", 2: "x", 3: None}, True, None)


def test_two_keys_that_swap_through_a_third_name_each_other(folded: Fold) -> None:
    rows = [
        change(0, "d", "a"),
        partial(1, "t", {1: "t"}, old="a"),
        change(2, "d", "b"),
        partial(3, "a", {1: "a"}, old="b"),
        change(4, "d", "t"),
        partial(5, "b", {1: "b"}, old="t"),
    ]

    assert state(folded(rows)) == [
        ("u", ["a"], {1: "a"}, False, ["b"]),
        ("d", ["t"], None, True, None),
        ("u", ["b"], {1: "b"}, False, ["a"]),
    ]


def test_a_row_that_came_in_parts_has_nothing_of_an_older_one_of_its_key_wherever_it_moves(folded: Fold) -> None:
    rows = [
        change(0, "d", "a"),
        change(1, "c", "a", after={1: "a"}, partial=True),
        partial(2, "a", {2: "x"}),
        change(3, "c", "b", after={1: "b"}, partial=True),
        change(4, "d", "b"),
        partial(5, "c", {1: "c"}, old="b"),
        change(6, "c", "d", after={1: "d"}, partial=True),
        change(7, "r", "d", after={1: "d", 2: "y"}),
    ]

    assert sorted(state(folded(rows)), key=lambda row: row[1]) == [
        ("u", ["a"], {1: "a", 2: "x"}, False, [None]),
        ("d", ["b"], None, True, None),
        ("u", ["c"], {1: "c"}, False, [None]),
        ("u", ["d"], {1: "d", 2: "y"}, True, None),
    ]


def test_a_row_that_is_copied_later_completes_the_images_that_came_before_it(folded: Fold) -> None:
    """A whole copy in one range: an image of a key not read yet, and one that moved to another key."""
    whole = {2: "x", 3: "y", 4: "z"}
    rows = [
        log_row(1, (5, 0), "s", payload=b"{}"),
        log_row(1, (6, 0), "u", key=["a"], after={1: "a", 2: "x"}, partial=True),
        log_row(1, (6, 1), "d", key=["b"], before={1: "b"}),
        log_row(1, (6, 2), "u", key=["c"], old_key=["b"], after={1: "c", 3: "y"}, partial=True),
        log_row(1, (7, 0), "r", key=["a"], after={1: "a"} | whole),
        log_row(1, (8, 0), "r", key=["c"], after={1: "c"} | whole),
        log_row(1, (9, 0), "u", key=["c"], after={1: "c", 4: None}, partial=True),
        log_row(1, (10, 0), "g", payload=b"5"),
    ]

    found = state([row for row in folded(rows) if row["op"] in ("u", "d")])
    assert sorted(found, key=str) == [
        ("d", ["b"], None, True, None),
        ("u", ["a"], {1: "a"} | whole, True, None),
        ("u", ["c"], {1: "c"} | whole | {4: None}, True, None),
    ]


def test_rows_before_a_truncate_or_a_generation_are_dropped(folded: Fold) -> None:
    rows = [
        log_row(1, (5, 0), "c", key=["a"], after={1: "a"}),
        log_row(1, (6, 0), "c", key=["b"], after={1: "b"}),
        log_row(1, (6, 1), "t"),
        log_row(1, (6, 2), "c", key=["c"], after={1: "c"}),
        log_row(2, (5, 0), "c", key=["a"], after={1: "a"}),
        log_row(3, (5, 0), "c", key=["a"], after={1: "a"}),
        log_row(3, (6, 0), "r", key=["b"], after={1: "b"}),
        log_row(3, (7, 0), "g", payload=b"6"),
    ]

    seen = [(row["relation"], row["op"], row["key"]) for row in folded(rows)]
    assert seen == [(1, "t", None), (1, "u", ["c"]), (2, "u", ["a"]), (3, "u", ["b"]), (3, "g", None)]


def test_control_rows_and_boundaries_pass_and_messages_do_not(folded: Fold) -> None:
    rows = [
        log_row(1, (5, 0), "s", payload=b"{}"),
        log_row(1, (5, 1), "s", payload=b"[]"),
        log_row(1, (5, 2), "m", payload=b"hello"),
        log_row(1, (6, 0), "b") | {"relation": None, "topic": None},
    ]

    seen = [(row["op"], row["payload"], row["complete"]) for row in folded(rows)]
    assert sorted(seen, key=str) == [("b", None, None), ("s", b"[]", None), ("s", b"{}", None)]


def test_rows_addressed_to_another_sink_hide_nothing(folded: Fold) -> None:
    rows = [change(0, "c", "a", after={1: "a"}), change(1, "r", "a", after={1: "b"}, address="theirs")]
    rows.append(log_row(1, (1, 2), "t", address="theirs"))

    assert state(folded(rows)) == [("u", ["a"], {1: "a"}, True, None)]


def test_rows_of_a_keyless_table_are_not_folded(folded: Fold) -> None:
    insert, delete = log_row(1, (1, 0), "c", after={1: "x"}), log_row(1, (1, 2), "d", before={1: "x"})
    update = log_row(1, (1, 3), "u", before={1: "x"}, after={1: "y"})
    of_others = change(4, "c", "a", after={1: "a"})

    *seen, went, came, other = state(folded([insert, insert | {"ordinal": 1}, delete, update, of_others]))
    assert seen == [("u", None, {1: "x"}, True, None)] * 2 + [("d", None, {1: "x"}, True, None)]
    assert sorted([went, came], key=str) == [("d", None, {1: "x"}, True, None), ("u", None, {1: "y"}, True, None)]
    assert other == ("u", ["a"], {1: "a"}, True, None)
