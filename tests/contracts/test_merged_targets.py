"""Many tables in one target, held against both Delta writers: no table sees or touches a row of another one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from cdc.config import SchemaChanges, SinkRule
from cdc.errors import CutUnavailable, SchemaNotApplicable, TransformFailed
from cdc.position import Position
from cdc.table import Column, TableSchema, TableState
from cdc.targets.lake_reader import Lake as Reading
from cdc.targets.lake_reader import read_target
from cdc.targets.published_record import Published, TableRecord, TargetState
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.schema_evolution import ColumnChange
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.target_part import delete_other_tables
from tests.contracts.folded import ID, ITEM, ORDERS, PRICE, Row, batch, column, gone, part, put, with_one_delta_writer

LOG = "log-1"
EAST, WEST, NORTH = (replace(ORDERS, relation=r, oid=r, name=f"orders_{r}") for r in (1, 2, 3))
NOTE = column(4, "note")


@dataclass
class Lake:
    """Drivers of one sink, with a rule that puts the tables called orders_… together."""

    root: Path
    writer: Writer
    spark: Any

    def driver(self, *more: SinkRule, **said: Any) -> DeltaSink:
        rule = {"match": "shop.orders_*", "path": f"{self.root}/all", "merge_tables": True, **said}
        rules = (*more, SinkRule.model_validate(rule))
        template = f"{self.root}/{{schema}}/{{table}}"
        sink = DeltaSink(DeltaSettings("lake", template, self.writer, rules=rules), self.spark)
        sink.open(LOG)
        return sink

    @property
    def reading(self) -> Reading:
        return Reading.open(f"{self.root}/{{schema}}/{{table}}")


@pytest.fixture(params=["indexed", "copy-on-write", pytest.param("spark", marks=pytest.mark.slow)])
def lake(request, tmp_path: Path) -> Lake:
    spark = request.getfixturevalue("spark") if request.param == "spark" else None
    return Lake(tmp_path / "lake", Writer(request.param), spark)


@pytest.fixture
def quick(tmp_path: Path) -> Lake:
    """Of the writer that does without Spark, for what is decided before anything is written."""
    return Lake(tmp_path / "lake", Writer.COPY_ON_WRITE, None)


def rows(record: TableRecord, *names: str) -> dict[tuple[int, int], Any]:
    """By table and key: the item, or the columns that are named."""
    found = read_target(record.target, record.version).read_all().to_pylist()
    keyed = {(row["_relation"], row["id"]): [row[name] for name in names or ("item",)] for row in found}
    assert len(keyed) == len(found)
    return {key: values if names else values[0] for key, values in keyed.items()}


def apply(sink: DeltaSink, schema: TableSchema, images: list[Row], after: int, upto: int, **more: Any) -> TableRecord:
    return sink.apply(batch(images, after, upto, schema, **more))


def publish(sink: DeltaSink, position: int, *records: TableRecord) -> Published:
    published = Published(position, 0, {record.relation: record for record in records})
    sink.publish(published)
    return published


def begun(sink: DeltaSink) -> list[TableRecord]:
    """Three tables with the keys 1 and 2, complete at 20."""
    return [
        apply(sink, schema, [put(1, f"{place}-1", 10), put(2, f"{place}-2", 11)], 0, 20, generation=5)
        for schema, place in ((EAST, "e"), (WEST, "w"), (NORTH, "n"))
    ]


WHOLE = {(1, 1): "e-1", (1, 2): "e-2", (2, 1): "w-1", (2, 2): "w-2", (3, 1): "n-1", (3, 2): "n-2"}


def test_equal_keys_of_several_tables_are_rows_of_their_own(lake):
    sink = lake.driver()
    begun(sink)
    apply(sink, EAST, [put(1, "E-1", 30), gone(2, 31)], 20, 40)
    apply(sink, NORTH, [gone(1, 30), put(7, "n-1", 30, ordinal=1)], 20, 40)
    record = apply(sink, WEST, [put(1, "W-1", 30), put(3, "w-3", 31)], 20, 40)

    expected = {(1, 1): "E-1", (2, 1): "W-1", (2, 2): "w-2", (2, 3): "w-3", (3, 7): "n-1", (3, 2): "n-2"}
    assert rows(record) == expected
    assert record.state == TargetState.STREAMING
    assert DeltaTable(record.target).metadata().partition_columns == ["_relation"]


def test_a_merge_leaves_the_files_of_other_tables_alone(lake):
    sink = lake.driver()
    record = begun(sink)[-1]
    assert lake.writer is not Writer.SPARK or not [
        done for done in DeltaTable(record.target).history() if done["operation"] == "MERGE"
    ]
    files = pa.table(DeltaTable(record.target).get_add_actions(flatten=True))
    others = files.filter(pc.not_equal(files["partition._relation"], 2))["path"].to_pylist()
    apply(sink, WEST, [put(1, "W-1", 30), gone(2, 31)], 20, 40)

    assert others
    assert set(others) < set(pa.table(DeltaTable(record.target).get_add_actions(flatten=True))["path"].to_pylist())


def test_a_truncate_and_the_end_of_a_copy_take_rows_of_their_own_table_alone(lake):
    sink = lake.driver()
    begun(sink)
    cleared = apply(sink, EAST, [put(9, "after", 30, ordinal=5)], 20, 40, truncated=(30, 4))
    assert rows(cleared) == {(1, 9): "after"} | {key: item for key, item in WHOLE.items() if key[0] != 1}

    copied = apply(sink, WEST, [put(1, "again", 36)], 20, 40, generation=35)
    assert rows(copied) == {(1, 9): "after", (2, 1): "again", (3, 1): "n-1", (3, 2): "n-2"}
    emptied = apply(sink, NORTH, [], 20, 40, truncated=(39, 0))
    assert rows(emptied) == {(1, 9): "after", (2, 1): "again"}


def test_each_table_is_complete_by_its_own_copy(quick):
    sink = quick.driver()
    first = apply(sink, EAST, [put(1, "a", 10)], 0, 20, generation=5)
    second = apply(sink, replace(WEST, state=TableState.SNAPSHOTTING), [put(1, "b", 10)], 0, 20)

    assert (first.state, second.state) == ("streaming", "snapshotting")
    assert apply(sink, EAST, [], 20, 40).state == "streaming"
    assert apply(sink, WEST, [], 20, 40, generation=15).state == "streaming"


def test_unsent_columns_come_from_the_table_s_own_row(lake):
    sink = lake.driver()
    begun(sink)
    record = apply(sink, WEST, [part(1, 30, {3: "7.00"}), part(5, 31, {3: "8.00"}, base=("2",)), gone(2, 30)], 20, 40)

    assert rows(record) == {**{key: item for key, item in WHOLE.items() if key != (2, 2)}, (2, 5): "w-2"}


@pytest.mark.parametrize("end", [40, 60])
@with_one_delta_writer("lake")
def test_a_crash_between_two_tables_of_a_target_leaves_each_exact(lake, end):
    """The driver dies after one of them; the next one comes with the same range, or with a longer one."""
    crashed = lake.driver()
    publish(crashed, 20, *begun(crashed))
    moved = [part(8, 30, {3: "3.00"}, base=("1",), ordinal=1), gone(1, 30)]
    apply(crashed, EAST, moved, 20, 40)
    crashed.close()

    sink = lake.driver()
    opened = {r: (t.position, t.state) for r, t in sink.open(LOG).tables.items()}
    assert opened == {1: (40, "catching_up"), 2: (20, "streaming"), 3: (20, "streaming")}
    late = [put(9, "late", 50)] if end > 40 else []
    records = [apply(sink, schema, [*moved, *late], 20, end) for schema in (EAST, WEST)]
    records.append(apply(sink, NORTH, [], 20, end))
    publish(sink, end, *records)

    expected = {(1, 8): "e-1", (1, 2): "e-2", (2, 8): "w-1", (2, 2): "w-2", (3, 1): "n-1", (3, 2): "n-2"}
    expected |= {(1, 9): "late", (2, 9): "late"} if late else {}
    assert rows(records[-1]) == expected


def test_a_reader_of_a_cut_sees_no_row_that_another_table_is_ahead_with(quick):
    crashed = quick.driver()
    first = publish(crashed, 20, *begun(crashed))
    apply(crashed, EAST, [put(1, "ahead", 30)], 20, 40)
    crashed.close()
    assert told(quick, "select id, item from orders_1") == {1: "e-1", 2: "e-2"}

    sink = quick.driver()
    opened = sink.open(LOG)
    west = apply(sink, WEST, [put(1, "W-1", 25)], 20, 30)
    publish(sink, 30, *(replace(opened.tables[r], position=max(30, opened.tables[r].position)) for r in (1, 3)), west)
    assert told(quick, "select id, item from orders_2") == {1: "W-1", 2: "w-2"}
    assert told(quick, "select id, item from orders_2", Position(25)) == {1: "w-1", 2: "w-2"}
    for name in ("orders_1", '"all"'):
        with pytest.raises(CutUnavailable, match="orders_1"):
            told(quick, f"select id, item from {name}")
    assert sorted(told(quick, 'select _relation * 10 + id, item from "all"', first)) == [11, 12, 21, 22, 31, 32]


def told(lake: Lake, sql: str, *at: Any) -> dict[int, str]:
    found = lake.reading.query(sql, *at).read_all().to_pylist()
    return dict(row.values() for row in found)


def test_a_kept_cut_is_the_newest_version_of_a_target_unless_one_of_its_tables_is_ahead_there(quick):
    sink = quick.driver()
    records = begun(sink)
    uri, published = records[0].target, publish(sink, 20, *records)
    DeltaTable(uri).delete("_relation = 1 AND id = 2")  # another hand
    newest = DeltaTable(uri).version()
    assert json.loads(sink.pin(published)) == {uri: newest}
    assert newest > published.versions[uri]

    apply(sink, WEST, [put(1, "ahead", 30)], 20, 40)
    assert json.loads(sink.pin(published)) == published.versions
    assert len(rows(replace(records[0], version=published.versions[uri]))) == len(WHOLE)


def test_tables_that_are_applied_at_the_same_time_come_one_after_the_other(lake):
    sink = lake.driver()
    tables = [replace(ORDERS, relation=r, oid=r, name=f"orders_{r}") for r in range(1, 6)]
    for upto in (20, 40):
        with ThreadPoolExecutor(4) as pool:
            batches = [batch([put(1, f"{t.relation}-{upto}", upto)], upto - 20, upto, t) for t in tables]
            records = list(pool.map(sink.apply, batches))

    newest = max(records, key=lambda record: record.version or 0)
    assert rows(newest) == {(t.relation, 1): f"{t.relation}-40" for t in tables}


@with_one_delta_writer("lake")
def test_columns_are_those_of_all_tables_by_name(lake):
    """A column comes to one table; another gets it later, under an id and with a default of its own."""
    sink = lake.driver()
    records = {record.relation: record for record in begun(sink)}

    def step(schema: TableSchema, images: list[Row], upto: int) -> TableRecord:
        records[schema.relation] = apply(sink, schema, images, upto - 20, upto)
        publish(sink, upto, *(replace(record, position=upto) for record in records.values()))
        return records[schema.relation]

    publish(sink, 20, *records.values())
    noted = replace(EAST, columns=(ID, ITEM, PRICE, NOTE))
    assert rows(step(noted, [Row(("3",), 30, {1: "3", 2: "e-3", 3: "1", 4: "new"})], 40), "note")[1, 3] == ["new"]
    step(WEST, [put(1, "W-1", 50)], 60)
    later = replace(WEST, columns=(ID, ITEM, PRICE, replace(NOTE, id=9, missing="old")))
    step(later, [Row(("3",), 70, {1: "3", 2: "w-3", 3: "1", 9: "own"})], 80)
    step(later, [part(2, 90, {3: "5.00"})], 100)
    record = step(noted, [part(3, 110, {3: "6.00"})], 120)

    found = {key: note for key, (note,) in rows(record, "note").items()}
    assert found == {(1, 1): None, (1, 2): None, (1, 3): "new", (3, 1): None, (3, 2): None} | {
        (2, 1): "old",
        (2, 2): "old",
        (2, 3): "own",
    }
    assert rows(record, "price")[1, 3] != rows(record, "price")[2, 3]


@with_one_delta_writer("lake")
def test_a_table_may_begin_with_other_columns_and_another_order_of_them(lake):
    sink = lake.driver()
    apply(sink, EAST, [put(1, "a", 10)], 0, 20)
    other = replace(WEST, columns=(replace(NOTE, id=1), replace(ITEM, id=5), replace(ID, id=6)))
    record = apply(sink, other, [Row(("1",), 10, {1: "text", 5: "b", 6: "1"})], 0, 20)
    record = apply(sink, EAST, [put(2, "c", 30)], 20, 40)

    assert rows(record, "item", "note") == {(1, 1): ["a", None], (1, 2): ["c", None], (2, 1): ["b", "text"]}


CLASHES: Mapping[str, tuple[Column, ...]] = {
    "already has column 'item' of type string": (ID, replace(ITEM, type_oid=20, type_name="bigint"), PRICE),
    "but the shared target already has column 'item'": (ID, PRICE, column(8, "Item")),
    "renaming column 'item' to 'article'": (ID, replace(ITEM, name="article"), PRICE),
    "another column took its name": (ID, replace(ITEM, id=8), PRICE),
}
NAMES = list(CLASHES)[2:]


@pytest.mark.parametrize("said", CLASHES)
def test_what_would_change_a_column_under_other_tables_stops_the_one_that_wants_it(quick, said):
    sink = quick.driver()
    begun(sink)
    changed = replace(EAST, columns=CLASHES[said])
    with pytest.raises(SchemaNotApplicable, match=said):
        apply(sink, changed, [Row(("3",), 30, {1: "3", 2: "4", 8: "5"})], 20, 40)

    record = apply(sink, WEST, [put(3, "w-3", 30)], 20, 40)
    assert rows(record) == {**WHOLE, (2, 3): "w-3"}


@pytest.mark.parametrize("said", NAMES)
def test_a_table_that_stopped_over_a_name_goes_on_once_it_was_copied_again(quick, said):
    sink = quick.driver()
    begun(sink)
    changed = replace(EAST, columns=CLASHES[said])
    id_, name = next((c.id, c.name) for c in changed.columns if c.id in (2, 8))
    copied = [Row(("1",), 46, {1: "1", id_: "new", 3: "1"})]
    copying = replace(changed, state=TableState.SNAPSHOTTING)
    for version, more in ((copying, {}), (changed, {"generation": 15})):  # 15: some rows are younger, and would stay
        with pytest.raises(SchemaNotApplicable, match=said):
            apply(sink, version, copied, 20, 60, **more)
    record = apply(sink, changed, copied, 20, 60, generation=45)

    assert rows(record, name)[1, 1] == ["new"]
    assert {key for key in rows(record) if key[0] == 1} == {(1, 1)}
    assert rows(apply(sink, changed, [part(1, 70, {3: "2"})], 60, 80), name)[1, 1] == ["new"]


def test_a_shorter_range_from_before_a_new_name_waits_after_a_crash(quick):
    """The driver died when the part had the names of the copy, and before it had the rows."""
    sink = quick.driver()
    uri = begun(sink)[0].target
    changed = replace(EAST, columns=CLASHES["renaming column 'item' to 'article'"])
    whole = DeltaTarget.open(uri)
    assert whole is not None
    columns = sink.parts.targets.shape(changed).columns
    whole.part_of(1).evolve_columns(
        ColumnChange(columns, SchemaChanges.EVOLVE, replaced=True, topic="public.orders"), 60
    )

    again = quick.driver()
    with pytest.raises(SchemaNotApplicable, match="renaming column 'article' to 'item'"):
        apply(again, EAST, [part(1, 30, {3: "2"})], 20, 40)
    record = apply(again, changed, [put(1, "new", 46)], 20, 60, generation=45)
    assert rows(record, "article")[1, 1] == ["new"]


def test_under_exception_a_table_stops_at_its_own_first_change_and_not_at_another_s(quick):
    sink = quick.driver(schema_changes="exception")
    begun(sink)
    other = replace(ORDERS, relation=4, oid=4, name="orders_4", columns=(ID, ITEM, PRICE, NOTE))
    apply(sink, other, [Row(("1",), 10, {1: "1", 2: "a", 3: "1", 4: "n"})], 0, 20)
    apply(sink, EAST, [put(3, "e-3", 30)], 20, 40)
    for columns, said in (((ID, ITEM, PRICE, NOTE), "'note' was added"), ((ID, ITEM), "'price' was dropped")):
        with pytest.raises(SchemaNotApplicable, match=said):
            apply(sink, replace(EAST, columns=columns), [], 40, 60)


def test_a_table_that_was_dropped_and_made_anew_is_not_put_beside_its_old_rows(quick):
    sink = quick.driver()
    begun(sink)
    again = replace(EAST, relation=7, oid=7)
    with pytest.raises(SchemaNotApplicable, match="as relation 1"):
        apply(sink, again, [put(1, "a", 30)], 20, 40)

    apply(sink, replace(EAST, name="orders_old"), [], 20, 40)
    apply(sink, again, [put(1, "a", 30)], 20, 40)


def test_a_table_that_a_target_forgot_begins_anew(quick):
    """As one does that a replay could not build to its end."""
    sink = quick.driver()
    record = begun(sink)[-1]
    whole = DeltaTarget.open(record.target)
    assert whole is not None
    delete_other_tables(whole, {1, 3})

    again = quick.driver()
    record = apply(again, WEST, [put(1, "anew", 30)], 20, 40)
    assert rows(record) == {**{key: item for key, item in WHOLE.items() if key[0] != 2}, (2, 1): "anew"}
    assert record.state == "snapshotting"


def test_a_table_without_a_key_has_no_place_in_a_target_of_many(quick):
    sink = quick.driver()
    with pytest.raises(SchemaNotApplicable, match="has no key"):
        apply(sink, replace(EAST, columns=(replace(ID, key=None), ITEM)), [], 0, 20)


def test_a_target_of_many_tables_is_no_target_of_one_and_the_other_way_round(quick):
    sink = quick.driver()
    begun(sink)
    single = SinkRule.model_validate({"match": "shop.orders_1", "path": f"{quick.root}/all"})
    with pytest.raises(SchemaNotApplicable, match="several tables share target"):
        apply(quick.driver(single), EAST, [put(1, "a", 30)], 20, 40)
    both = quick.driver(single)
    apply(both, WEST, [], 20, 40)
    with pytest.raises(TransformFailed, match="the target of table"):
        apply(both, EAST, [put(1, "a", 30)], 20, 40)
    apart = quick.driver(single.model_copy(update={"path": f"{quick.root}/one"}))
    apply(apart, EAST, [put(1, "a", 30)], 20, 40)
    with pytest.raises(TransformFailed, match="contains a single table"):
        apply(quick.driver(path=f"{quick.root}/one"), EAST, [put(1, "a", 30)], 20, 40)


@with_one_delta_writer("lake")
def test_a_transform_and_partitions_of_the_rule_hold_for_every_table(lake):
    sink = lake.driver(transform={"rename": {"item": "article"}, "drop": ["price"]}, partition_by=["article"])
    apply(sink, EAST, [put(1, "a", 10), put(2, "b", 11)], 0, 20)
    apply(sink, WEST, [put(1, "a", 10)], 0, 20)
    record = apply(sink, EAST, [put(1, "b", 30), gone(2, 31)], 20, 40)

    assert rows(record, "article") == {(1, 1): ["b"], (2, 1): ["a"]}
    assert DeltaTable(record.target).metadata().partition_columns == ["_relation", "article"]


def test_the_rows_that_one_table_cannot_take_are_told_of_that_table(quick):
    sink = quick.driver()
    begun(sink)
    wrong = batch([put(1, "a", 30, price="no number"), part(9, 31, {3: "1"}), part(2, 32, {3: "1"})], 20, 40, WEST)

    assert [refusal.row for refusal in sink.find_refused(wrong, 10)] == [0, 1]


@pytest.mark.slow
def test_executors_fill_and_merge_into_the_part_of_a_table(spark, tmp_path: Path):
    lake = Lake(tmp_path / "lake", Writer.SPARK, spark)
    sink = lake.driver()
    noted = replace(EAST, columns=(ID, ITEM, PRICE, NOTE))
    apply(sink, noted, [Row(("1",), 10, {1: "1", 2: "a", 3: "1", 4: "n"})], 0, 20)
    images = batch([put(1, "b", 10), put(2, "c", 11)], 0, 20, WEST, generation=5)
    typed = spark.createDataFrame(sink.parts.targets.shape(WEST).rows(images.rows))
    sink.bulk_load().fill(replace(images, rows=None), typed)
    later = batch([put(1, "B", 30), gone(2, 31), part(3, 32, {3: "4"}, base=("2",))], 20, 40, WEST)
    record = sink.apply(replace(later, rows=None, frame=spark.createDataFrame(later.rows)))

    assert rows(record, "item", "note") == {(1, 1): ["a", "n"], (2, 1): ["B", None], (2, 3): ["c", None]}
