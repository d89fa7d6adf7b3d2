"""Rows that a Delta target cannot take: they wait beside the sink with their keys, and everything else goes on."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from cdc.catalog.dead_letter_requests import DeadLetterAction, DeadLetterOutcome
from cdc.config import SinkRule, TypeSettings
from cdc.errors import DeadLetterLimitExceeded, MissingBase, ValueNotRepresentable
from cdc.table import TableState
from cdc.target_names import published_uri
from cdc.targets.dead_letter_rows import DeadLetterEntry, read_parked
from cdc.targets.lake_reader import read_target
from pipelines.sinks.contract import Published
from pipelines.sinks.delta.dead_letters import DeadLetterTable
from tests.contracts.folded import ID, ITEM, ORDERS, PRICE, gone, part, put
from tests.pipelines.dead_letters.sink_driver import NAN, Driver


@pytest.fixture(name="driver")
def _driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    with closing(driver.sink):
        driver.take(put(1, "a", 10), put(2, "b", 11), put(3, "c", 12), upto=20)
        yield driver


def test_a_row_that_does_not_fit_waits_with_its_place_and_why_and_all_others_are_merged(driver: Driver) -> None:
    rows = [put(1, "A", 30), put(2, "B", 31, price=NAN, ordinal=7), gone(3, 32), put(4, "d", 33)]
    assert driver.take(*rows, upto=40) == ["2"]
    assert driver.items() == {"1": "A", "2": "b", "4": "d"}
    (row,) = read_parked(published_uri(driver.template), Published(40, 0, driver.tables))

    assert (row.topic, row.key, row.place, row.attempts) == ("shop.orders", ("2",), (31, 7), 1)
    assert dict(row.image) == {1: "2", 2: "B", 3: NAN}
    assert row.code == ValueNotRepresentable.code
    assert "'price'" in row.message
    assert NAN not in row.message
    assert row.first_at > 0


def test_of_many_rows_that_do_not_fit_each_is_found(driver: Driver) -> None:
    bad = {4, 5, 9, 13}
    rows = [put(n, "x", 30 + n, price=NAN if n in bad else "1.00") for n in range(4, 30)]

    assert {int(key) for key in driver.take(*rows, upto=99)} == bad
    assert {int(key) for key in driver.items()} == {1, 2, 3, *range(4, 30)} - bad


def test_a_parked_key_is_let_go_by_a_full_image_a_delete_a_move_and_partial_images_that_make_it_fit(
    driver: Driver,
) -> None:
    assert driver.take(*(put(n, f"P{n}", 30 + n, price=NAN) for n in (1, 2, 3, 4)), upto=40) == ["1", "2", "3", "4"]
    moved = part(7, 53, {3: "5.00"}, ordinal=1, base=("3",))

    assert driver.take(put(1, "again", 50), gone(4, 51), part(2, 52, {2: "long"}), gone(3, 53), moved, upto=60) == ["2"]
    assert driver.rows() == {"1": ("again", "1.00"), "2": ("b", "1.00"), "7": ("P3", "5.00")}
    assert driver.take(part(2, 70, {3: "5.00"}), upto=80) == []
    assert driver.rows()["2"] == ("long", "5.00")


def test_a_truncate_and_a_generation_end_let_older_keys_go_and_no_later_ones(driver: Driver) -> None:
    driver.take(put(2, "B", 31, price=NAN), put(3, "C", 32, price=NAN), upto=40)

    assert driver.take(put(3, "C", 56, price=NAN), upto=60, truncated=(55, 0)) == ["3"]
    assert driver.items() == {}
    assert driver.take(put(1, "A", 80), put(4, "D", 81, price=NAN), upto=90, generation=75) == ["4"]
    assert driver.items() == {"1": "A"}


def test_a_partial_image_without_base_waits_for_the_source_whatever_comes_but_a_whole_row(driver: Driver) -> None:
    assert driver.take(part(9, 30, {3: "2.00"}), put(1, "A", 31), upto=40) == ["9"]
    assert driver.quarantine.rows[0].code == MissingBase.code
    assert not driver.quarantine.rows[0].complete
    assert driver.take(part(9, 50, {3: "3.00"}), upto=60) == ["9"]
    assert driver.take(put(9, "whole", 70, price="3.00"), upto=80) == []
    assert driver.rows()["9"] == ("whole", "3.00")


def test_a_partial_image_of_a_row_that_moved_and_does_not_fit_takes_no_later_owner_of_its_old_key_for_its_base(
    driver: Driver,
) -> None:
    moved = part(7, 30, {3: NAN}, ordinal=1, base=("2",))
    driver.take(gone(2, 30), moved, upto=40)
    driver.take(put(2, "another", 50), upto=60)

    assert driver.take(part(7, 70, {3: "2.00"}), upto=80) == ["7"]
    assert driver.items() == {"1": "a", "2": "another", "3": "c"}


def test_a_delete_of_a_key_that_the_target_cannot_hold_takes_nothing(driver: Driver) -> None:
    strange = replace(gone(1, 30), key=("9" * 30,))

    assert driver.take(strange, put(1, "A", 31), upto=40) == []
    assert driver.items() == {"1": "A", "2": "b", "3": "c"}


def test_a_text_that_cannot_be_a_partition_parks_its_key_alone(tmp_path: Path) -> None:
    by_item = SinkRule.model_validate({"match": "shop.*", "partition_by": ["item"]})
    texts = ["", "__HIVE_DEFAULT_PARTITION__", "long " * 60]
    driver = Driver(tmp_path, rules=(by_item,))
    assert driver.take(put(1, "a", 10), *(put(2 + n, text, 11 + n) for n, text in enumerate(texts)), upto=20) == [
        "2",
        "3",
        "4",
    ]
    assert driver.take(part(1, 30, {2: ""}), put(2, "fits", 31), gone(3, 32), put(5, "e", 33), upto=40) == ["1", "4"]
    assert driver.take(put(1, "A", 50), gone(4, 51), upto=60) == []

    assert driver.items() == {"1": "A", "2": "fits", "5": "e"}


def test_while_a_table_is_copied_its_images_without_base_are_not_parked(driver: Driver) -> None:
    copying = replace(ORDERS, state=TableState.SNAPSHOTTING)

    assert driver.take(part(9, 30, {3: "2.00"}), put(2, "B", 31, price=NAN), upto=40, schema=copying) == ["2"]


def test_a_table_stops_when_more_keys_would_be_parked_than_may_be(tmp_path: Path) -> None:
    driver = Driver(tmp_path, stop_at=2)
    driver.take(put(1, "a", 10, price=NAN), put(2, "b", 11, price=NAN), put(3, "c", 12), upto=20)
    with pytest.raises(DeadLetterLimitExceeded, match="stop_at is 2"):
        driver.merge(put(3, "C", 30, price=NAN), put(4, "d", 31), upto=40)

    assert driver.take(put(3, "C", 50), put(4, "d", 51), upto=60) == ["1", "2"]


def test_with_none_to_be_parked_the_first_row_stops_the_table(tmp_path: Path) -> None:
    with pytest.raises(ValueNotRepresentable):
        Driver(tmp_path, stop_at=0).merge(put(1, "a", 10, price=NAN), upto=20)


def test_a_row_that_is_retried_in_vain_stays_parked_and_one_that_is_discarded_is_forgotten(driver: Driver) -> None:
    driver.take(put(2, "B", 31, price=NAN), put(3, "C", 32, price=NAN), upto=40)
    driver.quarantine.request((ORDERS.relation, ("2",)), DeadLetterAction.DISCARD)
    driver.quarantine.request((ORDERS.relation, ("3",)), DeadLetterAction.RETRY)

    assert driver.take(upto=60) == ["3"]
    assert driver.quarantine.outcome((ORDERS.relation, ("2",))) is DeadLetterOutcome.DISCARDED
    assert driver.quarantine.outcome((ORDERS.relation, ("3",))) is DeadLetterOutcome.PARKED
    assert driver.quarantine.rows[0].attempts == 2
    assert driver.items() == {"1": "a", "2": "b", "3": "c"}


def test_a_retried_row_is_merged_with_the_next_batch_after_the_policy_of_its_column_was_changed(
    driver: Driver, tmp_path: Path
) -> None:
    driver.take(put(3, "C", 32, price=NAN), upto=40)
    driver.sink.close()
    second = Driver(tmp_path, columns={"price": TypeSettings.TEXT})
    second.quarantine.request((ORDERS.relation, ("3",)), DeadLetterAction.RETRY)

    assert second.take(upto=60) == []
    assert second.quarantine.outcome((ORDERS.relation, ("3",))) is DeadLetterOutcome.APPLIED
    assert second.rows()["3"] == ("C", NAN)


def test_rows_that_fit_a_new_version_of_the_schema_are_merged_by_themselves(driver: Driver) -> None:
    driver.take(put(3, "C", 32, price="123456789012.00"), upto=40)
    wide = replace(ORDERS, columns=(ID, ITEM, replace(PRICE, typmod=(20 << 16 | 2) + 4)))

    assert driver.keys() == ["3"]
    assert driver.take(upto=60, schema=wide) == []
    assert driver.rows()["3"] == ("C", "123456789012.00")


@pytest.mark.parametrize(
    "said",
    [
        {"rules": (SinkRule.model_validate({"match": "*.*", "transform": {"drop": ["item"]}}),)},
        {"column_list": ("id", "price")},
        {"except_column_list": ("item",)},
    ],
    ids=["drop", "column_list", "except_column_list"],
)
def test_of_a_column_that_the_target_does_not_have_nothing_is_kept_beside_it(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    driver = Driver(tmp_path, **said)
    driver.take(put(1, "secret", 10, price=NAN), part(9, 11, {2: "secret"}), upto=20)
    driver.take(part(1, 30, {2: "secret"}), part(9, 31, {2: "secret"}), upto=40)

    assert driver.keys() == ["1", "9"]
    assert [dict(row.image) for row in driver.quarantine.rows] == [{1: "1", 3: NAN}, {1: "9"}]
    beside = pa.table(DeltaTable(tmp_path / "lake" / "_cdc" / "parked").scan())
    assert "secret" not in str(beside.to_pylist())
    assert driver.take(part(1, 50, {3: "5.00"}), upto=60) == ["9"]
    assert [row["price"] for row in read_target(driver.record.target).read_all().to_pylist()] == [Decimal("5.00")]


def test_of_a_masked_column_what_the_target_is_to_have_is_kept_and_masked_once(tmp_path: Path) -> None:
    (tmp_path / "salt").write_text("pepper")
    mask = {"mask": {"item": "sha256"}, "salt": {"file": f"{tmp_path}/salt"}}
    driver = Driver(tmp_path, rules=(SinkRule.model_validate({"match": "*.*", "transform": mask}),))
    driver.take(*(put(n, "secret", 10 + n, price=NAN) for n in (1, 2, 3)), put(4, None, 14, price=NAN), upto=20)
    beside = pa.table(DeltaTable(tmp_path / "lake" / "_cdc" / "parked").scan())
    assert "secret" not in str(beside.to_pylist())
    driver.take(part(1, 30, {3: "1.00"}), part(2, 31, {2: "other"}), part(4, 32, {3: "4.00"}), upto=40)

    assert driver.keys() == ["2", "3"]
    assert driver.take(part(2, 50, {3: "2.00"}), put(3, "other", 51), upto=60) == []
    secret, other = (hmac.digest(b"pepper", text, "sha256").hex() for text in (b"secret", b"other"))
    assert driver.items() == {"1": secret, "2": other, "3": other, "4": None}


def test_what_was_parked_before_there_were_histories_is_read_and_goes_on(driver: Driver, tmp_path: Path) -> None:
    driver.take(put(2, "B", 31, price=NAN), upto=40)
    beside = tmp_path / "lake" / "_cdc" / "parked"
    entries = pa.table(DeltaTable(beside).scan()).drop_columns(["changes"])
    write_deltalake(beside, entries, mode="overwrite", schema_mode="overwrite")
    second = Driver(tmp_path)

    assert second.keys() == ["2"]
    assert second.take(put(3, "C", 50, price=NAN), upto=60) == ["2", "3"]
    assert Driver(tmp_path).keys() == ["2", "3"]


def test_the_next_driver_finds_what_is_parked_where_the_last_one_published(driver: Driver, tmp_path: Path) -> None:
    driver.take(put(2, "B", 31, price=NAN), put(3, "C", 32, price=NAN), upto=40)
    driver.take(gone(3, 50), upto=60)
    held = driver.quarantine.rows
    driver.sink.close()
    second = Driver(tmp_path)

    assert second.quarantine.rows == held
    assert second.take(part(2, 70, {3: "5.00"}), upto=80) == []
    assert second.rows()["2"] == ("B", "5.00")


def test_what_a_batch_parked_that_was_never_merged_is_forgotten(driver: Driver, tmp_path: Path) -> None:
    driver.sink.parked.write(ORDERS.relation, 20, _parked_at(tmp_path / "other", put(2, "B", 31, price=NAN), 40))
    second = Driver(tmp_path)
    assert second.quarantine.rows == []
    second.merge(put(1, "A", 33), upto=60)  # behind the end of the batch, and killed before it is published

    assert Driver(tmp_path).quarantine.rows == []


def test_what_an_attempt_parked_that_failed_in_the_same_process_is_forgotten(driver: Driver, tmp_path: Path) -> None:
    driver.sink.parked.write(ORDERS.relation, 20, _parked_at(tmp_path / "other", put(2, "B", 31, price=NAN), 40))
    driver.merge(put(1, "A", 33), upto=60)

    assert Driver(tmp_path).quarantine.rows == []


@pytest.mark.parametrize("upto", [40, 60], ids=["the same batch", "a longer one"])
def test_a_target_that_a_crash_left_ahead_keeps_what_its_batch_parked(
    driver: Driver, tmp_path: Path, upto: int
) -> None:
    rows = [put(1, "A", 30), put(2, "B", 31, price=NAN)]
    driver.merge(*rows, upto=40)
    second = Driver(tmp_path)

    assert second.keys() == ["2"]
    assert second.take(*rows, *([put(3, "C", 50)] if upto > 40 else []), upto=upto) == ["2"]
    assert second.items()["1"] == "A"
    assert second.items()["2"] == "b"


@pytest.mark.parametrize("upto", [15, 20, 30], ids=["a shorter batch", "the same one", "a longer one"])
def test_a_table_whose_first_batch_was_never_published_keeps_what_was_parked(tmp_path: Path, upto: int) -> None:
    rows = [put(1, "a", 10), put(2, "b", 11, price=NAN)]
    Driver(tmp_path).merge(*rows, upto=20)
    second = Driver(tmp_path)

    assert second.take(*rows, upto=upto) == ["2"]
    assert [row.key for row in second.quarantine.rows] == [("2",)]
    assert second.items() == {"1": "a"}
    assert Driver(tmp_path).keys() == ["2"]


def test_a_parked_row_that_somebody_removed_is_asked_of_the_source(driver: Driver, tmp_path: Path) -> None:
    driver.take(put(2, "B", 31, price=NAN), upto=40)
    beside = tmp_path / "lake" / "_cdc" / "parked"
    beside.rename(tmp_path / "away")
    second = Driver(tmp_path)

    assert second.keys() == ["2"]
    assert not second.quarantine.rows[0].complete


def test_many_batches_leave_few_entries(driver: Driver, tmp_path: Path) -> None:
    assert isinstance(driver.sink.parked, DeadLetterTable)
    for n in range(12):
        driver.sink.parked._entries += 100
        driver.take(put(2, f"B{n}", 100 + n, price=NAN), upto=101 + n)
    second = Driver(tmp_path)

    assert [row.image[2] for row in second.quarantine.rows] == ["B11"]
    assert isinstance(second.sink.parked, DeadLetterTable)
    assert second.sink.parked._entries < 10


def _parked_at(folder: Path, row: Any, upto: int) -> list[DeadLetterEntry]:
    """The entries of a batch of another sink, as this one would write them."""
    other = Driver(folder)
    other.take(row, upto=upto)
    return [DeadLetterEntry(held) for held in other.quarantine.rows]
