"""Targets of tables with a rule, held against both Delta writers: transform, routing, partitions and properties."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from cdc.config import Secret, SinkRule
from cdc.errors import MissingBase, TargetRulesChanged, TransformFailed
from cdc.targets.lake_reader import read_target
from pipelines.sinks.contract import SparkAwaited, TableRecord
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS, batch, column, gone, part, put, with_one_delta_writer

LOG = "log-1"


@dataclass
class Lake:
    """Drivers of one sink, each with a rule for shop.orders."""

    root: Path
    writer: Writer
    spark: Any

    def driver(self, *, spark: bool = True, **rule: Any) -> DeltaSink:
        said = SinkRule.model_validate({"match": "shop.orders*", **rule})
        settings = DeltaSettings("lake", f"{self.root}/{{schema}}/{{table}}", self.writer, rules=(said,))
        sink = DeltaSink(settings, self.spark if spark or self.writer is Writer.SPARK else None)
        sink.open(LOG)
        return sink


@pytest.fixture(params=["indexed", "copy-on-write", pytest.param("spark", marks=pytest.mark.slow)])
def lake(request, spark, tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake", Writer(request.param), spark)


def rows(record: TableRecord) -> dict[int, dict[str, Any]]:
    found = read_target(record.target, record.version).read_all().to_pylist()
    return {row["id"]: {n: v for n, v in row.items() if n not in ("id", "_position", "_ordinal")} for row in found}


COMPUTED = {
    "drop": ["price"],
    "rename": {"item": "article"},
    "computed": {"shout": "upper(ARTICLE)", "number": "id * 10"},
    "where": "article <> 'hidden' OR article IS NULL",
}


def test_rows_are_in_the_target_as_the_rule_makes_them_and_leave_it_when_the_filter_rejects_them(lake):
    sink = lake.driver(transform=COMPUTED)
    record = sink.apply(batch([put(1, "a", 10), put(2, "hidden", 11), put(3, None, 12)], 0, 20))
    assert rows(record) == {
        1: {"article": "a", "shout": "A", "number": 10},
        3: {"article": None, "shout": None, "number": 30},
    }
    swapped = sink.apply(batch([put(1, "hidden", 30), put(2, "b", 31)], 20, 40))
    assert {key: row["shout"] for key, row in rows(swapped).items()} == {2: "B", 3: None}

    back = sink.apply(batch([put(1, "c", 50), gone(2, 51)], 40, 60))
    assert {key: row["shout"] for key, row in rows(back).items()} == {1: "C", 3: None}
    assert rows(sink.apply(batch([put(1, "c", 50), gone(2, 51)], 40, 60))) == rows(back)


def test_columns_that_were_not_sent_stay_masked_as_they_are_and_are_computed_from(lake):
    salted = {"mask": {"item": "sha256"}, "salt": Secret("pepper", {"env": "S"})}
    sink = lake.driver(transform={**salted, "computed": {"first": "substr(item, 1, 8)", "double": "price * 2"}})
    before = rows(sink.apply(batch([put(1, "a@b.c", 10)], 0, 20)))[1]
    after = rows(sink.apply(batch([part(1, 30, {3: "2.00"})], 20, 40)))[1]

    assert len(before["item"]) == 64
    assert before["first"] == before["item"][:8]
    assert (after["item"], after["first"]) == (before["item"], before["first"])
    assert str(after["double"]) == "4.00"


def test_rows_are_found_by_a_key_that_was_renamed(lake):
    rule = {"rename": {"id": "number", "item": "id"}}
    lake.driver(transform=rule).apply(batch([put(1, "a", 10), put(2, "b", 11), put(3, "c", 12)], 0, 20))
    changes = batch(
        [put(1, "A", 30), part(2, 31, {3: "2.00"}), gone(3, 32), part(4, 33, {3: "3.00"}, base=("1",))], 20, 40
    )
    record = lake.driver(transform=rule).apply(changes)

    found = read_target(record.target, record.version).read_all().to_pylist()
    assert sorted((row["number"], row["id"], str(row["price"])) for row in found) == [
        (1, "A", "1.00"),
        (2, "b", "2.00"),
        (4, "a", "3.00"),
    ]


FILTER = {"where": "price < 5"}


@with_one_delta_writer("lake")
def test_a_row_that_the_filter_kept_out_needs_no_base_as_long_as_it_stays_out(lake):
    sink = lake.driver(transform=FILTER)
    sink.apply(batch([put(1, "large", 10, price="9.00"), put(2, "large", 11)], 0, 20))
    record = sink.apply(batch([part(1, 30, {3: "8.00"}), part(2, 31, {3: "7.00"})], 20, 40))

    assert rows(record) == {}


@with_one_delta_writer("lake")
def test_a_row_that_comes_in_without_all_of_its_columns_is_refused_and_never_guessed(lake):
    sink = lake.driver(transform=FILTER)
    before = sink.apply(batch([put(1, "large", 10, price="9.00"), put(2, "b", 11)], 0, 20))
    with pytest.raises(MissingBase):
        sink.apply(batch([part(1, 30, {3: "1.00"})], 20, 40))

    assert list(rows(before)) == [2]


@with_one_delta_writer("lake")
def test_nothing_is_needed_of_a_column_that_is_dropped(lake):
    sink = lake.driver(transform={"drop": ["item"], **FILTER})
    sink.apply(batch([put(1, "large", 10, price="9.00")], 0, 20))

    assert list(rows(sink.apply(batch([part(1, 30, {3: "1.00"})], 20, 40)))) == [1]


@pytest.mark.slow
def test_a_batch_of_executors_is_made_as_one_on_the_driver_is(lake):
    salted = {"mask": {"item": "sha256"}, "salt": Secret("pepper", {"env": "S"})}
    rule: dict[str, Any] = {"transform": {**salted, **FILTER, "computed": {"first": "substr(item, 1, 8)"}}}
    batches = [
        batch([put(1, "a", 10), put(2, "b", 11), put(3, "c", 12, price="9.00"), put(4, None, 13)], 0, 20),
        batch(
            [
                part(1, 30, {3: "2.00"}),
                part(2, 31, {3: "7.00"}),
                part(3, 32, {3: "8.00"}),
                put(4, "d", 33),
                put(5, "e", 34),
            ],
            20,
            40,
        ),
        batch([gone(1, 50), put(2, "again", 51), put(6, "f", 52, price="5.00")], 40, 60),
    ]
    sink = lake.driver(**rule)
    for whole in batches:
        assert whole.rows is not None
        frame = lake.spark.createDataFrame(whole.rows.drop_columns(["payload"]))
        record = sink.apply(replace(whole, rows=None, frame=frame))
    plain = Lake(lake.root / "plain", Writer.COPY_ON_WRITE, lake.spark).driver(**rule)
    for whole in batches:
        right = plain.apply(whole)

    assert rows(record) == rows(right)
    assert sorted(rows(right)) == [2, 4, 5]


@with_one_delta_writer("lake")
def test_an_expression_is_not_computed_for_rows_that_the_filter_keeps_out(lake):
    sink = lake.driver(transform={"computed": {"part": "1 / (price - 5)"}, "where": "price <> 5"})

    assert list(rows(sink.apply(batch([put(1, "a", 10), put(2, "b", 11, price="5.00")], 0, 20)))) == [1]


@with_one_delta_writer("lake")
def test_an_expression_that_fails_on_a_row_stops_the_table_without_telling_its_value(lake, capfd):
    sink = lake.driver(transform={"computed": {"n": "cast(item AS int)"}})
    with pytest.raises(TransformFailed, match="CAST_INVALID_INPUT") as refused:
        sink.apply(batch([put(1, "12", 10), put(2, "private", 11)], 0, 20))

    assert "private" not in str(refused.value) + "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (
            {"computed": {"x": "nope + 1"}},
            r"computed.x of table 'shop.orders' is invalid: UNRESOLVED_COLUMN.* `nope` at line 1",
        ),
        ({"computed": {"x": "no_such(id)"}}, "UNRESOLVED_ROUTINE"),
        ({"computed": {"x": "id +"}}, "PARSE_SYNTAX_ERROR"),
        ({"computed": {"x": "sum(id)"}}, "one value from one row"),
        ({"computed": {"x": "explode(array(1, 2))"}}, "one value from one row"),
        ({"computed": {"x": "current_date"}}, "would differ"),
        ({"computed": {"x": "null"}}, "Delta has no such type"),
        ({"where": "item"}, "'where' of table 'shop.orders' has type string: expected a condition"),
        ({"where": "nope = 1"}, "UNRESOLVED_COLUMN"),
        ({"drop": ["item"], "where": "item = 'a'"}, "UNRESOLVED_COLUMN"),
    ],
)
def test_an_expression_that_is_not_sound_is_refused_before_anything_is_written(spark, tmp_path, rule, words):
    sink = Lake(tmp_path, Writer.COPY_ON_WRITE, spark).driver(transform=rule)
    with pytest.raises(TransformFailed, match=words):
        sink.apply(batch([put(1, "a", 10)], 0, 20))

    assert not (tmp_path / "shop").exists()


def test_expressions_wait_for_spark_and_masks_do_not(spark, tmp_path):
    lake = Lake(tmp_path, Writer.COPY_ON_WRITE, spark)
    changes = batch([put(1, "a", 10)], 0, 20)
    with pytest.raises(SparkAwaited):
        lake.driver(spark=False, transform=COMPUTED).apply(changes)

    assert rows(lake.driver(spark=False, transform={"mask": {"item": "redact"}}).apply(changes))[1]["item"] == "***"


def test_no_row_is_parked_of_which_nobody_knows_what_a_function_hides(spark, tmp_path):
    lake = Lake(tmp_path, Writer.COPY_ON_WRITE, spark)

    assert lake.driver(transform={"where": "id > 1"}).parking_limits(ORDERS).stop_at > 0
    assert lake.driver(transform={"python": "m:f"}).parking_limits(ORDERS).stop_at == 0


def test_another_rule_stops_a_target_that_the_one_before_has_filled(spark, tmp_path):
    lake = Lake(tmp_path, Writer.COPY_ON_WRITE, spark)
    lake.driver(transform={"mask": {"item": "redact"}}).apply(batch([put(1, "a", 10)], 0, 20))
    others: tuple[dict[str, Any], ...] = ({}, {"transform": {"drop": ["item"]}})
    for other in others:
        with pytest.raises(TargetRulesChanged, match="another transform"):
            lake.driver(**other).apply(batch([put(2, "b", 30)], 20, 40))


def test_a_masked_column_that_is_renamed_at_the_source_stops_the_table(spark, tmp_path):
    sink = Lake(tmp_path, Writer.COPY_ON_WRITE, spark).driver(transform={"mask": {"item": "redact"}})
    sink.apply(batch([put(1, "a", 10)], 0, 20))
    renamed = replace(ORDERS, columns=(ORDERS.columns[0], column(2, "article"), ORDERS.columns[2]))
    with pytest.raises(TransformFailed, match="no column 'item'"):
        sink.apply(batch([put(1, "b", 30)], 20, 40, renamed))


def table(number: int, name: str):
    return replace(ORDERS, relation=number, oid=number, name=name)


def test_tables_go_where_the_groups_of_a_pattern_say(spark, tmp_path):
    lake = Lake(tmp_path / "a", Writer.COPY_ON_WRITE, spark)
    path = f"{tmp_path}/b/{{region}}/{{schema}}"
    sink = lake.driver(pattern=r"shop\.orders_(?P<region>[a-z]+)", path=path)
    record = sink.apply(batch([put(1, "a", 10)], 0, 20, table(1, "orders_eu")))
    assert record.target == f"{tmp_path}/b/eu/shop"

    with pytest.raises(TransformFailed, match=r"does not match the table"):
        sink.apply(batch([put(1, "a", 10)], 0, 20))


@pytest.mark.parametrize("path", ["all", "all/of_{table}"])
def test_two_tables_do_not_share_a_directory(spark, tmp_path, path):
    rules = [
        SinkRule.model_validate({"match": "shop.orders", "path": f"{tmp_path}/all"}),
        SinkRule.model_validate({"match": "shop.*", "path": f"{tmp_path}/{path}"}),
    ]
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", rules=tuple(rules)))
    sink.open(LOG)
    first = sink.apply(batch([put(1, "a", 10)], 0, 20))
    with pytest.raises(TransformFailed, match=r"the target of table 'shop\.orders'"):
        sink.apply(batch([put(1, "b", 10)], 0, 20, table(2, "others")))

    assert rows(first)[1]["item"] == "a"


def test_partitions_and_properties_are_those_of_the_rule(lake):
    rule = {"partition_by": ["shelf"], "properties": {"delta.enableChangeDataFeed": "true"}}
    rule["transform"] = {"computed": {"shelf": "substr(item, 1, 1)"}}
    sink = lake.driver(**rule)
    sink.apply(batch([put(1, "apple", 10), put(2, "bean", 11), put(3, None, 12)], 0, 20))
    record = sink.apply(batch([put(1, "beetroot", 30), part(2, 31, {3: "3.00"}), gone(3, 32)], 20, 40))

    assert {key: (row["item"], row["shelf"]) for key, row in rows(record).items()} == {
        1: ("beetroot", "b"),
        2: ("bean", "b"),
    }
    metadata = DeltaTable(record.target).metadata()
    assert metadata.partition_columns == ["shelf"]
    assert metadata.configuration["delta.enableChangeDataFeed"] == "true"


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"partition_by": ["id"]}, "is partitioned by"),
        ({"partition_by": ["item"], "properties": {"delta.enableChangeDataFeed": "true"}}, "enableChangeDataFeed"),
        ({"partition_by": ["nope"]}, "has no column 'nope'"),
    ],
)
def test_what_was_fixed_when_the_target_was_made_stays(spark, tmp_path, rule, words):
    lake = Lake(tmp_path, Writer.COPY_ON_WRITE, spark)
    lake.driver(partition_by=["item"]).apply(batch([put(1, "a", 10)], 0, 20))
    with pytest.raises(TransformFailed, match=words):
        lake.driver(**rule).apply(batch([put(2, "b", 30)], 20, 40))
