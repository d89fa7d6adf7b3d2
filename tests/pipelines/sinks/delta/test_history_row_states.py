"""Complete changes: each change as a complete row, from stored rows and earlier changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cdc.errors import MissingBase
from cdc.table import TableState
from pipelines.folding.history_changes import GenerationEnd
from pipelines.sinks.delta.history_row_states import RowStates, StoredRows, complete_changes
from pipelines.sinks.delta.target_columns import RowShape
from pipelines.types.families import TypePolicy
from tests.contracts.folded import ORDERS, folded, gone, part, put
from tests.contracts.histories import RELATION, SETTINGS, TABLE, Lake
from tests.pipelines.fold_model import log_row


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


SHAPE = RowShape(ORDERS, TypePolicy.EXACT)
NO_ROWS = StoredRows(SHAPE.columns.empty_table(), np.zeros(0, bool))


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
