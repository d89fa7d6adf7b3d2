"""Folded rows of a batch, divided into images and control events by table."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from pipelines.folding.fold import FOLDED_ARROW
from pipelines.folding.folded_batch import TAKEN_ROWS, split_by_table
from pipelines.folding.history_changes import GenerationEnd
from tests.contracts.folded import ORDERS

COMMITTED_US = 1_000_000


def folded_row(relation: int | None, op: str, position: int, **fields: Any) -> dict[str, Any]:
    return {"relation": relation, "op": op, "position": position, "ordinal": 0} | fields


def test_images_and_control_events_are_divided_by_relation() -> None:
    committed_at = datetime.fromtimestamp(1, UTC)
    rows = [
        folded_row(1, "u", 5, key=["a"], complete=True),
        folded_row(2, "d", 6, key=["b"], complete=True),
        folded_row(1, "g", 9, payload=b"4", committed_at=committed_at),
        folded_row(1, "t", 7, committed_at=committed_at),
        folded_row(3, "s", 8, payload=ORDERS.to_json()),
        folded_row(None, "b", 9),
    ]
    batch = split_by_table(pa.Table.from_pylist(rows, FOLDED_ARROW))

    assert batch.relations == [1, 2, 3]
    assert [batch.rows_of(relation)["key"].to_pylist() for relation in batch.relations] == [[["a"]], [["b"]], []]
    assert batch.count_rows([1, 2, 3]) == {1: 1, 2: 1, 3: 0}
    assert (batch.controls[1].truncated, batch.controls[1].generation) == ((7, 0), 4)
    assert batch.controls[1].endings == (GenerationEnd(7, 0, COMMITTED_US), GenerationEnd(9, 0, COMMITTED_US, 4))
    assert batch.controls[3].schema == ORDERS
    assert 2 not in batch.controls


def test_a_batch_of_one_table_is_not_copied() -> None:
    folded = pa.Table.from_pylist([folded_row(1, "u", 5, key=["a"]), folded_row(1, "d", 6, key=["b"])], FOLDED_ARROW)
    batch = split_by_table(folded)

    assert batch.images is folded
    assert batch.rows_of(1) is folded
    assert batch.rows_of(2).num_rows == 0
    assert batch.count_rows([1]) == {1: 2}


@pytest.mark.parametrize("copies", [1, TAKEN_ROWS])
def test_every_table_gets_its_own_rows_in_order(copies: int) -> None:
    rows = [folded_row(relation, "u", n, key=[str(n)]) for n, relation in enumerate([7, 7, 7, 2, 9, 2, 9])]
    made = pa.Table.from_pylist(rows, FOLDED_ARROW)
    batch = split_by_table(made.take(pa.array(list(range(len(rows))) * copies)))
    found = {relation: batch.rows_of(relation)["position"].to_pylist() for relation in batch.relations}

    assert found == {2: [3, 5] * copies, 7: [0, 1, 2] * copies, 9: [4, 6] * copies}


def test_rows_that_follow_each_other_are_not_copied() -> None:
    rows = [folded_row(relation, "u", n, key=["a"]) for n, relation in enumerate([7, 7, 2])]
    batch = split_by_table(pa.Table.from_pylist(rows, FOLDED_ARROW))
    first, whole = (table["position"].chunk(0).buffers()[1] for table in (batch.rows_of(7), batch.images))

    assert first.address == whole.address


def test_a_batch_without_rows_has_none_of_any_table() -> None:
    batch = split_by_table(FOLDED_ARROW.empty_table())

    assert (batch.relations, batch.count_rows([1]), batch.rows_of(1).num_rows) == ([], {1: 0}, 0)
