"""Writers: the conditions of a merge, and which engine merges a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from pyspark.sql import SparkSession

from cdc.config import SinkRule
from cdc.errors import TargetUnusable
from pipelines.sinks.contract import SparkAwaited
from pipelines.sinks.delta.delta_target import DeltaTarget, TxnMarker
from pipelines.sinks.delta.merge_source import source_rows
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.spark_target import frame_of
from pipelines.sinks.delta.target_columns import POSITION_KEY, RowShape
from pipelines.sinks.delta.target_layout import NewTarget, TargetLayout
from pipelines.sinks.delta.writers import MergeSpec, Writers, merge_with_spark
from pipelines.types.families import TypePolicy
from tests.contracts.folded import ORDERS, Row, batch, folded, gone, put
from tests.pipelines.sinks.added_features import add_features, filled_sink, sink_settings


def test_a_table_with_features_waits_for_spark_where_that_may_come(tmp_path: Path) -> None:
    sink, uri = filled_sink(tmp_path, Writer.AUTO)
    add_features(uri, ["inCommitTimestamp"])
    with pytest.raises(SparkAwaited):
        sink.apply(batch([put(4, "d", 30)], 20, 40))


def test_no_writer_merges_a_range_that_another_driver_merged_after_the_check(tmp_path: Path) -> None:
    sink, uri = filled_sink(tmp_path)
    sink.apply(batch([put(4, "d", 30)], 20, 40))
    sink.apply(batch([gone(4, 50)], 40, 60))
    target = DeltaTarget.open(uri)
    assert target is not None
    shape = RowShape(ORDERS, TypePolicy.EXACT)
    source = source_rows(folded([put(4, "d", 30)]), shape)
    for writer in (Writer.COPY_ON_WRITE, Writer.SPARK, Writer.INDEXED):
        with pytest.raises(CommitFailedError, match="another driver"):
            sink.parts.writers.merge(target, source, shape.key, TxnMarker(target.app_id, 40), writer)
    assert DeltaTable(uri).version() == target.version


SHAPE = RowShape(ORDERS, TypePolicy.EXACT)
SPEC = MergeSpec(("id",), ("id", "item", "_position", "_ordinal"))


def test_rows_are_matched_by_key_and_in_a_shared_target_by_relation() -> None:
    assert SPEC.condition == "s.`id` = t.`id`"
    assert replace(SPEC, relation=7).condition == "t.`_relation` = 7 AND s.`id` = t.`id`"
    assert SPEC.assignments == {f"`{name}`": f"s.`{name}`" for name in SPEC.columns}


def test_a_delete_needs_a_later_position_and_a_row_found_by_position_needs_none() -> None:
    assert SPEC.deletes.startswith("s.`_op` = 'd' AND (s.`_position` > t.`_position`")
    assert "s.`_ordinal` > t.`_ordinal`" in SPEC.deletes
    assert "s.`_ordinal` >= t.`_ordinal`" in SPEC.updates
    assert replace(SPEC, key=POSITION_KEY).deletes == "s.`_op` = 'd'"


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
def test_a_row_is_replaced_by_a_later_or_an_equal_one_and_deleted_by_a_later_one(
    tmp_path: Path, spark: SparkSession
) -> None:
    target = DeltaTarget.create(str(tmp_path / "target"), "log-1", NewTarget(ORDERS, SHAPE.columns))

    def merge(upto: int, *rows: Row) -> dict[int, str]:
        source = frame_of(spark, source_rows(folded(list(rows)), SHAPE))
        merge_with_spark(target, source, SHAPE.key, TxnMarker(target.app_id, upto))
        found = pa.table(target.table.scan(columns=["id", "item"]))
        return dict(zip(found["id"].to_pylist(), found["item"].to_pylist(), strict=True))

    assert merge(20, put(1, "a", 10), put(2, "b", 11), put(3, "c", 12), gone(4, 13)) == {1: "a", 2: "b", 3: "c"}
    found = merge(40, put(1, "old", 9), put(2, "again", 11), gone(3, 12), put(5, "e", 30))
    assert found == {1: "a", 2: "again", 3: "c", 5: "e"}
    assert merge(60, gone(1, 50)) == {2: "again", 3: "c", 5: "e"}
    assert target.applied == 60


def writers(wanted: Writer) -> Writers:
    """The writers of a sink with this setting."""
    return Writers(DeltaSettings("lake", "/nowhere/{schema}/{table}", wanted))


def test_the_writer_of_a_rule_is_chosen_for_its_tables(tmp_path: Path) -> None:
    rule = SinkRule.model_validate({"match": "shop.orders", "writer": "copy-on-write"})
    settings = DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", rules=(rule,))
    sink = DeltaSink(settings)
    sink.open("log-1")
    record = sink.apply(batch([put(1, "a", 10)], 0, 20))
    sink.close()

    assert not settings.has_vectors("shop.orders")
    assert settings.has_vectors("shop.items")
    assert "deletionVectors" not in (DeltaTable(record.target).protocol().writer_features or [])


@pytest.mark.parametrize("has_vectors", [True, False])
def test_the_writer_of_the_settings_is_chosen_and_the_default_is_the_indexed_one(
    tmp_path: Path, *, has_vectors: bool
) -> None:
    layout = TargetLayout(has_vectors=has_vectors)
    target = DeltaTarget.create(str(tmp_path / "target"), "log-1", NewTarget(ORDERS, SHAPE.columns, layout))
    work, source = batch(None, 0, 20), source_rows(folded([put(1, "a", 10)]), SHAPE)
    for key in (SHAPE.key, ()):
        chosen = {wanted: writers(wanted).choose(target, work, source, key) for wanted in Writer}
        assert chosen == {wanted: wanted for wanted in Writer} | {Writer.AUTO: Writer.INDEXED}


def test_a_target_that_only_spark_can_write_waits_for_it_or_stops_with_a_remedy(tmp_path: Path) -> None:
    sink, uri = filled_sink(tmp_path, Writer.AUTO)
    add_features(uri, ["deletionVectors", "columnMapping"])
    with pytest.raises(SparkAwaited, match="columnMapping"):
        sink.apply(batch([put(4, "d", 30)], 20, 40))
    for writer in (Writer.INDEXED, Writer.COPY_ON_WRITE):
        stopped = DeltaSink(replace(sink_settings(tmp_path), writer=writer))
        stopped.open("log-1")
        with pytest.raises(TargetUnusable, match=r"the driver cannot write target .* columnMapping") as error:
            stopped.apply(batch([put(4, "d", 30)], 20, 40))
        assert error.value.fix.startswith("set writer to 'auto' or 'spark'")
