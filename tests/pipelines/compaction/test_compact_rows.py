"""Compacted rows fold like the original rows, whatever rows come after them."""

from __future__ import annotations

from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.log_row import LOG_SCHEMA
from pipelines.compaction.compact_rows import (
    NARROW_COLUMNS,
    compact_rows,
    needed_row_numbers,
    remove_tombstones,
)
from pipelines.folding.key_parts import partial_moves
from tests.fixtures.examples import examples
from tests.pipelines.cold_log import cut, folded, histories, history
from tests.pipelines.fold_model import OTHER_SINK, SINK, Row, Target, log_row, message_row, to_arrow

HISTORIES = 8


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
def test_compacted_rows_fold_like_the_original_ones_for_every_cut(seed: int) -> None:
    older, newer = cut(every_row(seed), Random(seed), 2)

    assert folded(compact_rows(older), newer) == folded(older, newer)


@examples(4)
@given(seed=st.integers(0, 2**32 - 1), after=st.sampled_from([0, 12]))
def test_the_needed_rows_compact_to_the_same_result_as_all_rows(seed: int, after: int) -> None:
    older, newer = cut(every_row(seed), Random(seed), 2)
    rows = pa.concat_tables([older, newer])
    first, both = needed_rows(older), needed_rows(rows)
    assert compact_rows(first, after) == compact_rows(older, after)
    assert compact_rows(both, after) == compact_rows(rows, after)
    assert compact_rows(needed_rows(pa.concat_tables([first, newer])), after) == compact_rows(rows, after)
    assert both.num_rows < rows.num_rows


def needed_rows(rows: pa.Table) -> pa.Table:
    return rows.take(needed_row_numbers(rows.select(NARROW_COLUMNS)))


@examples(4)
@given(seed=st.integers(0, 2**32 - 1))
def test_compacting_twice_is_compacting_once(seed: int) -> None:
    first, second, newer = cut(every_row(seed), Random(seed), 3)

    twice = compact_rows(pa.concat_tables([compact_rows(first), second]))
    assert twice == compact_rows(pa.concat_tables([first, second]))
    assert folded(twice, newer) == folded(first, second, newer)
    assert compact_rows(twice) == twice


@examples(4)
@given(seed=st.integers(0, 2**32 - 1))
def test_runs_with_base_rows_of_older_runs_fold_like_the_log(seed: int) -> None:
    pieces = cut(every_row(seed), Random(seed), 4)
    *colder, newer = pieces
    runs: list[pa.Table] = []
    end = 0
    for rows in colder:
        runs.append(compact_rows(pa.concat_tables([rows, *(base_rows(rows, run) for run in runs)]), after=end))
        assert not partial_moves(runs[-1]).num_rows
        assert rows.num_rows == 0 or pc.min(rows["position"]).as_py() > end
        end = max([end, *rows["position"].to_pylist()])

    assert folded(*runs, newer) == folded(*pieces)
    base = compact_rows(pa.concat_tables(runs[:2]))
    assert folded(base, runs[2], newer) == folded(*pieces)
    assert folded(compact_rows(pa.concat_tables([base, runs[2]])), newer) == folded(*pieces)


def base_rows(rows: pa.Table, run: pa.Table) -> pa.Table:
    """The rows of a run with old keys of moved rows, and the truncates and generation ends of their relations."""
    moves = partial_moves(rows)
    keys = {(row["relation"], *row["old_key"]) for row in moves.to_pylist()}
    relations = {relation for relation, _ in keys}
    wanted = [
        (row["relation"] in relations and row["op"] in "tg") or (row["relation"], *(row["key"] or ())) in keys
        for row in run.to_pylist()
    ]
    return run.filter(pa.array(wanted, pa.bool_()))


@examples(3)
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_addressed_to_one_sink_are_right_for_every_sink(seed: int) -> None:
    for number in range(HISTORIES):
        source = history(number, Random(f"{seed} {number}"), addressed=True)
        if source.log[-1]["key"] is None:
            continue
        older, newer = cut(source.log, source.random, 2)
        for sink in (SINK, OTHER_SINK) if not any(row["op"] == "g" for row in source.log) else (SINK,):
            plain, compact = Target(), Target()
            plain.apply(folded(older, newer, sink=sink))
            compact.apply(folded(compact_rows(older), newer, sink=sink))
            assert compact.table == plain.table


