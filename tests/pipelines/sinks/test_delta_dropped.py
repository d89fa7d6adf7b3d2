"""Columns that a table has no more, where `dropped_columns: drop` takes them out of its target: both writers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType

from cdc.config import SchemaChanges, SinkRule, TableSettings
from cdc.errors import SchemaNotApplicable, TargetRulesChanged
from cdc.failpoint import VARIABLE
from cdc.table import Column, TableSchema
from cdc.targets.lake_reader import read_target
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.schema_evolution import ColumnChange
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ID, ITEM, ORDERS, PRICE, batch, column, part, put, with_one_delta_writer
from tests.fixtures import forked
from tests.pipelines.sinks.test_delta_schema_changes import ARTICLE, WIDER, having, names, publish, rows, whole

NOTE = column(4, "note")
NOTED = having(ID, ITEM, PRICE, NOTE)
Opened = Callable[..., DeltaSink]


def noted(id_: int, position: int, note: str | None) -> Any:
    return whole(id_, position, "long", "1.00", note, ids=(2, 3, 4))


@pytest.fixture(name="opened", params=["indexed", "copy-on-write", pytest.param("spark", marks=pytest.mark.slow)])
def _opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """Opens a driver of one sink; words are those of the rule for its tables."""
    spark = request.getfixturevalue("spark") if request.param == "spark" else None

    def make(**said: Any) -> DeltaSink:
        rule = SinkRule.model_validate({"match": "shop.*", "dropped_columns": "drop", **said})
        template = f"{tmp_path}/{{schema}}/{{table}}"
        sink = DeltaSink(DeltaSettings("lake", template, Writer(request.param), rules=(rule,)), spark)
        sink.open("log-1")
        return sink

    return make


def test_a_column_goes_when_its_table_dropped_it_and_all_others_keep_what_they_hold(opened: Opened) -> None:
    sink = opened()
    before = publish(sink, sink.apply(batch([noted(1, 10, "x"), noted(2, 11, "y")], 0, 20, NOTED)))
    record = sink.apply(batch([part(1, 30, {3: "2.00"}), put(3, "c", 31)], 20, 40))

    assert names(record) == ["id", "item", "price"]
    assert rows(record) == {1: ("long", "2.00"), 2: ("long", "1.00"), 3: ("c", "1.00")}
    assert rows(before)[1] == ("long", "1.00", "x")
    target = DeltaTarget.open(record.target)
    assert target is not None
    assert set(target.statistics_columns) == {"_position", "_ordinal", "id", "item"}


@with_one_delta_writer("opened")
def test_what_a_table_drops_and_renames_and_widens_at_once_is_one_commit(opened: Opened) -> None:
    sink = opened()
    before = publish(sink, sink.apply(batch([noted(1, 10, "x")], 0, 20, NOTED)))
    record = publish(sink, sink.apply(batch(None, 20, 40, having(ID, ARTICLE, WIDER))))

    assert (names(record), rows(record)) == (["id", "article", "price"], {1: ("long", "1.0000")})
    held = DeltaTable(record.target)
    operations = [commit["operation"] for commit in held.history() if commit["version"] > (before.version or 0)]
    assert operations.count("WRITE") == 1


def test_a_name_that_is_given_to_another_column_at_once_is_that_columns(opened: Opened) -> None:
    sink = opened()
    publish(sink, sink.apply(batch([noted(1, 10, "x")], 0, 20, NOTED)))
    anew = having(ID, ITEM, PRICE, replace(NOTE, id=9, missing="new"))
    record = sink.apply(batch([whole(2, 30, "b", "1.00", "own", ids=(2, 3, 9))], 20, 40, anew))

    assert rows(record) == {1: ("long", "1.00", "new"), 2: ("b", "1.00", "own")}


@pytest.mark.parametrize("item", [ITEM, replace(ITEM, type_oid=23, type_name="integer")], ids=["evolve", "lenient"])
@with_one_delta_writer("opened")
def test_under_try_evolve_it_goes_whichever_way_the_target_follows(opened: Opened, item: Column) -> None:
    sink = opened(schema_changes="try_evolve")
    publish(sink, sink.apply(batch([noted(1, 10, "x")], 0, 20, NOTED)))
    record = sink.apply(batch(None, 20, 40, having(ID, item, PRICE)))

    assert set(names(record)) - {"item%v1"} == {"id", "item", "price"}
    assert ("item%v1" in names(record)) == (item is not ITEM)


@with_one_delta_writer("opened")
def test_a_column_that_was_kept_goes_with_the_first_batch_under_the_new_word(opened: Opened) -> None:
    sink = opened(dropped_columns="keep")
    publish(sink, sink.apply(batch([noted(1, 10, "x")], 0, 20, NOTED)))
    record = publish(sink, sink.apply(batch([put(2, "b", 30)], 20, 40)))
    assert rows(record) == {1: ("long", "1.00", "x"), 2: ("b", "1.00", "None")}
    sink.close()
    record = opened().apply(batch([put(3, "c", 50)], 40, 60))

    assert (names(record), len(rows(record))) == (["id", "item", "price"], 3)


@with_one_delta_writer("opened")
def test_a_column_of_another_hand_stays_and_one_that_the_definition_leaves_out_stops_the_table(opened: Opened) -> None:
    sink = opened()
    record = publish(sink, sink.apply(batch([noted(1, 10, "x")], 0, 20, NOTED)))
    theirs = Field("theirs", PrimitiveType("string"), nullable=True)
    DeltaTable(record.target).alter.add_columns([theirs])
    sink.close()
    with pytest.raises(TargetRulesChanged, match="has column 'item', which its rule excludes"):
        opened(except_column_list=["item"]).apply(batch([put(2, "b", 30)], 20, 40))
    record = opened().apply(batch([put(2, "b", 30)], 20, 40))

    assert sorted(names(record)) == ["id", "item", "price", "theirs"]


@with_one_delta_writer("opened")
def test_a_column_of_the_key_goes_once_the_copy_under_the_new_key_was_published(opened: Opened) -> None:
    sink = opened()
    publish(sink, sink.apply(batch([put(1, "a", 10)], 0, 20, generation=5)))
    rekeyed = having(replace(ITEM, key=0), PRICE)
    with pytest.raises(SchemaNotApplicable, match="the key"):
        sink.apply(batch(None, 20, 40, rekeyed))
    copy = replace(put(1, "a", 50), key=("a",), after={2: "a", 3: "1.00"})
    record = publish(sink, sink.apply(batch([copy], 20, 60, rekeyed, generation=45)))
    assert names(record) == ["id", "item", "price"]
    record = publish(sink, sink.apply(batch(None, 60, 80, rekeyed)))

    assert names(record) == ["item", "price"]
    assert pa.table(read_target(record.target))["item"].to_pylist() == ["a"]


@pytest.mark.parametrize("said", [{}, {"transform": {"mask": {"item": "redact"}}}], ids=["plain", "masked"])
@pytest.mark.parametrize("there", [[], [noted(1, 10, "x")]], ids=["empty", "rows"])
@with_one_delta_writer("opened")
def test_a_range_from_before_is_written_without_the_column_that_is_gone(
    opened: Opened, said: dict[str, Any], there: list[Any]
) -> None:
    sink = opened(**said)
    record = publish(sink, sink.apply(batch(there, 0, 20, NOTED)))
    sink.close()
    target = DeltaTarget.open(record.target)
    assert target is not None
    wanted = sink.parts.targets.shape(ORDERS).columns
    # as far as a driver came that was killed then
    change = ColumnChange(
        wanted, SchemaChanges.EVOLVE, replaced=False, topic="public.orders", dropped=frozenset({b"4"})
    )
    target.evolve_columns(change, 40)
    again = opened(**said)
    record = publish(again, again.apply(batch([noted(2, 26, "y")], 20, 28, NOTED)))

    assert names(record) == ["id", "item", "price"]
    assert rows(record).keys() == {2, *(int(row.key[0]) for row in there)}


MASKED = {"mask": {"item": "redact"}}
LATER = [part(1, 30, {3: "2.00"}), put(3, "c", 31)]


def driver(folder: str, masked: str) -> DeltaSink:
    said = {"transform": MASKED} if masked else {}
    rule = SinkRule.model_validate({"match": "shop.*", "dropped_columns": "drop", **said})
    sink = DeltaSink(DeltaSettings("lake", f"{folder}/{{schema}}/{{table}}", table=TableSettings(), rules=(rule,)))
    if sink.open("log-1") is None:
        publish(sink, sink.apply(batch([noted(1, 10, "x")], 0, 20, NOTED)))
    return sink


def drop(folder: str, masked: str) -> None:
    """A published row, then a batch of a table that has dropped a column."""
    driver(folder, masked).apply(batch(LATER, 20, 40, ORDERS))


def shorter(sink: DeltaSink, schema: TableSchema) -> None:
    """A range from before the column was dropped, with values that only it has."""
    both = [part(1, 25, {3: "1.75", 4: "X"}), noted(2, 26, "y")]
    record = publish(sink, sink.apply(batch(both, 20, 28, schema)))
    assert rows(record).keys() == {1, 2}


QUICK = {("delta_after_columns", "shorter", "masked")}


@pytest.mark.parametrize(
    ("point", "then", "masked"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(
            ("delta_before_columns", "delta_after_columns"), ("shorter", "the same", "longer"), ("", "masked")
        )
    ],
)
def test_killed_while_a_column_goes_any_range_from_there_gives_the_same_table(
    tmp_path: Path, point: str, then: str, masked: str
) -> None:
    assert forked.run(__name__, tmp_path, masked, environment={VARIABLE: point}).status == -9
    sink = driver(str(tmp_path), masked)
    if then == "shorter":
        shorter(sink, NOTED)
    begins, ends = (28 if then == "shorter" else 20), (60 if then == "longer" else 40)
    record = publish(sink, sink.apply(batch(LATER, begins, ends)))

    long, c = ("***", "***") if masked else ("long", "c")
    second = {2: (long, "1.00")} if then == "shorter" else {}
    assert rows(record) == {1: (long, "2.00"), **second, 3: (c, "1.00")}
    assert names(record) == ["id", "item", "price"]


if __name__ == "__main__":
    drop(*sys.argv[1:])
