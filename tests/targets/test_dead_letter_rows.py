"""Dead-letter rows: entries as JSON, and which of them count at the position of a target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from cdc.target_names import parked_uri, published_uri
from cdc.targets.dead_letter_rows import (
    PARKED_SCHEMA,
    DeadLetterEntry,
    ParkedChange,
    ParkedRow,
    parked_at,
    read_entries,
    read_parked,
)
from cdc.targets.published_record import Published, TableRecord

ROW = ParkedRow(
    relation=7,
    topic="shop.orders",
    key=("1", "ü"),
    position=15,
    ordinal=2,
    committed_at=5,
    image={1: "1", 2: None},
    complete=False,
    code="CDC-3001",
    message="a value",
    first_at=6,
    upto=20,
    changes=(ParkedChange(op="u", position=16, ordinal=0, committed_at=7, image={2: "b"}, began=3),),
)


def record_at(position: int, *parked: tuple[str, ...]) -> Published:
    table = TableRecord(7, "shop.orders", "/lake/orders", position, 1, "streaming", parked=parked)
    return Published(position, 0, {7: table})


def test_an_entry_survives_its_json() -> None:
    for entry in (DeadLetterEntry(ROW), DeadLetterEntry(ROW, parked=False)):
        assert DeadLetterEntry.from_json(entry.to_json()) == entry
        assert set(entry.to_json()) == set(PARKED_SCHEMA.names)


def test_an_entry_of_an_older_table_has_no_changes() -> None:
    fields = DeadLetterEntry(ROW).to_json()
    del fields["changes"]

    assert DeadLetterEntry.from_json(fields).row == replace(ROW, changes=())


def test_images_are_converted_in_the_row_and_in_its_changes() -> None:
    found = ROW.with_images(lambda image: dict.fromkeys(image, "***"))

    assert (found.image, found.changes[0].image) == ({1: "***", 2: "***"}, {2: "***"})
    assert (found.place, found.changes[0].place) == ((15, 2), (16, 0))


def test_an_entry_counts_once_its_target_is_at_the_end_of_the_batch() -> None:
    entry = DeadLetterEntry(ROW)

    assert parked_at([entry], record_at(10), {}) == {}
    assert parked_at([entry], record_at(10), {7: 19}) == {}
    assert parked_at([entry], record_at(10), {7: 20}) == {7: {ROW.key: ROW}}


def test_an_unparked_key_is_parked_no_more() -> None:
    later = DeadLetterEntry(replace(ROW, upto=30), parked=False)

    assert parked_at([DeadLetterEntry(ROW), later], record_at(20, ROW.key), {7: 30}) == {}


def test_at_a_published_record_its_list_decides() -> None:
    other = replace(ROW, key=("2", ""))

    found = parked_at([DeadLetterEntry(ROW), DeadLetterEntry(other)], record_at(20, ROW.key), {})
    assert found == {7: {ROW.key: ROW}}


def test_a_listed_key_without_an_entry_has_a_row_without_an_image() -> None:
    lost = parked_at([], record_at(20, ROW.key), {})[7][ROW.key]

    assert (lost.key, lost.position, dict(lost.image), lost.complete) == (ROW.key, 20, {}, False)
    assert "no longer stored" in lost.message


def test_entries_are_read_from_the_table_next_to_the_record(tmp_path: Path) -> None:
    template = f"{tmp_path}/{{schema}}/{{table}}"
    assert read_parked(published_uri(template), record_at(20)) == []
    entries = [DeadLetterEntry(replace(ROW, upto=30), parked=False), DeadLetterEntry(ROW)]
    uri = parked_uri(published_uri(template))
    write_deltalake(uri, pa.Table.from_pylist([entry.to_json() for entry in entries], PARKED_SCHEMA))

    assert [entry.row.upto for entry in read_entries(DeltaTable(uri))] == [20, 30]
    assert read_parked(published_uri(template), record_at(20, ROW.key)) == [ROW]


def test_a_change_survives_its_json() -> None:
    change = ROW.changes[0]

    assert ParkedChange.from_json(json.loads(json.dumps(change.to_json()))) == change
