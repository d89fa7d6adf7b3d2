"""Compacted rows: they fold as the rows did that they stand for, whatever comes after them."""

from __future__ import annotations

from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.change import LOG_SCHEMA
from pipelines.compaction.compact_rows import SURVEYED, compacted, moved, needed, without_tombstones
from tests.fixtures.examples import examples
from tests.pipelines.cold_log import cut, folded, histories, history
from tests.pipelines.lives import OTHER_SINK, SINK, Row, Target, log_row, to_arrow

HISTORIES = 40


def change(place: tuple[int, int], op: str, key: str, **fields: Any) -> Row:
    return log_row(1, place, op, key=[key], **fields)


def partial(place: tuple[int, int], key: str, after: dict[int, str | None], old: str | None = None) -> Row:
    return change(place, "u", key, after=after, partial=True, old_key=None if old is None else [old])


def listed(rows: pa.Table) -> list[Row]:
    return rows.to_pylist(maps_as_pydicts="strict")


def every_row(seed: int) -> list[Row]:
    return [row for source in histories(seed, HISTORIES) for row in source.log]


@examples(4)
@given(seed=st.integers(0, 2**32 - 1))
def test_wherever_the_log_is_cut_what_is_compacted_folds_as_it_did(seed: int) -> None:
    older, newer = cut(every_row(seed), Random(seed), 2)

    assert folded(compacted(older), newer) == folded(older, newer)


@examples(4)
@given(seed=st.integers(0, 2**32 - 1), after=st.sampled_from([0, 12]))
def test_of_all_rows_the_needed_ones_come_to_the_same_and_narrow_columns_tell_which(seed: int, after: int) -> None:
    older, newer = cut(every_row(seed), Random(seed), 2)
    rows = pa.concat_tables([older, newer])
    first, both = taken(older), taken(rows)
    assert compacted(first, after) == compacted(older, after)
    assert compacted(both, after) == compacted(rows, after)
    assert compacted(taken(pa.concat_tables([first, newer])), after) == compacted(rows, after)
    assert both.num_rows < rows.num_rows


def taken(rows: pa.Table) -> pa.Table:
    return rows.take(needed(rows.select(SURVEYED)))


@examples(4)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_compacted_twice_folds_as_what_is_compacted_once(seed: int) -> None:
    first, second, newer = cut(every_row(seed), Random(seed), 3)

    twice = compacted(pa.concat_tables([compacted(first), second]))
    assert twice == compacted(pa.concat_tables([first, second]))
    assert folded(twice, newer) == folded(first, second, newer)
    assert compacted(twice) == twice


@examples(4)
@given(seed=st.integers(0, 2**32 - 1))
def test_runs_completed_from_older_ones_fold_as_the_log_and_so_do_runs_merged(seed: int) -> None:
    pieces = cut(every_row(seed), Random(seed), 4)
    *colder, newer = pieces
    runs: list[pa.Table] = []
    end = 0
    for rows in colder:
        runs.append(compacted(pa.concat_tables([rows, *(left_behind(rows, run) for run in runs)]), after=end))
        assert not moved(runs[-1]).num_rows
        assert rows.num_rows == 0 or pc.min(rows["position"]).as_py() > end
        end = max([end, *rows["position"].to_pylist()])

    assert folded(*runs, newer) == folded(*pieces)
    base = compacted(pa.concat_tables(runs[:2]))
    assert folded(base, runs[2], newer) == folded(*pieces)
    assert folded(compacted(pa.concat_tables([base, runs[2]])), newer) == folded(*pieces)


def left_behind(rows: pa.Table, run: pa.Table) -> pa.Table:
    """What a run holds of the keys that rows moved away from, and what ended rows of their relations."""
    moves = moved(rows)
    keys = {(row["relation"], *row["old_key"]) for row in moves.to_pylist()}
    relations = {relation for relation, _ in keys}
    wanted = [
        (row["relation"] in relations and row["op"] in "tg") or (row["relation"], *(row["key"] or ())) in keys
        for row in run.to_pylist()
    ]
    return run.filter(pa.array(wanted, pa.bool_()))


@examples(3)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_target_of_any_sink_is_the_same_from_rows_that_were_for_one(seed: int) -> None:
    for number in range(HISTORIES):
        source = history(number, Random(f"{seed} {number}"), addressed=True)
        if source.log[-1]["key"] is None:
            continue
        older, newer = cut(source.log, source.random, 2)
        for sink in (SINK, OTHER_SINK) if not any(row["op"] == "g" for row in source.log) else (SINK,):
            plain, spared = Target(), Target()
            plain.apply(folded(older, newer, sink=sink))
            spared.apply(folded(compacted(older), newer, sink=sink))
            assert spared.table == plain.table


