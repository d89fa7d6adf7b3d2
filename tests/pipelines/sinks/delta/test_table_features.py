"""A target that was given table features: what delta-rs does not write goes to Spark, or stops its table alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from cdc.config.sinks import WriterChoice
from cdc.errors import Reaction, TargetUnusable
from cdc.stores.published_record import Published, TargetState
from cdc.stores.table_features import WRITTEN, unsupported_features
from pipelines.sinks.contract import SparkAwaited
from pipelines.sinks.delta.maintenance import UpkeepSettings
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.staged_targets import StagedDelta
from tests.contracts.folded import ORDERS, batch, gone, part, put
from tests.pipelines.shop_pipeline import END, make_shop
from tests.pipelines.shop_pipeline import ORDERS as RELATION
from tests.pipelines.sinks.added_features import add_features, commit
from tests.pipelines.sinks.maintained_sink import MaintainedSink

LOG = "log-1"
OTHERS = (
    "allowColumnDefaults",
    "checkpointProtection",
    "clustering",
    "domainMetadata",
    "icebergCompatV2",
    "identityColumns",
    "inCommitTimestamp",
    "materializePartitionColumns",
    "rowTracking",
    "typeWidening",
    "vacuumProtocolCheck",
    "variantShredding-preview",
)


def settings(folder: Path, writer: Writer = Writer.DELTA_RS) -> DeltaSettings:
    return DeltaSettings("lake", f"{folder}/lake/{{schema}}/{{table}}", writer)


def filled(folder: Path, writer: Writer = Writer.DELTA_RS) -> tuple[DeltaSink, str]:
    """A sink whose target of shop.orders has three rows, and where that lies."""
    sink = DeltaSink(settings(folder, writer))
    sink.open(LOG)
    record = sink.apply(batch([put(1, "a", 10), put(2, "b", 11), put(3, "c", 12)], 0, 20, generation=1))
    sink.publish(Published(20, 0, {record.relation: record}))
    return sink, record.target


@pytest.mark.parametrize("feature", [*sorted(WRITTEN), *OTHERS])
def test_a_feature_is_known_as_written_where_delta_rs_writes_it(tmp_path: Path, feature: str) -> None:
    uri = str(tmp_path / "table")
    write_deltalake(uri, pa.table({"id": [1, 2]}))
    add_features(uri, [feature])
    table = DeltaTable(uri)
    try:
        pa.table(table.scan())
        table.delete("id = 1")
        written = True
    except DeltaError:
        written = False

    assert unsupported_features(DeltaTable(uri)) == (() if written else (feature,))


def test_a_protocol_from_before_features_asks_for_identity_columns_from_six_on(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    write_deltalake(uri, pa.table({"id": [1, 2]}))
    for version, asked in ((5, ()), (6, ("identityColumns",))):
        commit(uri, {"protocol": {"minReaderVersion": 2, "minWriterVersion": version}})
        assert unsupported_features(DeltaTable(uri)) == asked


def test_a_table_with_features_that_nobody_here_writes_stops_alone_and_says_which(tmp_path: Path) -> None:
    ground = make_shop(tmp_path / "shop")
    lake, find = ground.definition.sinks
    by_delta_rs = lake.model_copy(update={"writer": WriterChoice.DELTA_RS})
    ground = replace(ground, definition=ground.definition.model_copy(update={"sinks": (by_delta_rs, find)}))
    ground.drive("lake", 1_100)
    before = ground.lake()["shop.orders"]
    add_features(f"{tmp_path}/shop/lake/shop/orders", ["rowTracking", "domainMetadata"])
    ground.drive("lake")

    published = ground.lake_of().published()
    assert published is not None
    stopped = published.tables[RELATION]
    assert (published.position, stopped.state, stopped.position) == (END, TargetState.FAILED, 1_100)
    assert stopped.reason is not None
    assert "'domainMetadata', 'rowTracking'" in stopped.reason
    assert "set writer to 'auto' or 'spark' and provide the Delta jars; or move the target to" in stopped.reason
    assert ground.lake()["shop.orders"] == before
    assert [row["note"] for row in ground.lake()["shop.items"]] == ["later", "too"]


def test_a_table_with_features_waits_for_spark_where_that_may_come(tmp_path: Path) -> None:
    sink, uri = filled(tmp_path, Writer.AUTO)
    add_features(uri, ["inCommitTimestamp"])
    with pytest.raises(SparkAwaited):
        sink.apply(batch([put(4, "d", 30)], 20, 40))


def test_a_table_that_cannot_be_opened_is_listed_as_stopped_by_the_next_driver(tmp_path: Path) -> None:
    first, uri = filled(tmp_path)
    first.close()
    add_features(uri, ["unheard"])
    sink = DeltaSink(settings(tmp_path))
    record = sink.open(LOG)

    assert record is not None
    table = record.tables[ORDERS.relation]
    assert (table.state, table.position) == (TargetState.FAILED, 20)
    assert "CDC-3017" in (table.reason or "")
    assert "unheard" in (table.reason or "")
    with pytest.raises(TargetUnusable, match="unheard"):
        sink.apply(batch([put(4, "d", 30)], 20, 40))


def test_a_feature_that_comes_while_a_target_is_open_stops_its_table_too(tmp_path: Path) -> None:
    sink, uri = filled(tmp_path)
    add_features(uri, ["unheard"])
    record = Published(20, 0, sink.open(LOG).tables)  # type: ignore[union-attr]

    assert "unheard" in (record.tables[ORDERS.relation].reason or "")
    assert sink.pin(record)
    with pytest.raises(TargetUnusable, match="unheard") as told:
        sink.target_position(ORDERS)
    assert told.value.reaction is Reaction.QUARANTINE


def test_an_append_only_table_stops_alone_when_a_row_changes(tmp_path: Path) -> None:
    sink, uri = filled(tmp_path)
    DeltaTable(uri).alter.set_table_properties({"delta.appendOnly": "true"})
    assert sink.apply(batch([put(4, "d", 30)], 20, 40)).position == 40
    with pytest.raises(TargetUnusable, match=r"append-only \(delta.appendOnly\)") as told:
        sink.apply(batch([put(1, "A", 50)], 40, 60))
    assert "set delta.appendOnly to false" in told.value.fix


def test_upkeep_of_a_table_with_features_removes_files_and_refuses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upkept = MaintainedSink(tmp_path, UpkeepSettings(every=1.0, vacuum_after=1.0, retain=0.0))
    for _ in range(3):
        upkept.round()
    add_features(upkept.uri, ["rowTracking", "domainMetadata"])
    for _ in range(4):
        upkept.clock.now += 100.0
        upkept.look()

    assert "maintenance of a target failed" not in capsys.readouterr().out
    assert not upkept.upkeep._turns[upkept.uri].refused


def test_a_replay_does_not_overwrite_a_table_with_features(tmp_path: Path) -> None:
    sink, uri = filled(tmp_path)
    sink.close()
    add_features(uri, ["rowTracking", "domainMetadata"])
    staged = StagedDelta(settings(tmp_path))
    staged.sink.open(LOG)
    record = staged.sink.apply(batch([put(9, "z", 30)], 0, 40, generation=1))
    built = Published(40, 0, {record.relation: record})
    staged.sink.publish(built)
    staged.open_published(LOG)
    with pytest.raises(TargetUnusable, match="cannot be overwritten in one step") as told:
        staged.put(built, {})
    assert "move the target to another directory" in told.value.fix


FEATURES = ("delta.enableRowTracking", "delta.enableInCommitTimestamps", "delta.enableTypeWidening")


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize("feature", FEATURES)
def test_spark_writes_a_table_with_features_that_it_knows(spark, tmp_path: Path, feature: str) -> None:
    sink, uri = filled(tmp_path, Writer.AUTO)
    spark.sql(f"ALTER TABLE delta.`{uri}` SET TBLPROPERTIES ('{feature}' = 'true')")
    assert unsupported_features(DeltaTable(uri))
    sink.attach(spark)
    sink.apply(batch([put(1, "A", 30), gone(2, 31), part(3, 32, {3: "7.00"}), put(4, "d", 33)], 20, 40))
    assert held(spark, uri) == {1: ("A", "1.00"), 3: ("c", "7.00"), 4: ("d", "1.00")}

    record = sink.apply(batch([put(5, "e", 52)], 40, 60, truncated=(51, 0)))
    assert held(spark, uri) == {5: ("e", "1.00")}
    record = sink.apply(batch([put(6, "f", 72)], 60, 80, generation=71))
    assert held(spark, uri) == {6: ("f", "1.00")}
    emptied = sink.apply(batch(None, 80, 100, truncated=(90, 0)))
    assert held(spark, uri) == {}
    assert (record.state, record.position, emptied.position) == (TargetState.STREAMING, 80, 100)
    target = sink.parts.targets.by_uri[uri]
    target.refresh()
    assert (target.applied, target.is_complete) == (100, True)


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
def test_columns_of_a_table_that_spark_has_to_write_do_not_change(spark, tmp_path: Path) -> None:
    sink, uri = filled(tmp_path, Writer.AUTO)
    add_features(uri, ["inCommitTimestamp"])
    sink.attach(spark)
    wider = replace(ORDERS, columns=(*ORDERS.columns, replace(ORDERS.columns[1], id=9, name="more")))
    with pytest.raises(TargetUnusable, match=r"its columns cannot change \(column 'more' was added\)"):
        sink.apply(batch([put(4, "d", 30)], 20, 40, wider))


def held(spark, uri: str) -> dict[int, tuple[str, str]]:
    rows = spark.read.format("delta").load(uri).collect()
    return {row["id"]: (row["item"], str(row["price"])) for row in rows}
