"""Tables that change their columns, key and name under a Delta sink, with crashes at every step: both writers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cdc.config import SchemaChanges, SinkRule, TableSettings
from cdc.errors import Reaction, SchemaNotApplicable, SinkError, ValueNotRepresentable
from cdc.failpoint import VARIABLE
from cdc.table import Column, TableSchema, TableState
from cdc.targets.lake_reader import read_target
from pipelines.sinks.contract import Published, TableRecord, TargetState
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.schema_evolution import ColumnChange
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ID, ITEM, ORDERS, PRICE, Row, batch, column, gone, part, put, with_one_delta_writer
from tests.fixtures import forked

ARTICLE = replace(ITEM, name="article")
WIDER = replace(PRICE, typmod=(14 << 16 | 4) + 4)
TAGS = column(4, "tags", "integer[]", oid=1007)
Opened = Callable[..., DeltaSink]


@pytest.fixture(params=["indexed", "copy-on-write", pytest.param("spark", marks=pytest.mark.slow)])
def opened(request, tmp_path: Path) -> Opened:
    """Opens a driver of one sink; words are those of its tables."""
    spark = request.getfixturevalue("spark") if request.param == "spark" else None

    def make(**words) -> DeltaSink:
        table = TableSettings.model_validate(words)
        template = f"{tmp_path}/lake/{{schema}}/{{table}}"
        sink = DeltaSink(DeltaSettings("lake", template, Writer(request.param), table=table), spark)
        sink.open("log-1")
        return sink

    return make


def having(*columns: Column, **more) -> TableSchema:
    return replace(ORDERS, columns=columns, **more)


def publish(sink: DeltaSink, record: TableRecord) -> TableRecord:
    sink.publish(Published(record.position, 0, {record.relation: record}))
    return record


def rows(record: TableRecord) -> dict[Any, tuple[Any, ...]]:
    """By id the other columns of the source, in their order."""
    found = read_target(record.target, record.version).read_all()
    plain = found.select([name for name in found.column_names if not name.startswith("_")])
    return {row["id"]: tuple(str(v) for name, v in row.items() if name != "id") for row in plain.to_pylist()}


def names(record: TableRecord) -> list[str]:
    return [name for name in read_target(record.target).schema.names if not name.startswith("_")]


def whole(id_: int, position: int, *values: str | None, ids: tuple[int, ...] = (2, 3), **more) -> Row:
    return Row((str(id_),), position, {1: str(id_), **dict(zip(ids, values, strict=True))}, **more)


def test_a_renamed_column_keeps_its_values_and_gives_them_to_partial_images(opened):
    sink = opened()
    publish(sink, sink.apply(batch([put(1, "long", 10), put(2, "b", 11)], 0, 20)))
    record = sink.apply(batch([part(1, 30, {3: "2.00"}), put(3, "c", 31)], 20, 40, having(ID, ARTICLE, PRICE)))

    assert names(record) == ["id", "article", "price"]
    assert rows(record) == {1: ("long", "2.00"), 2: ("b", "1.00"), 3: ("c", "1.00")}


def test_after_a_crash_a_partial_image_finds_its_base_under_the_name_and_type_of_before(opened):
    crashed = opened()
    publish(crashed, crashed.apply(batch([put(1, "long", 10), put(2, "b", 11, price="0.50")], 0, 20)))
    crashed.apply(batch([part(1, 30, {3: "2.0000"}), part(2, 31, {2: "B"})], 20, 40, having(ID, ARTICLE, WIDER)))
    crashed.close()
    again = [part(1, 50, {3: "3.0000"}), part(2, 31, {2: "B"})]
    record = opened().apply(batch(again, 20, 60, having(ID, ARTICLE, WIDER)))

    assert rows(record) == {1: ("long", "3.0000"), 2: ("B", "0.5000")}


def test_after_a_crash_a_partial_image_has_the_default_of_a_column_that_its_base_is_too_old_for(opened):
    crashed = opened()
    publish(crashed, crashed.apply(batch([put(1, "a", 10), put(2, "b", 11)], 0, 20)))
    noted = having(ID, ITEM, PRICE, column(4, "note", missing="default"))
    crashed.apply(batch([put(3, "c", 30)], 20, 40, noted))
    crashed.close()
    again = [put(3, "c", 30), part(1, 50, {3: "2.00"}), part(2, 51, {3: "2.00", 4: "own"})]
    record = opened().apply(batch(again, 20, 60, noted))

    assert rows(record) == {1: ("a", "2.00", "default"), 2: ("b", "2.00", "own"), 3: ("c", "1.00", "default")}


def test_columns_that_swap_their_names_keep_their_values(opened):
    one, two = column(2, "one"), column(3, "two")
    sink = opened()
    publish(sink, sink.apply(batch([whole(1, 10, "A", "B")], 0, 20, having(ID, one, two))))
    swapped = having(ID, replace(one, name="two"), replace(two, name="one"))
    record = sink.apply(batch([whole(2, 30, "C", "D")], 20, 40, swapped))

    found = {row["id"]: (row["two"], row["one"]) for row in read_target(record.target).read_all().to_pylist()}
    assert found == {1: ("A", "B"), 2: ("C", "D")}


def test_a_wider_number_and_one_without_a_limit_hold_what_the_old_one_held(opened):
    sink = opened()
    publish(sink, sink.apply(batch([put(1, "a", 10), whole(2, 11, "b", None)], 0, 20)))
    wider = sink.apply(batch([put(3, "c", 30, price="9999999999.1234")], 20, 40, having(ID, ITEM, WIDER)))
    assert rows(publish(sink, wider))[1] == ("a", "1.0000")
    record = sink.apply(batch([put(4, "d", 50, price="NaN")], 40, 60, having(ID, ITEM, replace(PRICE, typmod=-1))))

    assert rows(record) == {
        1: ("a", "1.0000"),
        2: ("b", "None"),
        3: ("c", "9999999999.1234"),
        4: ("d", "NaN"),
    }


@with_one_delta_writer("opened")
def test_a_column_dropped_and_made_anew_begins_with_its_own_default(opened):
    sink = opened()
    publish(sink, sink.apply(batch([put(1, "old", 10)], 0, 20)))
    anew = replace(ITEM, id=9, missing="new")
    row = whole(2, 30, "1.00", "mine", ids=(3, 9))
    record = sink.apply(batch([row], 20, 40, having(ID, PRICE, anew)))

    items = {row["id"]: row["item"] for row in read_target(record.target).read_all().to_pylist()}
    assert items == {1: "new", 2: "mine"}


@with_one_delta_writer("opened")
def test_a_type_of_which_not_every_value_lasts_stops_the_table_until_it_is_copied_again(opened):
    sink = opened()
    publish(sink, sink.apply(batch([put(1, "a", 10), put(2, "12", 11)], 0, 20, generation=5)))
    number = replace(ITEM, type_oid=23, type_name="integer")
    with pytest.raises(SchemaNotApplicable, match="column 'item' of the target cannot change from"):
        sink.apply(batch([put(2, "12", 30)], 20, 40, having(ID, number, PRICE)))
    record = sink.apply(batch([put(1, "7", 50), put(2, "12", 51)], 20, 60, having(ID, number, PRICE), generation=45))

    assert rows(record) == {1: ("7", "1.00"), 2: ("12", "1.00")}
    assert (pa.schema(read_target(record.target).schema).field("item").type, record.state) == (
        pa.int32(),
        TargetState.STREAMING,
    )


@with_one_delta_writer("opened")
def test_while_the_copy_that_a_new_type_needs_is_on_its_way_older_rows_hold_nothing_in_it(opened):
    sink = opened()
    publish(sink, sink.apply(batch([put(1, "a", 10), put(2, "b", 11)], 0, 20, generation=5)))
    number = having(ID, replace(ITEM, type_oid=23, type_name="integer"), PRICE, state=TableState.SNAPSHOTTING)
    record = sink.apply(batch([put(2, "12", 30)], 20, 40, number))

    assert (rows(record), record.state) == ({1: ("None", "1.00"), 2: ("12", "1.00")}, TargetState.SNAPSHOTTING)


def test_another_key_waits_for_the_end_of_a_copy_and_finds_its_rows_from_then_on(opened):
    sink = opened()
    publish(sink, sink.apply(batch([put(1, "a", 10), put(2, "b", 11)], 0, 20, generation=5)))
    rekeyed = having(replace(ID, key=None), replace(ITEM, key=0), PRICE)
    with pytest.raises(SchemaNotApplicable, match=r"the key .* changed from \['id'\] to \['item'\]"):
        sink.apply(batch(None, 20, 40, rekeyed))
    copy = [replace(put(1, "a", 50), key=("a",)), replace(put(9, "b", 51), key=("b",))]
    publish(sink, sink.apply(batch(copy, 20, 60, rekeyed, generation=45)))
    record = sink.apply(batch([replace(put(8, "a", 70), key=("a",))], 60, 80, rekeyed))

    assert rows(record) == {8: ("a", "1.00"), 9: ("b", "1.00")}


def test_a_table_loses_and_gets_a_key_with_a_copy(opened):
    sink = opened()
    publish(sink, sink.apply(batch([put(1, "a", 10)], 0, 20, generation=5)))
    keyless = having(replace(ID, key=None), ITEM, PRICE)
    copy = replace(batch([put(1, "a", 50), put(2, "b", 50, ordinal=1)], 20, 60, keyless), generation=45)
    assert copy.rows is not None
    none = pa.nulls(copy.rows.num_rows, copy.rows.schema.field("key").type)
    copy = replace(copy, rows=copy.rows.set_column(copy.rows.column_names.index("key"), "key", none))
    lost = publish(sink, sink.apply(copy))
    assert rows(lost) == {1: ("a", "1.00"), 2: ("b", "1.00")}
    publish(sink, sink.apply(batch([put(1, "a", 70), put(2, "b", 71)], 60, 80, generation=65)))
    record = sink.apply(batch([put(2, "B", 90)], 80, 100))

    assert rows(record) == {1: ("a", "1.00"), 2: ("B", "1.00")}


@with_one_delta_writer("opened")
def test_a_renamed_table_stays_in_its_target_and_one_that_takes_its_name_is_refused(opened):
    sink = opened()
    before = publish(sink, sink.apply(batch([put(1, "a", 10)], 0, 20)))
    renamed = replace(ORDERS, name="orders_2023")
    record = publish(sink, sink.apply(batch([put(2, "b", 30)], 20, 40, renamed)))
    sink.close()
    sink.open("log-1")
    record = publish(sink, sink.apply(batch([gone(1, 50)], 40, 60, renamed)))

    assert (record.topic, record.target, rows(record)) == ("shop.orders_2023", before.target, {2: ("b", "1.00")})
    with pytest.raises(SinkError) as caught:
        sink.apply(batch([put(1, "new", 70)], 0, 80, replace(ORDERS, relation=99, oid=99)))
    assert caught.value.reaction is Reaction.QUARANTINE


@with_one_delta_writer("opened")
def test_lenient_leaves_what_was_beside_what_comes(opened):
    sink = opened(schema_changes="lenient")
    publish(sink, sink.apply(batch([put(1, "old", 10), put(2, "b", 11)], 0, 20)))
    number = replace(PRICE, type_oid=23, type_name="integer", typmod=-1)
    renamed = having(ID, ARTICLE, number)
    record = sink.apply(batch([part(1, 30, {3: "5"}), put(3, "c", 31, price="7")], 20, 40, renamed))

    found = {row["id"]: row for row in read_target(record.target).read_all().to_pylist()}
    assert {i: (row["article"], row["item"]) for i, row in found.items()} == {
        1: ("old", "old"),
        2: ("b", "b"),
        3: ("c", None),
    }
    kept = {i: (row["price"], row["price%v1"] and str(row["price%v1"])) for i, row in found.items()}
    assert kept == {1: (5, "1.00"), 2: (None, "1.00"), 3: (7, None)}


@with_one_delta_writer("opened")
def test_ignore_keeps_the_targets_columns_and_fills_them(opened):
    sink = opened(schema_changes="ignore")
    publish(sink, sink.apply(batch([put(1, "a", 10), put(2, "b", 11)], 0, 20)))
    changed = having(ID, ARTICLE, replace(PRICE, typmod=-1), column(7, "note", missing="none"))
    after = {1: "3", 2: "c", 3: "7.5", 7: "n"}
    record = sink.apply(batch([part(1, 30, {3: "2.25"}), replace(put(3, "", 31), after=after)], 20, 40, changed))

    assert names(record) == ["id", "item", "price"]
    assert rows(record) == {1: ("a", "2.25"), 2: ("b", "1.00"), 3: ("c", "7.50")}
    with pytest.raises(ValueNotRepresentable, match="price"):
        sink.apply(batch([put(1, "a", 50, price="1.125")], 40, 60, changed))


@with_one_delta_writer("opened")
def test_what_was_ignored_is_not_taken_up_without_a_new_copy(opened):
    sink = opened(schema_changes="ignore")
    publish(sink, sink.apply(batch([put(1, "a", 10)], 0, 20)))
    wider = having(ID, ITEM, PRICE, column(7, "note", missing="none"))
    publish(sink, sink.apply(batch([put(1, "A", 30)], 20, 40, wider)))
    sink.close()
    with pytest.raises(SchemaNotApplicable, match="'note' was excluded"):
        opened().apply(batch([put(2, "b", 50)], 40, 60, wider))


@with_one_delta_writer("opened")
def test_exception_stops_the_table_at_the_first_change(opened):
    sink = opened(schema_changes="exception")
    before = publish(sink, sink.apply(batch([put(1, "a", 10)], 0, 20)))
    for columns in (ID, ARTICLE, PRICE), (ID, ITEM, PRICE, TAGS), (ID, ITEM):
        with pytest.raises(SchemaNotApplicable, match="'schema_changes: exception' forbids"):
            sink.apply(batch([put(1, "A", 30)], 20, 40, having(*columns)))

        assert rows(replace(before, version=None)) == {1: ("a", "1.00")}


def test_arrays_are_lists_and_one_of_two_dimensions_is_refused_until_its_column_is_text(opened):
    schema = having(ID, TAGS)

    def tagged(id_: int, position: int, text: str | None) -> Row:
        return Row((str(id_),), position, {1: str(id_), 4: text})

    sink = opened()
    first = batch([tagged(1, 10, "{1,NULL}"), tagged(2, 11, None), tagged(3, 12, "{}")], 0, 20, schema)
    record = publish(sink, sink.apply(first))
    assert {row["id"]: row["tags"] for row in read_target(record.target).read_all().to_pylist()} == {
        1: [1, None],
        2: None,
        3: [],
    }
    with pytest.raises(ValueNotRepresentable, match="tags"):
        sink.apply(batch([tagged(4, 30, "{{1},{2}}")], 20, 40, schema))
    sink.close()
    record = opened(columns={"tags": "text"}).apply(batch([tagged(4, 30, "{{1},{2}}")], 20, 40, schema))

    assert rows(record) == {1: ("{1,NULL}",), 2: ("None",), 3: ("{}",), 4: ("{{1},{2}}",)}


@with_one_delta_writer("opened")
def test_a_target_that_holds_arrays_as_text_goes_on_so(opened):
    schema = having(ID, TAGS)
    old = opened(types="text")
    publish(old, old.apply(batch([Row(("1",), 10, {1: "1", 4: "{1,2}"})], 0, 20, schema)))
    old.close()
    record = opened().apply(batch([Row(("2",), 30, {1: "2", 4: "{{3}}"})], 20, 40, schema))

    assert sorted(value[0] for value in rows(record).values()) == ["{1,2}", "{{3}}"]


@with_one_delta_writer("opened")
def test_an_added_array_takes_its_default_and_one_that_no_list_holds_is_refused(opened):
    sink = opened()
    publish(sink, sink.apply(batch([put(1, "a", 10)], 0, 20)))
    with pytest.raises(ValueNotRepresentable, match="default"):
        sink.apply(batch(None, 20, 30, having(ID, ITEM, PRICE, replace(TAGS, missing="{{1}}"))))
    words = column(5, "words", "text[]", oid=1009, missing='{a,"b c",NULL}')
    record = sink.apply(batch(None, 20, 40, having(ID, ITEM, PRICE, replace(TAGS, missing="{4,NULL}"), words)))

    (row,) = read_target(record.target).read_all().to_pylist()
    assert (row["tags"], row["words"]) == ([4, None], ["a", "b c", None])


def test_after_a_crash_a_range_from_before_finds_its_columns_in_a_target_with_a_transform(tmp_path):
    said = {"drop": ["secret"], "rename": {"price": "cost"}, "mask": {"price": "redact"}}
    rule = SinkRule.model_validate({"match": "shop.*", "transform": said})
    secret, note = column(5, "secret"), column(6, "note", missing="none")
    old, new = having(ID, ITEM, PRICE, secret), having(ID, ARTICLE, WIDER, secret, note)

    def driver() -> DeltaSink:
        sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", rules=(rule,)))
        sink.open("log-1")
        return sink

    sink = driver()
    record = publish(sink, sink.apply(batch([whole(1, 10, "long", "1.00", "s", ids=(2, 3, 5))], 0, 20, old)))
    sink.close()
    target = DeltaTarget.open(record.target)
    assert target is not None
    # as far as a killed driver came
    evolution = ColumnChange(
        sink.parts.targets.shape(new).columns, SchemaChanges.EVOLVE, replaced=False, topic="public.orders"
    )
    target.evolve_columns(evolution, 40)
    sink = driver()
    both = [part(1, 25, {3: "1.75"}), whole(2, 26, "b", "1.00", "s", ids=(2, 3, 5))]
    publish(sink, sink.apply(batch(both, 20, 28, old)))
    record = publish(sink, sink.apply(batch([part(1, 30, {6: "x"})], 28, 40, new)))

    assert names(record) == ["id", "article", "cost", "note"]
    assert rows(record) == {1: ("long", "***", "x"), 2: ("b", "***", "none")}


def changed(folder: str) -> None:
    """A published row, then a batch that renames a column, widens one, makes one anew and leaves a partial image."""
    sink = DeltaSink(DeltaSettings("lake", f"{folder}/{{schema}}/{{table}}"))
    if sink.open("log-1") is None:
        note = column(5, "note")
        row = replace(put(1, "long", 10), after={1: "1", 2: "long", 3: "1.00", 5: "gone"})
        publish(sink, sink.apply(batch([row], 0, 20, having(ID, ITEM, PRICE, note))))
    note = column(6, "note", missing="new")
    sink.apply(batch([part(1, 30, {3: "2.5000", 6: "x"})], 20, 40, having(ID, ARTICLE, WIDER, note)))


@pytest.mark.parametrize(
    "point",
    [  # the slow ones are in test_delta_dropped as well
        *(pytest.param(point, marks=pytest.mark.slow) for point in ("delta_before_columns", "delta_after_columns")),
        "delta_after_refill",
    ],
)
@pytest.mark.parametrize(
    "then", ["shorter", *(pytest.param(then, marks=pytest.mark.slow) for then in ["the same", "longer"])]
)
def test_killed_at_any_step_of_an_evolution_any_range_from_there_gives_the_same_table(tmp_path, point, then):
    assert forked.run(__name__, tmp_path, environment={VARIABLE: point}).status == -9
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}"))
    assert sink.open("log-1") is not None
    if then == "shorter":
        # the columns of before, and a value that only they have
        old = having(ID, ITEM, PRICE, column(5, "note"))
        both = [part(1, 25, {3: "1.75"}), whole(2, 26, "b", "1.00", "old", ids=(2, 3, 5))]
        publish(sink, sink.apply(batch(both, 20, 28, old)))
    new = having(ID, ARTICLE, WIDER, column(6, "note", missing="new"))
    begins, ends = (28 if then == "shorter" else 20), (60 if then == "longer" else 40)
    record = publish(sink, sink.apply(batch([part(1, 30, {3: "2.5000", 6: "x"})], begins, ends, new)))

    second = {2: ("b", "1.0000", "new")} if then == "shorter" else {}
    assert rows(record) == {1: ("long", "2.5000", "x"), **second}
    assert names(record) == ["id", "article", "price", "note"]
    target = DeltaTarget.open(record.target)
    assert target is not None
    assert set(target.statistics_columns) == {"_position", "_ordinal", *names(record)} - {"price"}


if __name__ == "__main__":
    changed(sys.argv[1])
