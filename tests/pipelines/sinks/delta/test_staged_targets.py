"""Staged targets: a replay does not replace a table that it cannot or may not overwrite."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from cdc.errors import Reaction, TargetUnusable
from cdc.targets.lake_reader import read_target
from cdc.targets.published_record import Published, TableRecord
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.staged_targets import StagedDelta, by_target, remove
from tests.contracts.folded import ORDERS, batch, put
from tests.pipelines.sinks.added_features import LOG, add_features, filled_sink, sink_settings

STRANGE = pa.table({"id": [1, 2], "theirs": ["a", "b"]})


def test_a_replay_does_not_overwrite_what_is_not_ours(tmp_path: Path) -> None:
    settings = DeltaSettings("lake", f"{tmp_path}/lake/{{schema}}/{{table}}")
    DeltaSink(settings).open("log-1")
    write_deltalake(f"{tmp_path}/lake/shop/orders", STRANGE)
    staged = StagedDelta(settings)
    staged.sink.open("log-1")
    record = staged.sink.apply(batch([put(9, "z", 30)], 0, 40, generation=1))
    built = Published(40, 0, {ORDERS.relation: record})
    staged.sink.publish(built)
    staged.open_published("log-1")
    with pytest.raises(TargetUnusable, match="was not created by cdc") as told:
        staged.put(built, {})

    assert told.value.reaction is Reaction.QUARANTINE
    assert DeltaTable(f"{tmp_path}/lake/shop/orders").version() == 0


def test_a_replay_does_not_overwrite_a_table_with_features(tmp_path: Path) -> None:
    sink, uri = filled_sink(tmp_path)
    sink.close()
    add_features(uri, ["rowTracking", "domainMetadata"])
    staged = StagedDelta(sink_settings(tmp_path))
    staged.sink.open(LOG)
    record = staged.sink.apply(batch([put(9, "z", 30)], 0, 40, generation=1))
    built = Published(40, 0, {record.relation: record})
    staged.sink.publish(built)
    staged.open_published(LOG)
    with pytest.raises(TargetUnusable, match="cannot be overwritten in one step") as told:
        staged.put(built, {})
    assert "move the target to another directory" in told.value.fix


def test_tables_of_one_target_are_replaced_together() -> None:
    records = [TableRecord(n, f"t{n}", uri, 10, 1, "streaming") for n, uri in ((1, "/a"), (2, "/b"), (3, "/a"))]

    assert [[record.relation for record in group] for group in by_target(records)] == [[1, 3], [2]]


def test_a_directory_is_removed_with_everything_in_it(tmp_path: Path) -> None:
    (tmp_path / "left" / "inside").mkdir(parents=True)
    for _ in range(2):
        remove(str(tmp_path / "left"))

    assert list(tmp_path.iterdir()) == []


def test_a_new_target_replaces_the_old_one_under_its_identity(tmp_path: Path) -> None:
    sink, uri = filled_sink(tmp_path)
    sink.close()
    before = DeltaTable(uri).metadata()
    staged = StagedDelta(sink_settings(tmp_path))
    staged.sink.open(LOG)
    record = staged.sink.apply(batch([put(9, "z", 30)], 0, 40, generation=1))
    built = Published(40, 0, {record.relation: record})
    staged.sink.publish(built)
    staged.open_published(LOG)
    published = staged.put(built, {})

    assert published.tables[record.relation].target == uri
    assert DeltaTable(uri).metadata().configuration["cdc.app_id"] == before.configuration["cdc.app_id"]
    assert read_target(uri, published.versions[uri]).read_all()["item"].to_pylist() == ["z"]
    assert sorted(read_target(uri, published.versions[uri] - 1).read_all()["item"].to_pylist()) in (
        ["a", "b", "c"],
        ["z"],
    )
