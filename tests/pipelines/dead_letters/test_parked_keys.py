"""Parked keys of a table in its latest state, and how a batch changes them."""

from __future__ import annotations

from typing import Any

import pytest

from cdc.errors import MissingBase
from cdc.targets.dead_letter_rows import Key, ParkedRow
from pipelines.dead_letters.parked_keys import affects_parked, changed_entries, count_parked_keys, overlay_parked
from pipelines.sinks.contract import TableBatch
from tests.contracts.folded import ORDERS, Row, batch, gone, part, put


def parked_row(key: str = "1", position: int = 5, **fields: Any) -> ParkedRow:
    values: dict[str, Any] = {
        "relation": ORDERS.relation,
        "topic": ORDERS.topic,
        "key": (key,),
        "position": position,
        "ordinal": 0,
        "committed_at": 0,
        "image": {1: key, 2: "parked", 3: "1.00"},
        "complete": True,
        "code": MissingBase.code,
        "message": "",
        "first_at": 0,
        "upto": position,
    }
    return ParkedRow(**values | fields)


PARKED: dict[Key, ParkedRow] = {("1",): parked_row()}


def batch_of(*rows: Row, **fields: Any) -> TableBatch:
    return batch(list(rows), 0, 20, **fields)


@pytest.mark.parametrize(
    ("rows", "expected"), [([put(2, "b", 9)], False), ([put(1, "b", 9)], True), ([gone(1, 9)], True)]
)
def test_a_batch_affects_parked_keys_that_it_changes(rows: list[Row], expected: bool) -> None:
    assert affects_parked(PARKED, batch_of(*rows)) is expected
    assert not affects_parked({}, batch_of(*rows))


def test_a_partial_image_is_overlaid_on_the_parked_row() -> None:
    offered = overlay_parked(PARKED, batch_of(part(1, 9, {3: "2.00"}), put(2, "b", 9)), ())

    rows = {row["key"][0]: (dict(row["after"]), row["complete"]) for row in offered.rows.to_pylist()}
    assert rows["1"] == ({1: "1", 2: "parked", 3: "2.00"}, True)
    assert set(rows) == {"1", "2"}
    assert offered.waiting == {}


def test_an_incomplete_parked_row_waits_with_the_overlaid_image() -> None:
    waiting: dict[Key, ParkedRow] = {("1",): parked_row(image={2: "parked"}, complete=False)}
    offered = overlay_parked(waiting, batch_of(part(1, 9, {3: "2.00"})), [("1",)])

    assert offered.rows.num_rows == 0
    assert offered.waiting["1",].image == {1: "1", 2: "parked", 3: "2.00"}
    assert offered.waiting["1",].position == 9


def test_only_changed_entries_are_stored() -> None:
    before: dict[Key, ParkedRow] = {("1",): parked_row(), ("2",): parked_row("2")}
    after: dict[Key, ParkedRow] = {("1",): before["1",], ("3",): parked_row("3")}

    entries = changed_entries(before, after, 20)
    assert [(entry.row.key, entry.row.upto) for entry in entries] == [(("3",), 5), (("2",), 20)]


def test_parked_keys_of_a_batch_are_counted() -> None:
    rows = batch_of(put(1, "a", 9), put(2, "b", 9)).rows

    assert count_parked_keys(rows, PARKED) == (1, 2)
    assert count_parked_keys(None, PARKED) == (0, 0)
