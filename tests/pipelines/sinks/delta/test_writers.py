"""Writers: the conditions of a merge, and which engine merges a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from cdc.config import SinkRule
from pipelines.sinks.contract import SparkAwaited
from pipelines.sinks.delta.delta_target import DeltaTarget, TxnMarker
from pipelines.sinks.delta.merge_source import source_rows
from pipelines.sinks.delta.new_data_files import DataFile, statistics
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.target_columns import POSITION_KEY, RowShape
from pipelines.sinks.delta.target_layout import NewTarget, TargetLayout, double_quoted
from pipelines.sinks.delta.writers import (
    MAX_BATCH_BYTES,
    MAX_CANDIDATE_BYTES,
    MergeSpec,
    Writers,
    candidates,
    merge_with_delta_rs,
)
from pipelines.types.families import TypePolicy
from tests.contracts.folded import ORDERS, Row, batch, folded, gone, put
from tests.pipelines.sinks.added_features import add_features, filled_sink
from tests.pipelines.sinks.delta.test_delta_target import FILES


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
    for writer in (Writer.DELTA_RS, Writer.SPARK, Writer.INDEXED):
        with pytest.raises(CommitFailedError, match="another driver"):
            sink.parts.writers.merge(target, source, shape.key, TxnMarker(target.app_id, 40), writer)
    assert DeltaTable(uri).version() == target.version


MIB = 1 << 20


def without_vectors(folder: Path) -> DeltaSettings:
    """Settings under which the indexed writer cannot write, so that delta-rs or Spark is chosen by size."""
    rule = SinkRule.model_validate({"match": "*.*", "properties": {"delta.enableDeletionVectors": "false"}})
    return DeltaSettings("lake", f"{folder}/{{schema}}/{{table}}", rules=(rule,))


def test_a_huge_target_needs_no_spark_for_keys_of_its_small_files_alone(tmp_path: Path) -> None:
    """A file that is not there, and is said to be huge, tells which ones delta-rs opens."""
    sink = DeltaSink(without_vectors(tmp_path))
    sink.open("log-1")
    record = sink.apply(batch([put(1, "a", 10), put(2, "b", 11)], 0, 20))
    huge = statistics(pa.table({"id": pa.array([1_000, 9_000], pa.int64())}), ["id"])
    target = DeltaTarget.open(record.target)
    assert target is not None
    target.add([DataFile("huge.parquet", MAX_CANDIDATE_BYTES + 1, 2, huge).add_action()], target.commit(20))

    sink.apply(batch([put(1, "A", 30), put(5, "c", 31)], 20, 40))
    with pytest.raises(SparkAwaited, match=r"'shop\.orders'"):
        sink.apply(batch([put(1, "B", 50), put(1_001, "d", 51)], 40, 60))
    sink.close()
    assert DeltaTable(record.target).transaction_version(target.app_id) == 40


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
def test_a_batch_that_is_too_large_for_delta_rs_is_merged_by_spark(tmp_path: Path, spark: SparkSession) -> None:
    sink = DeltaSink(without_vectors(tmp_path), spark)
    sink.open("log-1")
    sink.apply(batch([put(1, "a", 10)], 0, 20))
    wide = "b" * (MAX_BATCH_BYTES // 1000)
    record = sink.apply(batch([put(n, wide, 30) for n in range(1000)], 20, 40))
    assert DeltaTable(record.target).history(1)[0]["engineInfo"].startswith("Apache-Spark")
    record = sink.apply(batch([put(1, "c", 50)], 40, 60))
    assert DeltaTable(record.target).history(1)[0]["engineInfo"].startswith("delta-rs")
    sink.close()


SHAPE = RowShape(ORDERS, TypePolicy.EXACT)
SPEC = MergeSpec(("id",), ("id", "item", "_position", "_ordinal"), double_quoted)


def test_rows_are_matched_by_key_and_in_a_shared_target_by_relation() -> None:
    assert SPEC.condition == 's."id" = t."id"'
    assert replace(SPEC, relation=7).condition == 't."_relation" = 7 AND s."id" = t."id"'
    assert SPEC.assignments == {f'"{name}"': f's."{name}"' for name in SPEC.columns}


def test_a_delete_needs_a_later_position_and_a_row_found_by_position_needs_none() -> None:
    assert SPEC.deletes.startswith('s."_op" = \'d\' AND (s."_position" > t."_position"')
    assert 's."_ordinal" > t."_ordinal"' in SPEC.deletes
    assert 's."_ordinal" >= t."_ordinal"' in SPEC.updates
    assert replace(SPEC, key=POSITION_KEY).deletes == "s.\"_op\" = 'd'"


def merge(target: DeltaTarget, upto: int, *rows: Row) -> dict[int, str]:
    """The items of the target by id, after delta-rs merged some rows."""
    source = source_rows(folded(list(rows)), SHAPE)
    merge_with_delta_rs(target, source, SHAPE.key, TxnMarker(target.app_id, upto))
    found = pa.table(target.table.scan(columns=["id", "item"]))
    return dict(zip(found["id"].to_pylist(), found["item"].to_pylist(), strict=True))


def test_a_row_is_replaced_by_a_later_or_an_equal_one_and_deleted_by_a_later_one(tmp_path: Path) -> None:
    target = DeltaTarget.create(str(tmp_path / "target"), "log-1", NewTarget(ORDERS, SHAPE.columns))
    assert merge(target, 20, put(1, "a", 10), put(2, "b", 11), put(3, "c", 12), gone(4, 13)) == {1: "a", 2: "b", 3: "c"}
    found = merge(target, 40, put(1, "old", 9), put(2, "again", 11), gone(3, 12), put(5, "e", 30))

    assert found == {1: "a", 2: "again", 3: "c", 5: "e"}
    assert merge(target, 60, gone(1, 50)) == {2: "again", 3: "c", 5: "e"}
    assert target.applied == 60


def writers(wanted: Writer) -> Writers:
    """The writers of a sink with this setting."""
    return Writers(DeltaSettings("lake", "/nowhere/{schema}/{table}", wanted))


def test_the_writer_of_a_rule_is_chosen_for_its_tables(tmp_path: Path) -> None:
    rule = SinkRule.model_validate({"match": "shop.orders", "writer": "delta-rs"})
    settings = DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", rules=(rule,))
    sink = DeltaSink(settings)
    sink.open("log-1")
    record = sink.apply(batch([put(1, "a", 10)], 0, 20))
    sink.close()

    assert not settings.has_vectors("shop.orders")
    assert settings.has_vectors("shop.items")
    assert "deletionVectors" not in (DeltaTable(record.target).protocol().writer_features or [])


def test_a_wanted_writer_is_chosen_whatever_the_size(tmp_path: Path) -> None:
    target = DeltaTarget.create(str(tmp_path / "target"), "log-1", NewTarget(ORDERS, SHAPE.columns))
    work, source = batch(None, 0, 20), source_rows(folded([put(1, "a", 10)]), SHAPE)
    chosen = {wanted: writers(wanted).choose(target, work, source, SHAPE.key) for wanted in Writer}

    # the target has no deletion vectors
    assert chosen == {
        Writer.AUTO: Writer.DELTA_RS,
        Writer.INDEXED: Writer.DELTA_RS,
        Writer.DELTA_RS: Writer.DELTA_RS,
        Writer.SPARK: Writer.SPARK,
    }


def test_the_indexed_writer_is_chosen_for_a_target_with_deletion_vectors(tmp_path: Path) -> None:
    layout = TargetLayout(has_vectors=True)
    target = DeltaTarget.create(str(tmp_path / "target"), "log-1", NewTarget(ORDERS, SHAPE.columns, layout))
    work, source = batch(None, 0, 20), source_rows(folded([put(1, "a", 10)]), SHAPE)
    chosen = {wanted: writers(wanted).choose(target, work, source, SHAPE.key) for wanted in Writer}

    assert chosen == {wanted: wanted for wanted in Writer} | {Writer.AUTO: Writer.INDEXED}


@given(st.lists(st.integers(-50, 400), min_size=1))
def test_files_that_may_hold_a_key_are_those_whose_bounds_meet_the_batchs(keys: list[int]) -> None:
    meets = [low is None or (low <= max(keys) and high >= min(keys)) for low, high in
             zip(FILES["min.id"].to_pylist(), FILES["max.id"].to_pylist(), strict=True)]  # fmt: skip
    expected = sum(size for size, met in zip(FILES["size_bytes"].to_pylist(), meets, strict=True) if met)

    assert candidates(FILES, pa.table({"id": pa.array(keys, pa.int64())}), ["id"]) == expected


@pytest.mark.parametrize("source", [pa.table({"id": ["a"]}), pa.table({"id": [b"x"]}), pa.table({"id": [[1]]})])
def test_a_key_that_cannot_be_compared_with_the_bounds_leaves_every_file(source: pa.Table) -> None:
    assert candidates(FILES, source, ["id"]) == 1111


def test_a_target_without_files_has_none_that_may_hold_a_key() -> None:
    assert candidates(FILES.slice(0, 0), pa.table({"id": [1]}), ["id"]) == 0


def test_of_several_key_columns_each_one_rules_files_out() -> None:
    both = FILES.append_column("min.no", pa.array([1, 1, 9, 1])).append_column("max.no", pa.array([5, 5, 9, 5]))
    source = pa.table({"id": [150, 160], "no": [1, 2], "text": ["x", "y"]})

    assert candidates(both, source, ["id", "no", "text"]) == 1010
