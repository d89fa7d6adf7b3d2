"""Rows of each history mode, and the complete states from which they are made: of stored rows and earlier changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cdc.config.delta_sink import HistoryMode
from cdc.errors import MissingBase
from cdc.table import TableState
from pipelines.folding.history_changes import GenerationEnd
from pipelines.sinks.delta.history_rows import (
    RowStates,
    StoredRows,
    change_rows,
    complete_changes,
    marked_rows,
    version_rows,
)
from pipelines.sinks.delta.target_columns import RowShape
from pipelines.types.families import TypePolicy
from tests.contracts.folded import ORDERS, Row, folded, gone, part, put
from tests.contracts.histories import RELATION, SETTINGS, TABLE, Lake
from tests.pipelines.fold_model import log_row

SHAPE = RowShape(ORDERS, TypePolicy.EXACT)
NO_ROWS = StoredRows(SHAPE.columns.empty_table(), np.zeros(0, bool))
TRUNCATE, COPY_END = GenerationEnd(30, 0, 7), GenerationEnd(30, 0, 7, began=12)


def no_rows(mode: HistoryMode) -> StoredRows:
    return StoredRows(SHAPE.columns_in_mode(mode).empty_table(), np.zeros(0, bool))


def states_of(*rows: Row, mode: HistoryMode, endings: tuple[GenerationEnd, ...] = ()) -> RowStates:
    return complete_changes(folded(list(rows)), no_rows(mode), endings, SHAPE)


def versions(*rows: Row, tracked: tuple[str, ...] = ("item", "price"), **more: Any) -> list[tuple[Any, ...]]:
    """(id, item, start, end) of every version."""
    mode = HistoryMode.VERSIONS
    found = version_rows(states_of(*rows, mode=mode, **more), no_rows(mode), tracked)
    return [(row["id"], row["item"], row["__START_AT"], row["__END_AT"]) for row in found.to_pylist()]


def test_a_version_ends_where_the_next_one_or_a_delete_begins() -> None:
    assert versions(put(1, "a", 10), put(1, "b", 11), gone(1, 12), put(2, "c", 13)) == [
        (1, "a", 10, 11),
        (1, "b", 11, 12),
        (2, "c", 13, None),
    ]


def test_an_equal_image_begins_no_version() -> None:
    assert versions(put(1, "a", 10), put(1, "a", 11)) == [(1, "a", 10, None)]


def test_a_change_of_other_columns_changes_the_current_version() -> None:
    assert versions(put(1, "a", 10), put(1, "b", 11), tracked=("price",)) == [(1, "b", 10, None)]


def test_of_one_transaction_only_its_last_state_is_a_version() -> None:
    assert versions(put(1, "a", 10), put(1, "b", 10, ordinal=1)) == [(1, "b", 10, None)]


@pytest.mark.parametrize(("ending", "closed"), [(TRUNCATE, {1, 2}), (COPY_END, {1})])
def test_an_ending_closes_the_versions_before_it(ending: GenerationEnd, closed: set[int]) -> None:
    found = versions(put(1, "a", 10), put(2, "b", 12), endings=(ending,))

    assert {id_ for id_, _, _, end in found if end == 30} == closed


def test_a_deleted_row_keeps_its_last_values_and_gets_the_mark() -> None:
    states = states_of(put(1, "a", 10), gone(1, 11), gone(2, 12), put(3, "c", 13), mode=HistoryMode.MARKED)
    found = marked_rows(states).to_pylist()

    assert [(row["id"], row["item"], row["_position"], row["_deleted"]) for row in found] == [
        (1, "a", 11, True),
        (3, "c", 13, False),
    ]


def test_every_change_and_every_ending_is_a_row() -> None:
    images = folded([put(1, "a", 10), gone(1, 11)])
    states = complete_changes(images, no_rows(HistoryMode.CHANGES), (), SHAPE)
    found = change_rows(states, pa.chunked_array([["c", "d"]]), [TRUNCATE, COPY_END]).to_pylist()

    assert [(row["id"], row["_op"], row["_position"], row["_generation"]) for row in found] == [
        (1, "c", 10, None),
        (1, "d", 11, None),
        (None, "t", 30, None),
        (None, "g", 30, 12),
    ]


def test_a_partial_image_without_a_base_stops_the_table_and_waits_while_the_table_is_copied(tmp_path: Path) -> None:
    rows = [
        log_row(RELATION, (5, 0), "u", key=["1"], after={1: "1", 2: "p"}, partial=True),
        log_row(RELATION, (6, 0), "d", key=["2"], before={1: "2"}),
        log_row(RELATION, (6, 1), "u", key=["3"], old_key=["2"], after={1: "3", 2: "m"}, partial=True),
        log_row(RELATION, (7, 0), "r", key=["1"], after={1: "1", 2: "p", 3: "l", 4: "h"}),
    ]
    copying = replace(TABLE, state=TableState.SNAPSHOTTING)
    for keeping, settings in SETTINGS.items():
        lake = Lake(f"{tmp_path}/{keeping}", settings)
        with pytest.raises(MissingBase, match="has no base row for 2 partial images, the first at 0/5"):
            lake.apply(rows, 0, 7)
        lake.apply(rows, 0, 7, copying)
        assert [row["large"] for row in lake.rows() if row["id"] == 1] == ["l"]
        assert [row for row in lake.rows() if row["id"] == 3] == []


def items(states: RowStates) -> list[tuple[int, str | None, bool]]:
    """(position, item, whether the row exists) of every state."""
    rows = states.rows.to_pylist()
    return [(row["_position"], row["item"], bool(here)) for row, here in zip(rows, states.exists, strict=True)]


def test_a_partial_image_takes_its_columns_from_the_change_before_it_or_from_the_stored_row() -> None:
    stored = StoredRows(SHAPE.rows(folded([put(2, "b", 5)])), np.ones(1, bool))
    images = folded([put(1, "a", 10), part(1, 11, {3: "2.00"}), part(1, 12, {3: "3.00"}), part(2, 13, {3: "4.00"})])
    states = complete_changes(images, stored, (), SHAPE)

    assert items(states) == [(5, "b", True), (13, "b", True), (10, "a", True), (11, "a", True), (12, "a", True)]
    assert [str(price) for price in states.rows["price"].to_pylist()] == ["1.00", "4.00", "1.00", "2.00", "3.00"]
    assert (states.stored.tolist(), states.change.tolist()) == ([0, -1, -1, -1, -1], [-1, 3, 0, 1, 2])


def test_a_moved_row_takes_its_columns_from_its_old_key() -> None:
    images = folded([put(1, "a", 10), gone(1, 11), part(7, 11, {3: "2.00"}, ordinal=1, base=("1",))])

    assert items(complete_changes(images, NO_ROWS, (), SHAPE)) == [(10, "a", True), (11, None, False), (11, "a", True)]


def test_an_ending_removes_the_rows_before_it() -> None:
    images = folded([put(1, "a", 10), put(2, "b", 12), part(1, 40, {3: "2.00"})])

    truncate, copy_end = GenerationEnd(30, 0, 0), GenerationEnd(30, 0, 0, began=12)
    with pytest.raises(MissingBase, match="1 partial images, the first at 0/28"):
        complete_changes(images, NO_ROWS, (truncate,), SHAPE)
    states = complete_changes(images.slice(0, 2), NO_ROWS, (copy_end,), SHAPE)
    assert items(states) == [(10, "a", True), (30, None, False), (12, "b", True)]
