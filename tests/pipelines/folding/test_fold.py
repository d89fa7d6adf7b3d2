"""The fold: one range of the log becomes the latest state of every key."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pipelines.folding.fold import FOLDED_ARROW, fold
from tests.fixtures.examples import examples
from tests.pipelines.fold_model import SINK, Row, Source, Target, log_row, message_row, replay, to_arrow

HISTORIES = 60
RANGES = 100  # relation numbers of one history: each of its ranges is folded as a relation of its own


EXAMPLES: list[list[Row]] = []
"""The rows of the tests below: test_spark_fold.py shows that the Spark plan makes the same of them."""


def example(*rows: Row) -> list[Row]:
    EXAMPLES.append(list(rows))
    return EXAMPLES[-1]


def folded(rows: list[Row]) -> list[Row]:
    return in_order(fold(to_arrow(rows), sink=SINK))


def in_order(table: pa.Table) -> list[Row]:
    rows = table.cast(FOLDED_ARROW).to_pylist(maps_as_pydicts="strict")
    return sorted(rows, key=lambda row: (row["relation"] or 0, row["position"], row["ordinal"], row["op"]))


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


@examples(6)
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


NULLS = example(change(0, "c", "a", after={1: "a", 2: None, 3: ""}))
NULLS_LATER = example(*NULLS, partial(1, "a", {1: "a", 3: None}))


def test_a_null_value_stays_null_and_an_absent_column_absent() -> None:
    assert state(folded(NULLS)) == [("u", ["a"], {1: "a", 2: None, 3: ""}, True, None)]
    assert state(folded(NULLS_LATER)) == [("u", ["a"], {1: "a", 2: None, 3: None}, True, None)]


ONE_LIFE = example(
    partial(0, "a", {1: "a", 2: "x", 3: "old"}), partial(1, "a", {1: "a", 2: "y"}), partial(2, "a", {4: None})
)


def test_partial_images_of_one_life_are_merged_and_wait_for_the_row_of_their_own_key() -> None:
    assert state(folded(ONE_LIFE)) == [("u", ["a"], {1: "a", 2: "y", 3: "old", 4: None}, False, None)]


DELETED = example(partial(0, "a", {1: "a", 2: "x"}), change(1, "d", "a", before={1: "a"}))


def test_a_delete_hides_the_images_before_it() -> None:
    assert state(folded(DELETED)) == [("d", ["a"], None, True, None)]


NEW_LIFE = example(
    change(0, "c", "a", after={1: "a", 2: "x", 3: "y"}),
    change(1, "d", "a"),
    change(2, "c", "a", after={1: "a", 2: None}),
    partial(3, "a", {1: "a"}),
)


def test_a_new_life_takes_nothing_from_the_one_before() -> None:
    assert state(folded(NEW_LIFE)) == [("u", ["a"], {1: "a", 2: None}, True, None)]


MOVE_ONTO_DELETED = example(change(0, "d", "b"), change(1, "d", "a"), partial(2, "b", {1: "b"}, old="a"))


def test_a_partial_move_onto_a_deleted_key_waits_for_the_old_key() -> None:
    assert state(folded(MOVE_ONTO_DELETED)) == [("d", ["a"], None, True, None), ("u", ["b"], {1: "b"}, False, ["a"])]


CHAIN = example(
    partial(0, "a", {1: "a", 2: "x"}),
    change(1, "d", "a"),
    partial(2, "b", {1: "b", 3: "y"}, old="a"),
    change(3, "d", "b"),
    partial(4, "c", {1: "c"}, old="b"),
    partial(5, "c", {1: "c", 4: "z"}),
)


def test_a_chain_of_moves_names_the_key_the_target_knows() -> None:
    assert state(folded(CHAIN))[-1] == ("u", ["c"], {1: "c", 2: "x", 3: "y", 4: "z"}, False, ["a"])


WHOLE_CHAIN = example(
    change(0, "c", "a", after={1: "a", 2: "x", 3: None}),
    change(1, "d", "a"),
    partial(2, "b", {1: "b"}, old="a"),
    change(3, "c", "a", after={1: "a", 2: "later"}),
    change(4, "d", "b"),
    partial(5, "c", {1: "c"}, old="b"),
)


def test_a_chain_that_begins_with_a_full_image_is_complete() -> None:
    assert state(folded(WHOLE_CHAIN))[-1] == ("u", ["c"], {1: "c", 2: "x", 3: None}, True, None)


SWAP = example(
    change(0, "d", "a"),
    partial(1, "t", {1: "t"}, old="a"),
    change(2, "d", "b"),
    partial(3, "a", {1: "a"}, old="b"),
    change(4, "d", "t"),
    partial(5, "b", {1: "b"}, old="t"),
)


def test_two_keys_that_swap_through_a_third_name_each_other() -> None:
    assert state(folded(SWAP)) == [
        ("u", ["a"], {1: "a"}, False, ["b"]),
        ("d", ["t"], None, True, None),
        ("u", ["b"], {1: "b"}, False, ["a"]),
    ]


PARTS = example(
    change(0, "d", "a"),
    change(1, "c", "a", after={1: "a"}, partial=True),
    partial(2, "a", {2: "x"}),
    change(3, "c", "b", after={1: "b"}, partial=True),
    change(4, "d", "b"),
    partial(5, "c", {1: "c"}, old="b"),
    change(6, "c", "d", after={1: "d"}, partial=True),
    change(7, "r", "d", after={1: "d", 2: "y"}),
)


def test_a_row_that_came_in_parts_has_nothing_of_an_older_one_of_its_key_wherever_it_moves() -> None:
    assert sorted(state(folded(PARTS)), key=lambda row: row[1]) == [
        ("u", ["a"], {1: "a", 2: "x"}, False, [None]),
        ("d", ["b"], None, True, None),
        ("u", ["c"], {1: "c"}, False, [None]),
        ("u", ["d"], {1: "d", 2: "y"}, True, None),
    ]


WHOLE = {2: "x", 3: "y", 4: "z"}
COPIED = example(
    log_row(1, (5, 0), "s", payload=b"{}"),
    log_row(1, (6, 0), "u", key=["a"], after={1: "a", 2: "x"}, partial=True),
    log_row(1, (6, 1), "d", key=["b"], before={1: "b"}),
    log_row(1, (6, 2), "u", key=["c"], old_key=["b"], after={1: "c", 3: "y"}, partial=True),
    log_row(1, (7, 0), "r", key=["a"], after={1: "a"} | WHOLE),
    log_row(1, (8, 0), "r", key=["c"], after={1: "c"} | WHOLE),
    log_row(1, (9, 0), "u", key=["c"], after={1: "c", 4: None}, partial=True),
    log_row(1, (10, 0), "g", payload=b"5"),
)


def test_a_row_that_is_copied_later_completes_the_images_that_came_before_it() -> None:
    """A whole copy in one range: an image of a key not read yet, and one that moved to another key."""
    found = state([row for row in folded(COPIED) if row["op"] in ("u", "d")])
    assert sorted(found, key=str) == [
        ("d", ["b"], None, True, None),
        ("u", ["a"], {1: "a"} | WHOLE, True, None),
        ("u", ["c"], {1: "c"} | WHOLE | {4: None}, True, None),
    ]


FENCED = example(
    log_row(1, (5, 0), "c", key=["a"], after={1: "a"}),
    log_row(1, (6, 0), "c", key=["b"], after={1: "b"}),
    log_row(1, (6, 1), "t"),
    log_row(1, (6, 2), "c", key=["c"], after={1: "c"}),
    log_row(2, (5, 0), "c", key=["a"], after={1: "a"}),
    log_row(3, (5, 0), "c", key=["a"], after={1: "a"}),
    log_row(3, (6, 0), "r", key=["b"], after={1: "b"}),
    log_row(3, (7, 0), "g", payload=b"6"),
)


def test_rows_before_a_truncate_or_a_generation_are_dropped() -> None:
    seen = [(row["relation"], row["op"], row["key"]) for row in folded(FENCED)]
    assert seen == [(1, "t", None), (1, "u", ["c"]), (2, "u", ["a"]), (3, "u", ["b"]), (3, "g", None)]


CONTROL = example(
    log_row(1, (5, 0), "s", payload=b"{}"),
    log_row(1, (5, 1), "s", payload=b"[]"),
    message_row((5, 2)),
    log_row(1, (6, 0), "b") | {"relation": None, "topic": None},
)


def test_control_rows_and_boundaries_pass_and_messages_do_not() -> None:
    seen = [(row["op"], row["payload"], row["complete"]) for row in folded(CONTROL)]
    assert sorted(seen, key=str) == [("b", None, None), ("s", b"[]", None), ("s", b"{}", None)]


ADDRESSED = example(
    change(0, "c", "a", after={1: "a"}),
    change(1, "r", "a", after={1: "b"}, address="theirs"),
    log_row(1, (1, 2), "t", address="theirs"),
)


def test_rows_addressed_to_another_sink_hide_nothing() -> None:
    assert state(folded(ADDRESSED)) == [("u", ["a"], {1: "a"}, True, None)]


KEYLESS = example(
    log_row(1, (1, 0), "c", after={1: "x"}),
    log_row(1, (1, 1), "c", after={1: "x"}),
    log_row(1, (1, 2), "d", before={1: "x"}),
    log_row(1, (1, 3), "u", before={1: "x"}, after={1: "y"}),
    change(4, "c", "a", after={1: "a"}),
)


def test_rows_of_a_keyless_table_are_not_folded() -> None:
    *seen, went, came, other = state(folded(KEYLESS))
    assert seen == [("u", None, {1: "x"}, True, None)] * 2 + [("d", None, {1: "x"}, True, None)]
    assert sorted([went, came], key=str) == [("d", None, {1: "x"}, True, None), ("u", None, {1: "y"}, True, None)]
    assert other == ("u", ["a"], {1: "a"}, True, None)
