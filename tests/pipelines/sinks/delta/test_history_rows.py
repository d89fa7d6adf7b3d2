"""Rows of each history mode, made from the states of a small table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cdc.config import TableSettings
from cdc.config.sinks import HistoryMode
from pipelines.folding.history_changes import GenerationEnd
from pipelines.sinks.delta.history_row_states import RowStates, StoredRows, complete_changes
from pipelines.sinks.delta.history_rows import change_rows, marked_rows, tracked_columns, version_rows
from pipelines.sinks.delta.target_columns import RowShape
from pipelines.types.families import TypePolicy
from tests.contracts.folded import ORDERS, Row, folded, gone, put

SHAPE = RowShape(ORDERS, TypePolicy.EXACT)
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


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["item", "price"]),
        ({"track_history_column_list": ("price",)}, ["price"]),
        ({"track_history_except_column_list": ("price",)}, ["item"]),
    ],
)
def test_tracked_are_the_listed_columns_outside_of_the_key(settings: dict[str, Any], expected: list[str]) -> None:
    settings = {"stored_as_scd_type": 2, **settings}

    assert tracked_columns(SHAPE, ORDERS, TableSettings(**settings)) == expected


def test_a_tracked_column_is_named_as_at_the_source() -> None:
    renamed = replace(ORDERS, columns=tuple(replace(one, name=f"{one.name}_2") for one in ORDERS.columns))
    settings = TableSettings(stored_as_scd_type=2, track_history_column_list=("item_2",))

    assert tracked_columns(SHAPE, renamed, settings) == ["item"]
