"""What every sink promises, checked on every sink, all Delta writers and both ways of a batch.

Targets are read back as plain rows.

A round is `apply` and `publish`, as the loop calls them. A test that needs a promise which not every sink makes names
it with `Store.require`; the sink that does not make the promise says why.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import pytest

from cdc.errors import (
    MissingBase,
    SchemaNotApplicable,
    SinkError,
    SinkFenced,
    SinkOfAnotherLog,
    ValueNotRepresentable,
)
from cdc.table import TableState
from cdc.targets.lake_reader import read_target
from pipelines.sinks.contract import ExecutorSink, TableBatch, TargetState
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ID, ITEM, ORDERS, PRICE, batch, column, gone, part, put, with_one_delta_writer
from tests.contracts.sink_stores import (
    BOTH_WAYS,
    EXECUTORS,
    KINDS,
    LOG,
    TAKES_PARTS,
    Store,
    items,
    merge,
    publish,
    store_under,
)

COPYING = replace(ORDERS, state=TableState.SNAPSHOTTING)


@pytest.fixture(params=[*KINDS, pytest.param(EXECUTORS, marks=pytest.mark.slow)])
def store(request) -> Store:
    return store_under(request, request.getfixturevalue("spark") if "spark" in request.param else None)


@BOTH_WAYS
def test_a_sink_takes_rows_on_executors_unless_it_says_why_not(store):
    sink = store.make()

    assert (isinstance(sink, ExecutorSink) and sink.takes_parts(ORDERS)) is (TAKES_PARTS not in store.missing)


@BOTH_WAYS
def test_upserts_and_deletes_leave_the_latest_state_of_every_key(store):
    sink = store.opened()
    merge(sink, batch([put(1, "a", 10), put(2, "b", 10, ordinal=1), put(3, "c", 11)], 0, 20))
    record = merge(sink, batch([put(1, "A", 30), gone(2, 31), put(4, "d", 32, price="12.50"), gone(9, 33)], 20, 40))

    assert store.rows(record) == {
        "1": {"id": "1", "item": "A", "price": "1.00"},
        "3": {"id": "3", "item": "c", "price": "1.00"},
        "4": {"id": "4", "item": "d", "price": "12.50"},
    }
    assert (record.position, record.topic) == (40, "shop.orders")


@with_one_delta_writer("store", "search", "opensearch")
def test_the_same_batch_again_changes_nothing(store):
    sink = store.opened()
    first = merge(sink, batch([put(1, "a", 10), put(2, None, 11)], 0, 20))

    assert merge(sink, batch([put(1, "a", 10), put(2, None, 11)], 0, 20)) == first


@with_one_delta_writer("store", "search", "opensearch")
def test_an_older_batch_after_a_newer_one_changes_nothing(store):
    sink = store.opened()
    merge(sink, batch([put(1, "a", 10)], 0, 20))
    newer = merge(sink, batch([gone(1, 30)], 20, 40))
    merge(sink, batch([put(1, "a", 10)], 0, 20))

    assert items(store, newer) == {}


def test_a_longer_range_after_a_crash_takes_up_what_the_shorter_one_left(store):
    crashed = store.opened()
    merge(crashed, batch([put(1, "a", 10), put(2, "b", 10, ordinal=1)], 0, 20))
    crashed.apply(batch([put(1, "A", 30), gone(2, 31)], 20, 40))
    crashed.close()
    sink = store.opened()
    record = merge(sink, batch([put(1, "A", 30), put(2, "again", 50)], 20, 60))

    assert items(store, record) == {"1": "A", "2": "again"}


def test_a_row_moves_to_another_key(store):
    sink = store.opened()
    merge(sink, batch([put(1, "a", 10)], 0, 20))
    record = merge(sink, batch([gone(1, 30), put(2, "a", 30, ordinal=1)], 20, 40))

    assert items(store, record) == {"2": "a"}


def test_unsent_columns_keep_the_value_of_the_target(store):
    sink = store.opened()
    merge(sink, batch([put(1, "long text", 10), put(2, None, 11, price="7.00")], 0, 20))
    record = merge(sink, batch([part(1, 30, {3: "2.00"}), part(2, 31, {3: None})], 20, 40))

    assert store.rows(record) == {
        "1": {"id": "1", "item": "long text", "price": "2.00"},
        "2": {"id": "2", "item": None, "price": None},
    }


def test_unsent_columns_of_a_moved_row_come_from_its_old_key(store):
    sink = store.opened()
    merge(sink, batch([put(1, "long text", 10), put(2, "other", 11)], 0, 20))
    moved = part(5, 30, {3: "2.00"}, ordinal=1, base=("1",))
    record = merge(sink, batch([put(1, "new owner of 1", 31), moved], 20, 40))

    assert items(store, record) == {"1": "new owner of 1", "2": "other", "5": "long text"}


@BOTH_WAYS
def test_a_moved_row_finds_its_base_again_after_a_crash(store):
    crashed = store.opened()
    merge(crashed, batch([put(1, "long text", 10)], 0, 20))
    moved = part(5, 30, {3: "2.00"}, ordinal=1, base=("1",))
    crashed.apply(batch([put(1, "new owner of 1", 31), moved], 20, 40))
    crashed.close()
    again = part(5, 50, {3: "3.00"}, base=("1",))
    record = merge(store.opened(), batch([put(1, "new owner of 1", 31), again], 20, 60))

    assert items(store, record) == {"1": "new owner of 1", "5": "long text"}


@BOTH_WAYS
def test_a_partial_image_without_base_is_refused_and_changes_nothing(store):
    sink = store.opened()
    before = merge(sink, batch([put(1, "a", 10)], 0, 20))
    with pytest.raises(MissingBase, match=r"0/1E"):
        merge(sink, batch([put(1, "A", 29), part(2, 30, {3: "1.00"})], 20, 40))

    assert items(store, replace(before, version=None)) == {"1": "a"}


@BOTH_WAYS
def test_during_a_copy_an_image_without_base_makes_no_row_and_everything_else_counts(store):
    sink = store.opened()
    first = merge(sink, batch([put(1, "a", 10), put(3, "c", 11)], 0, 20, COPYING))
    waiting = [part(2, 30, {3: "2.00"}), gone(5, 31), part(6, 31, {3: None}, ordinal=1, base=("5",))]
    record = merge(sink, batch([put(1, "A", 29), gone(3, 32), *waiting, put(7, "g", 33)], 20, 40, COPYING))

    assert items(store, record) == {"1": "A", "7": "g"}
    assert (first.state, record.state, record.position) == (TargetState.SNAPSHOTTING, TargetState.SNAPSHOTTING, 40)


@with_one_delta_writer("store", "search", "opensearch")
def test_during_a_copy_a_batch_of_nothing_but_images_without_base_is_applied(store):
    sink = store.opened()
    before = merge(sink, batch([put(1, "a", 10)], 0, 20, COPYING))
    record = merge(sink, batch([part(2, 30, {3: "2.00"})], 20, 40, COPYING))

    assert (record.position, items(store, record)) == (40, items(store, before))


@with_one_delta_writer("store", "search", "opensearch")
def test_an_image_without_base_is_refused_again_once_the_copy_ended(store):
    sink = store.opened()
    merge(sink, batch([put(1, "a", 10)], 0, 20, COPYING))
    with pytest.raises(MissingBase):
        merge(sink, batch([part(2, 30, {3: "2.00"})], 20, 40, generation=10))


@with_one_delta_writer("store", "search", "opensearch")
def test_a_complete_table_is_snapshotting_from_the_start_of_a_resync_to_its_generation_end(store):
    sink = store.opened()
    merge(sink, batch([put(1, "a", 10), put(2, "b", 11)], 0, 20, generation=10))
    states = []
    for rows, after, schema, control in [
        ([part(1, 30, {3: "2.00"}), part(9, 31, {3: "2.00"})], 20, COPYING, {}),
        ([put(1, "A", 50)], 40, COPYING, {}),
        (None, 60, ORDERS, {}),
        (None, 80, ORDERS, {"generation": 30}),
        (None, 100, ORDERS, {}),
    ]:
        record = merge(sink, batch(rows, after, after + 20, schema, **control))
        states.append((record.state, sorted(items(store, record))))

    copying = [(TargetState.SNAPSHOTTING, ["1", "2"])] * 3
    assert states == [*copying, (TargetState.STREAMING, ["1"]), (TargetState.STREAMING, ["1"])]


@with_one_delta_writer("store", "search", "opensearch")
def test_a_truncate_that_a_crash_left_ahead_is_passed_over_by_a_shorter_range(store):
    store.require("merged before it is published")
    crashed = store.opened()
    merge(crashed, batch([put(1, "long text", 10)], 0, 20))
    crashed.apply(batch(None, 20, 40, truncated=(35, 0)))
    crashed.close()
    record = merge(store.opened(), batch([part(1, 25, {3: "2.00"})], 20, 30))

    assert (record.position, items(store, record)) == (40, {})


@BOTH_WAYS
def test_a_truncate_removes_older_rows_and_keeps_those_inserted_after_it(store):
    sink = store.opened()
    merge(sink, batch([put(1, "a", 10), put(2, "b", 11), put(3, "c", 12)], 0, 20))
    record = merge(sink, batch([put(2, "new", 30, ordinal=2)], 20, 40, truncated=(30, 1)))

    assert items(store, record) == {"2": "new"}


@with_one_delta_writer("store", "search", "opensearch")
def test_a_truncate_alone_empties_the_target(store):
    sink = store.opened()
    merge(sink, batch([put(1, "a", 10)], 0, 20))
    record = merge(sink, batch(None, 20, 40, truncated=(30, 0)))

    assert items(store, record) == {}


@BOTH_WAYS
def test_a_generation_end_removes_what_the_copy_did_not_find_and_makes_the_table_streaming(store):
    sink = store.opened()
    merge(sink, batch([put(1, "a", 10), put(2, "b", 10, ordinal=1)], 0, 20))
    record = merge(sink, batch([put(1, "a", 30)], 20, 40, generation=30))

    assert record.state == TargetState.STREAMING
    assert items(store, record) == {"1": "a"}


@with_one_delta_writer("store", "search", "opensearch")
def test_a_table_is_snapshotting_until_its_first_copy_has_ended(store):
    store.require("records the end of a copy")

    assert merge(store.opened(), batch([put(1, "a", 10)], 0, 20)).state == TargetState.SNAPSHOTTING


@with_one_delta_writer("store", "search", "opensearch", EXECUTORS)
def test_an_added_column_appears_with_the_default_in_older_rows(store):
    sink = store.opened()
    merge(sink, batch([put(1, "a", 10)], 0, 20))
    wider = replace(ORDERS, columns=(ID, ITEM, PRICE, column(4, "note", missing="none")))
    row = replace(put(2, "b", 30), after={1: "2", 2: "b", 3: "1.00", 4: None})
    record = merge(sink, batch([row], 20, 40, wider))

    assert {key: row["note"] for key, row in store.rows(record).items()} == {"1": "none", "2": None}


def test_a_dropped_column_stays_and_takes_nulls(store):
    sink = store.opened()
    merge(sink, batch([put(1, "a", 10)], 0, 20))
    narrower = replace(ORDERS, columns=(ID, ITEM))
    row = replace(put(2, "b", 30), after={1: "2", 2: "b"})
    record = merge(sink, batch([row, replace(put(1, "A", 31), after={1: "1", 2: "A"})], 20, 40, narrower))

    assert items(store, record) == {"1": "A", "2": "b"}


NOT_FOLLOWED: Final = {
    "another type": (ID, ITEM, replace(PRICE, typmod=(11 << 16 | 4) + 4)),
    "a name that differs by its case only": (ID, ITEM, PRICE, column(4, "Item")),
    "no key": (replace(ID, key=None), ITEM, PRICE),
}


@with_one_delta_writer("store", "search", "opensearch")
def test_a_schema_change_that_cannot_be_followed_is_refused_and_changes_nothing(store):
    store.require("typed columns")
    sink = store.opened()
    before = merge(sink, batch([put(1, "a", 10)], 0, 20))
    for change, columns in NOT_FOLLOWED.items():
        with pytest.raises(SchemaNotApplicable):
            merge(sink, batch([put(1, "A", 30)], 20, 40, replace(ORDERS, columns=columns)))

        assert items(store, replace(before, version=None)) == {"1": "a"}, change


@with_one_delta_writer("store", "search", "opensearch")
def test_another_relation_of_the_same_name_is_refused(store):
    store.require("one target per table")
    sink = store.opened()
    merge(sink, batch([put(1, "a", 10)], 0, 20))
    with pytest.raises(SchemaNotApplicable, match="dropped and created again"):
        merge(sink, batch([put(1, "a", 30)], 20, 40, replace(ORDERS, relation=99, oid=99)))


@with_one_delta_writer("store", "search", "opensearch", EXECUTORS)
def test_a_value_that_does_not_fit_is_refused_by_name_and_place_without_the_value(store):
    store.require("typed columns")
    sink = store.opened()
    with pytest.raises(ValueNotRepresentable, match=r"'price'.*0/B") as caught:
        merge(sink, batch([put(1, "a", 10), put(2, "b", 11, price="NaN")], 0, 20))

    assert "NaN" not in str(caught.value)


@with_one_delta_writer("store", "search", "opensearch")
def test_a_batch_without_rows_records_the_position(store):
    assert merge(store.opened(), batch(None, 0, 20)).position == 20


@with_one_delta_writer("store", "search", "opensearch")
def test_the_published_record_is_what_the_next_driver_opens(store):
    sink = store.opened()
    published = publish(sink, merge(sink, batch([put(1, "a", 10)], 0, 20)), position=25)
    sink.close()
    second = store.make()

    assert second.open(LOG) == published
    second.close()


@with_one_delta_writer("store", "search", "opensearch")
def test_a_sink_that_published_nothing_opens_without_a_record(store):
    assert store.make().open(LOG) is None


@with_one_delta_writer("store", "search", "opensearch")
def test_another_logs_sink_is_refused(store):
    sink = store.opened()
    merge(sink, batch([put(1, "a", 10)], 0, 20))
    sink.close()
    with pytest.raises(SinkOfAnotherLog):
        store.make().open("log-2")


@pytest.mark.parametrize("position", [20, 25], ids=["same position", "later position"])
@with_one_delta_writer("store", "search", "opensearch")
def test_a_second_driver_shuts_the_first_one_out(store, position):
    store.require("several drivers may open it")
    first, second = store.opened(), store.opened()
    record = first.apply(batch([put(1, "a", 10)], 0, 20))
    published = publish(second, record)
    with pytest.raises(SinkFenced):
        publish(first, record, position=position)

    assert store.make().open(LOG) == published


@with_one_delta_writer("store", "search", "opensearch")
def test_a_published_position_never_goes_back(store):
    store.require("several drivers may open it")
    sink = store.opened()
    record = merge(sink, batch([put(1, "a", 10)], 0, 20))
    publish(sink, record, position=30)
    with pytest.raises(SinkError):
        publish(sink, record, position=20)


@with_one_delta_writer("store", "search", "opensearch")
def test_many_publishes_leave_one_readable_record(store):
    sink = store.opened()
    record = merge(sink, batch([put(1, "a", 10)], 0, 20))
    for position in range(20, 20 + store.publishes):
        published = publish(sink, record, position=position)
    sink.close()

    assert store.make().open(LOG) == published


@with_one_delta_writer("store", "search", "opensearch")
def test_what_was_applied_and_not_published_is_no_part_of_the_cut(store):
    crashed = store.opened()
    published = publish(crashed, crashed.apply(batch([put(1, "a", 10)], 0, 20)))
    crashed.apply(batch([put(1, "A", 30)], 20, 40))
    crashed.close()
    opened = store.make().open(LOG)

    assert opened is not None
    assert (opened.position, items(store, published.tables[ORDERS.relation])) == (20, {"1": "a"})


@with_one_delta_writer("store", "search", "opensearch")
def test_a_pinned_cut_is_released_once_and_an_unknown_handle_is_ignored(store):
    sink = store.opened()
    published = publish(sink, sink.apply(batch([put(1, "a", 10)], 0, 20)))
    handle = sink.pin(published)
    for released in (handle, handle, "unknown"):
        sink.release(released)


@with_one_delta_writer("store", "search", "opensearch")
def test_a_rebuilt_target_replaces_the_old_one(store):
    sink = store.opened()
    merge(sink, batch([put(1, "old", 10), put(2, "b", 11)], 0, 20))
    sink.close()
    staged = store.stage()
    standing = staged.open_published(LOG)
    staged.sink.open(LOG)
    built = publish(staged.sink, staged.sink.apply(batch([put(1, "new", 10)], 0, 20, generation=5)))
    published = staged.put(built, {})
    staged.discard()

    assert standing is not None
    assert store.make().open(LOG) == published
    assert items(store, published.tables[ORDERS.relation]) == {"1": "new"}


def as_frame(spark, whole: TableBatch) -> TableBatch:
    assert whole.rows is not None
    return replace(whole, rows=None, frame=spark.createDataFrame(whole.rows.drop_columns(["payload"])))


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
def test_rows_on_executors_give_what_rows_on_the_driver_give(spark, tmp_path):
    rounds = [
        batch([put(1, "a", 10), put(2, "b", 11), put(3, None, 12)], 0, 20),
        batch([gone(1, 30), part(2, 31, {3: None}), part(7, 32, {3: "5.00"}, base=("1",)), put(8, "x", 33)], 20, 40),
        batch([put(7, "y", 50, ordinal=2), put(9, "z", 51)], 40, 60, truncated=(50, 1)),
        batch([put(7, "y", 50, ordinal=2)], 40, 60),
        batch([part(7, 70, {3: "6.00"}), part(8, 71, {3: None}), gone(9, 72)], 60, 80, COPYING),
    ]
    found: list[list[dict[str, Any]]] = []
    for writer, shaped in [
        (Writer.INDEXED, lambda b: b),
        (Writer.COPY_ON_WRITE, lambda b: b),
        (Writer.SPARK, lambda b: as_frame(spark, b)),
        (Writer.SPARK, lambda b: b),
    ]:
        sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{len(found)}/{{schema}}/{{table}}", writer), spark)
        sink.open(LOG)
        records = [sink.apply(shaped(whole)) for whole in rounds]
        rows = read_target(records[-1].target, records[-1].version).read_all().to_pylist()
        found.append(sorted(rows, key=lambda row: row["id"]))

    assert found[0] == found[1] == found[2]


# for a search server the default run has test_executor_writer.py
@pytest.mark.parametrize("store", ["search", pytest.param("opensearch", marks=pytest.mark.slow)], indirect=True)
def test_rows_on_executors_become_documents_as_rows_on_the_driver_do(spark, store):
    sink = store.opened()
    merge(sink, as_frame(spark, batch([put(1, "a", 10), put(2, "b", 11), put(3, None, 12)], 0, 20)))
    later = [gone(1, 30), part(2, 31, {3: None}), part(7, 32, {3: "5.00"}, base=("1",)), put(8, "x", 33)]
    record = merge(sink, as_frame(spark, batch(later, 20, 40)))

    assert store.rows(record) == {
        "2": {"id": "2", "item": "b", "price": None},
        "3": {"id": "3", "item": None, "price": "1.00"},
        "7": {"id": "7", "item": "a", "price": "5.00"},
        "8": {"id": "8", "item": "x", "price": "1.00"},
    }
    assert record.position == 40


@pytest.mark.slow  # the default run has the same rows in test_far_moments
@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize(
    "shaped",
    [
        pytest.param(lambda _, b: b, id="on the driver"),
        pytest.param(as_frame, id="on executors"),
    ],
)
def test_a_timestamp_without_a_zone_is_no_moment_for_spark(spark, tmp_path, shaped):
    schema = replace(ORDERS, columns=(ID, column(2, "at", "timestamp", oid=1114), PRICE))
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", Writer.SPARK), spark)
    sink.open(LOG)
    sink.apply(shaped(spark, batch([put(1, "2026-01-01 00:00:00", 10)], 0, 20, schema)))
    later = [put(1, "2026-03-29 02:30:00.5", 30), part(2, 31, {2: "2026-10-25 02:30:00"}, base=("1",))]
    record = sink.apply(shaped(spark, batch(later, 20, 40, schema)))

    rows = read_target(record.target, record.version).read_all().sort_by("id").to_pylist()
    assert [row["at"] for row in rows] == [datetime(2026, 3, 29, 2, 30, 0, 500_000), datetime(2026, 10, 25, 2, 30)]  # noqa: DTZ001