@examples(3)
@given(seed=st.integers(0, 2**32 - 1), floor=st.integers(8, 30))
def test_without_tombstones_a_new_target_is_the_same(seed: int, floor: int) -> None:
    for number in range(HISTORIES):
        source = history(number, Random(f"{seed} {number}"))
        older, newer = cut(source.log, source.random, 2)
        held = without_tombstones(compacted(older), floor)
        gone = [row for row in listed(held) if row["op"] == "d" and row["key"] and row["position"] <= floor]
        assert not gone
        if source.log[-1]["key"] is not None:
            target = Target()
            target.apply(folded(held, newer))
            assert target.table == source.table


def test_a_key_stays_as_its_latest_row_with_nothing_of_the_past() -> None:
    rows = [
        change((5, 0), "c", "a", after={1: "a", 2: "x"}, xid=3, address=SINK),
        change((6, 0), "u", "a", before={1: "a", 2: "x"}, after={1: "a", 2: None}, xid=4),
        change((6, 1), "d", "b", before={1: "b", 2: "y"}, xid=4),
        change((7, 0), "u", "c", old_key=["b"], before={1: "b"}, after={1: "c", 2: "z"}, address=SINK),
    ]

    expected = [
        rows[1] | {"before": None},
        rows[2] | {"before": None},
        rows[3] | {"before": None, "old_key": None, "address": None},
    ]
    found = compacted(to_arrow(rows))
    assert found.schema == LOG_SCHEMA
    assert listed(found) == expected


def test_partial_images_become_one_that_says_whether_it_is_whole() -> None:
    rows = [
        change((5, 0), "c", "a", after={1: "a", 2: "x", 3: "y"}),
        partial((6, 0), "a", {1: "a", 2: None}),
        partial((5, 1), "b", {1: "b", 3: "y"}),
        partial((6, 1), "b", {1: "b", 4: "z"}),
    ]

    found = [(row["op"], row["position"], row["after"], row["partial"]) for row in listed(compacted(to_arrow(rows)))]
    assert found == [("u", 6, {1: "a", 2: None, 3: "y"}, False), ("u", 6, {1: "b", 3: "y", 4: "z"}, True)]


def test_a_row_that_came_in_parts_stays_new_whatever_is_under_it() -> None:
    older = compacted(to_arrow([change((1, 0), "r", "a", after={1: "a", 2: "old"})]))
    came = [change((5, 0), "d", "a"), change((6, 0), "c", "a", after={1: "a"}, partial=True)]
    later = compacted(to_arrow([*came, partial((7, 0), "a", {3: "x"})]))
    for rows in (later, compacted(pa.concat_tables([older, later]))):
        (row,) = listed(rows)
        assert (row["op"], dict(row["after"]), row["partial"], row["old_key"]) == ("c", {1: "a", 3: "x"}, True, None)


def test_a_move_without_its_base_is_completed_from_older_rows_which_do_not_come_again() -> None:
    older = [change((5, 0), "c", "a", after={1: "a", 2: "x"}), log_row(1, (4, 0), "t")]
    moves = [change((9, 0), "d", "a"), partial((9, 1), "b", {1: "b"}, old="a")]

    alone = listed(compacted(to_arrow(moves)))
    assert [(row["key"], row["partial"], row["old_key"]) for row in alone] == [
        (["a"], False, None),
        (["b"], True, None),
    ]
    helped = listed(compacted(to_arrow([*moves, *older]), after=5))
    assert [(row["key"], row["op"], row["partial"], row["after"]) for row in helped] == [
        (["a"], "d", False, None),
        (["b"], "u", False, {1: "b", 2: "x"}),
    ]


def test_of_controls_those_stay_that_count() -> None:
    rows = [
        log_row(1, (5, 0), "s", payload=b"{}"),
        log_row(1, (6, 0), "s", payload=b"[]", address=SINK),
        log_row(1, (5, 1), "t"),
        log_row(1, (7, 0), "t", address=SINK),
        log_row(1, (9, 0), "g", payload=b"6"),
        log_row(1, (8, 0), "g", payload=b"7"),
        log_row(1, (7, 1), "g", payload=b"5"),
        log_row(1, (9, 1), "m", payload=b"hello"),
        log_row(2, (5, 2), "t"),
    ]

    found = [(row["relation"], row["op"], row["position"]) for row in listed(compacted(to_arrow(rows)))]
    assert found == [(1, "s", 5), (1, "s", 6), (1, "t", 7), (1, "g", 8), (1, "g", 9), (2, "t", 5)]
    assert not any(row["address"] for row in listed(compacted(to_arrow(rows))))


def test_rows_without_a_key_stay_as_they_are_but_for_those_that_are_gone() -> None:
    rows = [
        log_row(1, (5, 0), "c", after={1: "x"}),
        log_row(1, (6, 0), "t"),
        *(log_row(1, (7, n), "c", after={1: "x"}) for n in range(2)),
        log_row(1, (8, 0), "d", before={1: "x"}),
    ]

    found = compacted(to_arrow(rows))
    assert listed(found) == rows[1:]
    assert without_tombstones(found, 100) == found


@pytest.mark.parametrize("after", [0, 7])
def test_nothing_is_compacted_to_nothing(after: int) -> None:
    assert compacted(to_arrow([]), after) == to_arrow([])
