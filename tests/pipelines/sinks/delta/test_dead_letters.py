"""Dead letters of a Delta sink: the table of parked rows, and the rows of a batch that a target refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from cdc.errors import MissingBase, ValueNotRepresentable
from cdc.targets.dead_letter_rows import DeadLetterEntry, ParkedRow, read_entries
from cdc.targets.published_record import Published, TableRecord
from pipelines.sinks.delta.dead_letters import DeadLetterTable, refused_changes, refused_rows
from pipelines.sinks.delta.merge_source import BaseLookup
from pipelines.sinks.delta.target_columns import RowShape, TablePlans
from pipelines.types.families import TypePolicy
from tests.contracts.folded import ORDERS, batch, folded, gone, part, put

SHAPE = RowShape(ORDERS, TypePolicy.EXACT)
ROW = ParkedRow(
    relation=7, topic="shop.orders", key=("1",), position=15, ordinal=0, committed_at=0,
    complete=True, code="CDC-3001", message="a value", first_at=6, upto=20,
)  # fmt: skip
LATER = replace(ROW, key=("2",), position=25, upto=30)


def record_at(position: int, *parked: tuple[str, ...]) -> Published:
    return Published(position, 0, {7: TableRecord(7, "shop.orders", "", position, 1, "streaming", parked=parked)})


@pytest.fixture(name="uri")
def _uri(tmp_path: Path) -> str:
    """A table of parked rows with two batches; the second one was never merged."""
    uri = str(tmp_path / "parked")
    table = DeadLetterTable(uri)
    table.load(record_at(0), {})
    for row in (ROW, LATER):
        table.write(7, row.upto - 10, [DeadLetterEntry(row)])
    return uri


def parked_in(uri: str) -> list[tuple[str, ...]]:
    return [entry.row.key for entry in read_entries(DeltaTable(uri))]


def test_the_table_is_created_with_the_first_parked_row(tmp_path: Path) -> None:
    table = DeadLetterTable(str(tmp_path / "parked"))
    table.load(record_at(0), {})
    table.write(7, 0, [])

    assert not (tmp_path / "parked").exists()
    assert table.rows_of(7) == {}


def test_entries_of_a_batch_that_was_never_merged_are_deleted(uri: str) -> None:
    table = DeadLetterTable(uri)
    table.load(record_at(20, ROW.key), {7: 20})

    assert table.rows_of(7) == {ROW.key: ROW}
    assert parked_in(uri) == [ROW.key]


def test_a_batch_replaces_the_entries_of_a_failed_attempt(uri: str) -> None:
    table = DeadLetterTable(uri)
    table.load(record_at(20, ROW.key), {})
    other = replace(LATER, key=("3",), upto=25)
    table.write(7, 20, [DeadLetterEntry(other)])
    table.confirm(7, {ROW.key: ROW, other.key: other})

    assert set(parked_in(uri)) == {ROW.key, other.key}
    assert set(table.rows_of(7)) == {ROW.key, other.key}


def test_a_batch_without_entries_removes_those_of_a_failed_attempt(uri: str) -> None:
    table = DeadLetterTable(uri)
    table.load(record_at(20, ROW.key), {})
    table.write(7, 20, [DeadLetterEntry(LATER)])
    table.write(7, 20, [])

    assert parked_in(uri) == [ROW.key]


def test_rows_of_an_unpublished_table_count_up_to_its_target(uri: str) -> None:
    table = DeadLetterTable(uri)
    table.load(Published(0, 0), {})
    assert table.rows_of(7) == {}
    table.load_unpublished(7, 20)

    assert table.rows_of(7) == {ROW.key: ROW}


def test_a_rewrite_leaves_the_rows_of_the_record_alone(uri: str) -> None:
    table = DeadLetterTable(uri)
    table.rewrite(record_at(20, ROW.key))

    assert parked_in(uri) == [ROW.key]
    assert len(list(Path(uri).glob("*.parquet"))) == 1


def test_a_rebuild_replaces_the_entries_of_its_tables(uri: str) -> None:
    other = replace(ROW, relation=8)
    DeadLetterTable(uri).add_rebuilt([other], 40)
    DeadLetterTable(uri).add_rebuilt([LATER], 50, instead_of={7})

    assert sorted((e.row.relation, e.row.key, e.row.upto) for e in read_entries(DeltaTable(uri))) == [
        (7, LATER.key, 50),
        (8, ROW.key, 40),
    ]


def test_refused_are_values_that_do_not_fit_and_partial_images_without_a_base() -> None:
    rows = [put(1, "a", 10), put(2, "b", 11, price="NaN"), part(3, 12, {2: "c"}), gone(4, 13), put(5, "e", 14, "x")]
    found = refused_rows(folded(rows), BaseLookup(None), SHAPE, 10, TablePlans(()).check_partitions)

    assert [(refused.row, type(refused.error)) for refused in found] == [
        (1, ValueNotRepresentable),
        (2, MissingBase),
        (4, ValueNotRepresentable),
    ]


def test_the_search_for_refused_rows_stops_soon_after_its_limit() -> None:
    rows = [put(n, "a", n, price="NaN") for n in range(1, 100)]

    assert 3 <= len(refused_rows(folded(rows), BaseLookup(None), SHAPE, 3, TablePlans(()).check_partitions)) <= 5


def test_refused_changes_of_unparked_keys_are_numbered_after_the_others() -> None:
    unparked = folded([put(3, "c", 5), put(4, "d", 6, price="NaN")])
    found = refused_changes(batch([put(1, "a", 10), put(2, "b", 11)], 0, 20, unparked=unparked), SHAPE, 10)

    assert [refused.row for refused in found] == [3]


def test_refused_are_texts_that_cannot_be_a_partition_unless_their_row_is_deleted() -> None:
    by_item = replace(SHAPE, partition_texts=("item",))
    rows = [put(1, "a", 10), put(2, "", 11), gone(3, 12), part(4, 13, {3: "1.00"})]
    changes = batch([put(1, "a", 10), put(2, "", 11)], 0, 20)

    found = refused_rows(folded(rows), BaseLookup(None), by_item, 10, TablePlans(()).check_partitions)
    assert [(refusal.row, type(refusal.error)) for refusal in found] == [(1, ValueNotRepresentable), (3, MissingBase)]
    assert [refusal.row for refusal in refused_changes(changes, by_item, 10)] == [1]
