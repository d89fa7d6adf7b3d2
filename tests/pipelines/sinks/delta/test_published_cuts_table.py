"""The cuts that a Delta sink keeps beside its record: pipelines/sinks/delta/published_cuts_table.py."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from cdc.errors import SinkFenced, SinkOfAnotherLog
from cdc.position import Position
from cdc.target_names import published_uri, record_of_views
from cdc.targets.cut_retention import KEEP_ALL_AT_MOST
from cdc.targets.lake_reader import PUBLISHED_SCHEMA, Lake, list_cuts, read_published
from cdc.targets.published_record import Published, TableRecord
from pipelines.sinks.delta.delta_log_cleanup import CHECKPOINT_EVERY
from pipelines.sinks.delta.published_cuts_table import CLEAN_EVERY, PublishedTable
from tests.fixtures.s3 import KEY, KEY_ID, S3


def record(position: int) -> Published:
    table = TableRecord(1, "shop.orders", "/lake/orders", position, position, "streaming", schema='{"big": "schema"}')
    return Published(position, position * 10, {1: table})


@pytest.fixture(name="lake")
def _lake(tmp_path: Path) -> str:
    return f"{tmp_path}/{{schema}}/{{table}}"


@pytest.fixture(name="uri")
def _uri(lake: str) -> str:
    return published_uri(lake)


def test_every_commit_holds_the_record_and_its_place_in_the_list(uri: str):
    held = PublishedTable.open(uri, "log-1", retain=60.0)
    for position in (10, 20, 20, 30):
        held.write(record(position))

    for version, expected in enumerate([[], [10], [10, 20], [10, 20, 20], [10, 20, 20, 30]]):
        table = DeltaTable(uri, version=version)
        assert [cut.position for cut in list_cuts(table)] == expected
        assert read_published(table) == (record(expected[-1]) if expected else None)


def test_the_list_stays_short_while_the_record_is_whole_a_new_driver_finds_both_and_checkpoints_are_made(uri: str):
    held = PublishedTable.open(uri, "log-1", retain=0.0)
    for position in range(1, CLEAN_EVERY + 21):
        held.write(record(position))

    checkpoints = sorted(Path(uri, "_delta_log").glob("*.checkpoint.parquet"))
    assert [int(file.name[:20]) for file in checkpoints] == [CHECKPOINT_EVERY, 2 * CHECKPOINT_EVERY]
    assert read_published(DeltaTable(uri)) == held.record() == record(CLEAN_EVERY + 20)
    again = PublishedTable.open(uri, "log-1", retain=0.0)
    assert len(again.cuts) < 25
    assert [cut.published_at for cut in again.cuts] == [cut.published_at for cut in held.cuts]
    assert again.record() == record(CLEAN_EVERY + 20)
    assert [cut.record.versions for cut in again.cuts][-1] == {"/lake/orders": CLEAN_EVERY + 20}
    again.write(record(CLEAN_EVERY + 21))
    with pytest.raises(SinkFenced):
        held.write(record(CLEAN_EVERY + 22))


def test_in_a_bucket_a_driver_that_published_and_paused_is_refused(s3: S3, monkeypatch: pytest.MonkeyPatch):
    said = {"ENDPOINT_URL": f"http://127.0.0.1:{s3.port}", "ALLOW_HTTP": "true", "REGION": "us-east-1"}
    for name, value in (said | {"ACCESS_KEY_ID": KEY_ID, "SECRET_ACCESS_KEY": KEY}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    uri = f"{s3.root()}/_cdc/published"
    first = PublishedTable.open(uri, "log-1", retain=60.0)
    first.write(record(10))
    second = PublishedTable.open(uri, "log-1", retain=60.0)
    second.write(record(20))
    with pytest.raises(SinkFenced, match="another process published"):
        first.write(record(20))
    second.write(record(30))

    table = DeltaTable(uri)
    assert [cut.position for cut in list_cuts(table)] == [10, 20, 30]
    assert read_published(table) == record(30)


def test_a_record_of_before_cuts_were_kept_is_the_oldest_cut(uri: str, lake: str):
    PublishedTable.open(uri, "log-1")
    earlier = pa.schema([field for field in PUBLISHED_SCHEMA if field.name != "published_at"])
    row = {"position": [5], "committed_at": [50], "record": [record(5).to_json()]}
    properties = DeltaTable(uri).metadata().configuration
    write_deltalake(
        uri, pa.table(row, schema=earlier), mode="overwrite", schema_mode="overwrite", configuration=properties
    )
    assert read_published(DeltaTable(uri)) == record(5)
    assert [cut.position for cut in list_cuts(DeltaTable(uri))] == [5]

    held = PublishedTable.open(uri, "log-1", retain=60.0)
    assert held.record() == record(5)
    held.write(record(7))
    table = DeltaTable(uri)
    assert [cut.position for cut in list_cuts(table)] == [5, 7]
    assert [Lake.open(lake).cut(Position(at)).position for at in (5, 6, 7)] == [5, 5, 7]
    assert read_published(table) == record(7)


def test_a_strangers_table_in_the_place_of_the_record_is_named_as_what_it_is(tmp_path: Path):
    place = str(tmp_path / "_cdc" / "published")
    write_deltalake(place, pa.table({"id": [1]}))
    with pytest.raises(SinkOfAnotherLog, match="is not the published record of a sink") as told:
        PublishedTable.open(place, "log-1")

    assert told.value.fix == "point the sink at another path, or move that table to another directory"
    assert DeltaTable(place).version() == 0


def test_a_cut_stays_as_long_as_its_views_have_one_at_its_position(uri: str):
    views = PublishedTable.open(record_of_views(uri), "log-of-views")
    views.write(record(104))
    views.write(record(209))  # the second commit at cut 208
    tables = PublishedTable.open(uri, "log-1", retain=60.0)
    every_cut = CLEAN_EVERY + KEEP_ALL_AT_MOST
    for number in range(1, every_cut):
        tables.write(record(8 * number))

    kept = [cut.record.position for cut in tables.cuts]
    assert kept[:2] == [104, 208]
    assert len(kept) < every_cut - CLEAN_EVERY // 2