@examples(3)
@given(seed=st.integers(0, 2**32 - 1), floor=st.integers(8, 30))
def test_without_tombstones_a_new_target_is_the_same(seed: int, floor: int) -> None:
    for number in range(HISTORIES):
        source = history(number, Random(f"{seed} {number}"))
        older, newer = cut(source.log, source.random, 2)
        left = remove_tombstones(compact_rows(older), floor)
        gone = [row for row in listed(left) if row["op"] == "d" and row["key"] and row["position"] <= floor]
        assert not gone
        if source.log[-1]["key"] is not None:
            target = Target()
            target.apply(folded(left, newer))
            assert target.table == source.table


def test_a_key_keeps_its_latest_row_without_old_images() -> None:
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
    found = compact_rows(to_arrow(rows))
    assert found.schema == LOG_SCHEMA
    assert listed(found) == expected


def test_partial_images_become_one_image_that_is_partial_or_complete() -> None:
    rows = [
        change((5, 0), "c", "a", after={1: "a", 2: "x", 3: "y"}),
        partial((6, 0), "a", {1: "a", 2: None}),
        partial((5, 1), "b", {1: "b", 3: "y"}),
        partial((6, 1), "b", {1: "b", 4: "z"}),
    ]

    found = [(row["op"], row["position"], row["after"], row["partial"]) for row in listed(compact_rows(to_arrow(rows)))]
    assert found == [("u", 6, {1: "a", 2: None, 3: "y"}, False), ("u", 6, {1: "b", 3: "y", 4: "z"}, True)]


def test_a_partial_insert_stays_an_insert_without_a_base_row() -> None:
    older = compact_rows(to_arrow([change((1, 0), "r", "a", after={1: "a", 2: "old"})]))
    came = [change((5, 0), "d", "a"), change((6, 0), "c", "a", after={1: "a"}, partial=True)]
    later = compact_rows(to_arrow([*came, partial((7, 0), "a", {3: "x"})]))
    for rows in (later, compact_rows(pa.concat_tables([older, later]))):
        (row,) = listed(rows)
        assert (row["op"], dict(row["after"]), row["partial"], row["old_key"]) == ("c", {1: "a", 3: "x"}, True, None)


def test_a_move_is_completed_from_an_older_base_row_that_is_not_repeated() -> None:
    older = [change((5, 0), "c", "a", after={1: "a", 2: "x"}), log_row(1, (4, 0), "t")]
    moves = [change((9, 0), "d", "a"), partial((9, 1), "b", {1: "b"}, old="a")]

    alone = listed(compact_rows(to_arrow(moves)))
    assert [(row["key"], row["partial"], row["old_key"]) for row in alone] == [
        (["a"], False, None),
        (["b"], True, None),
    ]
    completed = listed(compact_rows(to_arrow([*moves, *older]), after=5))
    assert [(row["key"], row["op"], row["partial"], row["after"]) for row in completed] == [
        (["a"], "d", False, None),
        (["b"], "u", False, {1: "b", 2: "x"}),
    ]


def test_schemas_and_the_last_truncates_and_generations_stay() -> None:
    rows = [
        log_row(1, (5, 0), "s", payload=b"{}"),
        log_row(1, (6, 0), "s", payload=b"[]", address=SINK),
        log_row(1, (5, 1), "t"),
        log_row(1, (7, 0), "t", address=SINK),
        log_row(1, (9, 0), "g", payload=b"6"),
        log_row(1, (8, 0), "g", payload=b"7"),
        log_row(1, (7, 1), "g", payload=b"5"),
        message_row((9, 1)),
        log_row(2, (5, 2), "t"),
    ]

    found = [(row["relation"], row["op"], row["position"]) for row in listed(compact_rows(to_arrow(rows)))]
    assert found == [(1, "s", 5), (1, "s", 6), (1, "t", 7), (1, "g", 8), (1, "g", 9), (2, "t", 5)]
    assert not any(row["address"] for row in listed(compact_rows(to_arrow(rows))))


def test_rows_without_a_key_are_unchanged_after_the_last_truncate() -> None:
    rows = [
        log_row(1, (5, 0), "c", after={1: "x"}),
        log_row(1, (6, 0), "t"),
        *(log_row(1, (7, n), "c", after={1: "x"}) for n in range(2)),
        log_row(1, (8, 0), "d", before={1: "x"}),
    ]

    found = compact_rows(to_arrow(rows))
    assert listed(found) == rows[1:]
    assert remove_tombstones(found, 100) == found


@pytest.mark.parametrize("after", [0, 7])
def test_an_empty_range_compacts_to_no_rows(after: int) -> None:
    assert compact_rows(to_arrow([]), after) == to_arrow([])
