"""The sink on a search server: what applications see, and what stays exact over crashes, replays and lost answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc.errors import (
    DocumentRefused,
    IndexMappingConflict,
    IndexMissing,
    IndexOfAnotherOwner,
    MissingBase,
    SchemaNotApplicable,
    SinkFenced,
    TargetRulesChanged,
)
from cdc.table import TableState
from cdc.targets.published_record import Published, TargetState
from cdc.targets.search_server.reader import SearchServerReader
from pipelines.dead_letters.quarantine import Quarantine
from pipelines.sinks.search_server.sink import SearchServerSink
from tests.contracts.folded import ID, ITEM, ORDERS, PRICE, Row, batch, column, gone, part, put
from tests.fixtures.search_sinks import search_sink
from tests.fixtures.waiting import until
from tests.pipelines.sinks.search_server.server_sink import LOG, Index, items, merge, opened, publish, rows


@pytest.fixture
def find(opensearch):
    return search_sink(opensearch)


def test_applications_search_by_the_alias_with_typed_values(find):
    record = merge(opened(find), batch([put(1, "blue mug", 10, price="12.50"), put(2, None, 11)], 0, 20))
    index = Index(find)

    assert index.search({"match": {"item": "mug"}}) == {
        "1": {"id": 1, "item": "blue mug", "price": 12.5, "_position": 10}
    }
    assert index.search({"range": {"price": {"gt": 2}}}).keys() == {"1"}
    assert index.search({"term": {"item.keyword": "blue mug"}}).keys() == {"1"}
    assert index.name == record.target


def test_rows_are_visible_only_once_they_are_published(find):
    sink = opened(find)
    merge(sink, batch([put(1, "a", 10)], 0, 20))
    record = sink.apply(batch([put(1, "A", 30), put(2, "b", 31)], 20, 40))
    index = Index(find)
    assert {key: row["item"] for key, row in index.search().items()} == {"1": "a"}
    publish(sink, record)

    assert {key: row["item"] for key, row in index.search().items()} == {"1": "A", "2": "b"}


def test_a_deleted_row_stays_deleted_when_an_older_change_arrives_after_the_server_forgot_the_delete(opensearch):
    find = search_sink(opensearch, settings={"gc_deletes": "0s"})
    sink, index = opened(find), Index(find)
    merge(sink, batch([put(1, "a", 10)], 0, 20), batch([gone(1, 30)], 20, 40))
    # a request of the first batch that was delayed for longer than the server remembers a delete
    late = f"/{index.name}.w/_doc/1?version=10&version_type=external_gte"
    assert index.status("PUT", late, {"id": 1, "item": "a", "_position": 10}) == 409
    index.ask("POST", f"/{index.name}/_refresh")

    assert (index.search(), items(find)) == ({}, {})
    assert index.all() == {"1": {"_position": 30, "_deleted": True}}


def test_old_tombstones_are_removed_and_young_ones_stay(opensearch):
    find = search_sink(opensearch, keep_tombstones=0)
    sink, index = opened(find), Index(find)
    merge(sink, batch([put(1, "a", 10), put(2, "b", 11)], 0, 20), batch([gone(1, 30)], 20, 40))
    assert "1" in index.all()
    sink._connection().indexes.remove_tombstones(index.name, below=40, floor=0)
    merge(sink, batch([gone(2, 50)], 40, 60))

    def settled() -> bool:
        return index.all().keys() == {"2"}

    until(settled, "the server removes old tombstones")
    assert items(find) == {}


def test_a_truncate_hides_older_rows_in_one_step(find):
    sink, index = opened(find), Index(find)
    merge(sink, batch([put(1, "a", 10), put(2, "b", 11)], 0, 20))
    record = sink.apply(batch([put(2, "new", 30, ordinal=2)], 20, 40, truncated=(30, 1)))
    assert index.search().keys() == {"1", "2"}
    publish(sink, record)

    assert index.search().keys() == {"2"}
    assert items(find) == {"2": "new"}


def test_a_key_that_is_longer_than_an_id_identifies_its_row(find):
    schema = replace(ORDERS, columns=(replace(ID, type_oid=25, type_name="text"), ITEM, PRICE))
    one, other = ("é" * 300 + last for last in "ab")

    def image(key: str, item: str) -> dict[int, str | None]:
        return {1: key, 2: item, 3: "1.00"}

    first = [Row((key,), 10 + n, image(key, "first")) for n, key in enumerate((one, other, "short"))]
    later = [Row((one,), 30, None), Row((other,), 31, {1: other, 2: "second"}, complete=False)]
    merge(opened(find), batch(first, 0, 20, schema), batch(later, 20, 40, schema))

    assert items(find) == {other: "second", "short": "first"}
    assert len(Index(find).all()) == 3


def test_a_row_that_moved_in_a_crashed_attempt_is_completed_from_its_base_as_it_was(find):
    merge(opened(find), batch([put(1, "long text", 10)], 0, 20))
    # the first attempt moved the row on to key 3 and then died
    crashed = opened(find)
    crashed.apply(batch([gone(1, 30), gone(2, 35), part(3, 35, {3: "2.00"}, base=("1",))], 20, 40))
    crashed.close()
    # the second one ends where the row had key 2
    sink = opened(find)
    merge(sink, batch([gone(1, 30), part(2, 30, {3: "2.00"}, ordinal=1, base=("1",))], 20, 32))
    merge(sink, batch([gone(2, 35), part(3, 35, {3: "2.00"}, ordinal=1, base=("2",))], 32, 40))

    assert items(find) == {"3": "long text"}


def test_a_leftover_of_another_row_is_no_base(find):
    merge(opened(find), batch([put(1, "long text", 10)], 0, 20))
    crashed = opened(find)
    crashed.apply(batch([put(5, "another row", 25)], 20, 30))
    crashed.close()
    moved = part(5, 50, {3: "2.00"}, ordinal=1, base=("1",))
    merge(opened(find), batch([gone(1, 50), moved], 20, 60))

    assert items(find) == {"5": "long text"}


def test_after_a_crash_tables_catch_up_until_what_was_left_ahead_is_published(find):
    merge(opened(find), batch([put(1, "a", 10), put(2, "b", 11)], 0, 20))
    crashed = opened(find)
    crashed.apply(batch([put(1, "A", 35)], 20, 40))
    crashed.close()
    sink, states = opened(find), []
    for one in (batch([put(2, "B", 25)], 20, 30), batch([put(1, "A", 35)], 30, 40)):
        merge(sink, one)
        record = SearchServerReader.open(find).published
        assert record is not None
        states.append(record.tables[ORDERS.relation].state)

    assert states == [TargetState.CATCHING_UP, TargetState.STREAMING]
    assert items(find) == {"1": "A", "2": "B"}


def test_a_driver_that_was_replaced_changes_no_alias(find):
    first = opened(find)
    merge(first, batch([put(1, "a", 10)], 0, 20))
    second = opened(find)
    merge(second, batch([put(2, "b", 30)], 20, 40))
    record = first.apply(batch(None, 20, 40, truncated=(35, 0)))
    with pytest.raises(SinkFenced):
        publish(first, record)

    assert Index(find).search().keys() == {"1", "2"}


def test_an_alias_that_points_at_somebody_elses_index_is_left_alone(find, opensearch):
    index = Index(find)
    foreign = f"{opensearch.prefix}foreign"
    index.ask("PUT", f"/{foreign}")
    index.ask("PUT", f"/{foreign}/_alias/{index.alias}")
    with pytest.raises(IndexOfAnotherOwner, match="foreign"):
        opened(find).apply(batch([put(1, "a", 10)], 0, 20))
    index.ask("DELETE", f"/{foreign}")
    index.ask("PUT", f"/{index.alias}")
    with pytest.raises(IndexOfAnotherOwner):
        opened(find).apply(batch([put(1, "a", 10)], 0, 20))


def test_an_index_that_was_deleted_stops_its_table_and_names_the_replay(find):
    sink = opened(find)
    merge(sink, batch([put(1, "a", 10)], 0, 20))
    index = Index(find)
    index.ask("DELETE", f"/{index.name}")

    for driver in (sink, opened(find)):
        for change in (put(1, "A", 30), part(1, 30, {3: "2.00"})):
            with pytest.raises(IndexMissing) as missing:
                driver.apply(batch([change], 20, 40))
            assert "cdc replay" in missing.value.fix


def test_a_renamed_column_and_a_default_reach_every_document(find):
    sink, index = opened(find), Index(find)
    merge(sink, batch([put(1, "a", 10), put(2, "b", 11)], 0, 20), batch([gone(2, 30)], 20, 40))
    columns = (ID, replace(ITEM, name="title"), PRICE, column(4, "note", missing="none"))
    wider = replace(ORDERS, columns=columns)
    merge(sink, batch([replace(put(3, "c", 50), after={1: "3", 2: "c", 3: "1.00", 4: None})], 40, 60, wider))

    assert index.search() == {
        "1": {"id": 1, "title": "a", "price": 1.0, "note": "none", "_position": 10},
        "3": {"id": 3, "title": "c", "price": 1.0, "note": None, "_position": 50},
    }
    assert index.search({"match": {"title": "a"}}).keys() == {"1"}
    assert rows(find)["1"] == {"id": "1", "title": "a", "price": "1.00", "note": "none"}


@pytest.mark.parametrize(
    "columns",
    [
        (ID, replace(ITEM, type_oid=20, type_name="bigint"), PRICE),
        (ID, PRICE, column(9, "item", "bigint", oid=20)),
        (replace(ID, key=None), replace(ITEM, key=0), PRICE),
    ],
    ids=["another type", "another column of the name", "another key"],
)
def test_a_change_that_the_mapping_cannot_take_stops_the_table_and_names_the_replay(find, columns):
    sink = opened(find)
    merge(sink, batch([put(1, "a", 10)], 0, 20))
    with pytest.raises(IndexMappingConflict) as conflict:
        sink.apply(batch([put(1, "2", 30)], 20, 40, replace(ORDERS, columns=columns)))

    assert "cdc replay" in conflict.value.fix
    assert items(find) == {"1": "a"}


def test_a_table_that_is_created_again_takes_the_alias_when_its_copy_has_ended(find):
    sink, index = opened(find), Index(find)
    merge(sink, batch([put(1, "old", 10)], 0, 20))
    again = replace(ORDERS, relation=99999, oid=99999)
    old = SearchServerReader.open(find).published
    assert old is not None
    copying = sink.apply(batch([put(1, "new", 30)], 20, 40, replace(again, state=TableState.SNAPSHOTTING)))
    sink.publish(Published(40, 0, {**old.tables, 99999: copying}))
    assert index.search()["1"]["item"] == "old"
    done = sink.apply(batch(None, 40, 60, again, generation=30))
    sink.publish(Published(60, 0, {**old.tables, 99999: done}))

    assert index.search()["1"]["item"] == "new"


def test_a_table_without_a_key_is_refused(find):
    schema = replace(ORDERS, columns=(replace(ID, key=None), ITEM, PRICE))

    with pytest.raises(SchemaNotApplicable, match="has no key"):
        opened(find).apply(batch(None, 0, 20, schema))


def test_changed_rules_stop_the_table_instead_of_showing_values_under_the_old_ones(opensearch):
    find = search_sink(opensearch)
    merge(opened(find), batch([put(1, "canary", 10)], 0, 20))
    hidden = search_sink(opensearch, {"except_column_list": ["item"]})

    with pytest.raises(TargetRulesChanged) as changed:
        opened(hidden).apply(batch([put(2, "canary", 30)], 20, 40))
    assert "cdc replay" in changed.value.fix


def test_hidden_and_masked_values_reach_no_document(opensearch):
    transform = {"mask": {"item": "redact"}}
    find = search_sink(
        opensearch, {"rules": [{"match": "shop.*", "except_column_list": ["price"], "transform": transform}]}
    )
    sink = opened(find)
    merge(sink, batch([put(1, "canary", 10, price="7777.77"), put(2, None, 11)], 0, 20))
    merge(sink, batch([part(1, 30, {2: "canary"}), part(2, 31, {3: "7777.77"})], 20, 40))
    stored = str(Index(find).all())

    assert ("canary" in stored, "7777" in stored) == (False, False)
    assert rows(find) == {"1": {"id": "1", "item": "***"}, "2": {"id": "2", "item": None}}


def test_a_batch_parks_partial_images_without_base_and_refused_documents_alike(opensearch):
    find = search_sink(opensearch, field_types={"item": "date"})
    sink = opened(find)
    whole = batch([put(1, "2026-01-01", 29), part(2, 30, {3: "1.00"}), put(3, "no date", 31)], 0, 40)

    record = Quarantine(sink).apply(None, whole)
    publish(sink, record)

    assert record.parked == (("2",), ("3",))
    codes = {key: row.code for key, row in sink.parked.rows_of(ORDERS.relation).items()}
    assert codes == {("2",): MissingBase.code, ("3",): DocumentRefused.code}
    assert Index(find).search().keys() == {"1"}


def test_an_unusual_value_is_stored_and_does_not_stop_anything(find):
    wider = replace(
        ORDERS,
        columns=(
            ID,
            ITEM,
            PRICE,
            column(4, "at", "timestamp with time zone", oid=1184),
            column(5, "j", "jsonb", oid=3802),
        ),
    )
    images = [
        {1: "1", 2: "a", 3: "NaN", 4: "infinity", 5: "[1, 2]"},
        {1: "2", 2: "x" * 40_000, 3: "1.00", 4: "2026-01-31 12:00:00.5+00", 5: '{"a": "' + "y" * 40_000 + '"}'},
        {1: "3", 2: "c", 3: "1.00", 4: "0044-03-15 12:00:00+00 BC", 5: "1e400"},
    ]
    merge(opened(find), batch([replace(put(n, "", 9 + n), after=i) for n, i in enumerate(images, 1)], 0, 20, wider))
    index = Index(find)

    assert {key: list(row.values()) for key, row in rows(find).items()} == {i[1]: list(i.values()) for i in images}
    assert index.search({"range": {"at": {"gte": "2026-01-01"}}}).keys() == {"2"}


def test_more_rows_than_one_request_takes(opensearch):
    find = search_sink(opensearch, bulk_size=10_000)
    merge(opened(find), batch([put(n, f"item {n}", 10, ordinal=n) for n in range(3_000)], 0, 20))

    assert len(items(find)) == 3_000


def test_a_kept_cut_does_not_change(find):
    sink = opened(find)
    record = merge(sink, batch([put(1, "a", 10), put(2, "b", 11)], 0, 20))
    handle = sink.pin(Published(20, 0, {record.relation: record}))
    merge(sink, batch([put(1, "A", 30), gone(2, 31)], 20, 40))
    kept = SearchServerReader.open(find, handle)

    assert {row.key[0]: row.source["item"] for row in kept.documents(ORDERS.topic)} == {"1": "a", "2": "b"}
    sink.release(handle)


def test_open_moves_an_alias_back_that_a_crash_left_elsewhere(find):
    sink, index = opened(find), Index(find)
    merge(sink, batch([put(1, "a", 10)], 0, 20))
    name = index.name
    index.ask("POST", "/_aliases", {"actions": [{"remove": {"index": name, "alias": index.alias}}]})
    assert SearchServerSink(find).open(LOG) is not None

    assert index.search().keys() == {"1"}
