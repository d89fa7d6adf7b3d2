"""Recovery: a sink opens with targets that do not match its published record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from cdc.errors import Reaction, TargetUnusable
from cdc.targets.published_record import Published, TableRecord, TargetState
from pipelines.sinks.delta.reconcile_at_open import open_part, parked_upto, readable_versions, with_target_position
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS, batch, put
from tests.pipelines.sinks.added_features import LOG, add_features, filled_sink, sink_settings


def test_a_table_that_cannot_be_opened_is_listed_as_stopped_by_the_next_driver(tmp_path: Path) -> None:
    first, uri = filled_sink(tmp_path)
    first.close()
    add_features(uri, ["unheard"])
    sink = DeltaSink(sink_settings(tmp_path))
    record = sink.open(LOG)

    assert record is not None
    table = record.tables[ORDERS.relation]
    assert (table.state, table.position) == (TargetState.FAILED, 20)
    assert "CDC-3017" in (table.reason or "")
    assert "unheard" in (table.reason or "")
    with pytest.raises(TargetUnusable, match="unheard"):
        sink.apply(batch([put(4, "d", 30)], 20, 40))


def test_a_feature_that_comes_while_a_target_is_open_stops_its_table_too(tmp_path: Path) -> None:
    sink, uri = filled_sink(tmp_path)
    add_features(uri, ["unheard"])
    record = Published(20, 0, sink.open(LOG).tables)  # type: ignore[union-attr]

    assert "unheard" in (record.tables[ORDERS.relation].reason or "")
    assert sink.pin(record)
    with pytest.raises(TargetUnusable, match="unheard") as told:
        sink.target_position(ORDERS)
    assert told.value.reaction is Reaction.QUARANTINE


def test_a_target_ahead_of_the_record_is_at_its_own_position(tmp_path: Path) -> None:
    sink, uri = filled_sink(tmp_path)
    published = sink.open(LOG)
    assert published is not None
    record = published.tables[ORDERS.relation]
    assert with_target_position(record, 20) == record
    later = sink.apply(batch([put(4, "d", 30)], 20, 40))

    found = with_target_position(record, 20)
    assert (found.position, found.version, found.state) == (40, later.version, TargetState.CATCHING_UP)
    failed = replace(record, state=TargetState.FAILED.value)
    assert with_target_position(failed, 20) == failed
    assert readable_versions(published, sink.parts.targets) == {uri: record.version}


def test_a_commit_of_another_client_is_in_the_readable_version(tmp_path: Path) -> None:
    sink, uri = filled_sink(tmp_path)
    published = sink.open(LOG)
    assert published is not None
    DeltaTable(uri).delete("id = 1")

    assert readable_versions(published, sink.parts.targets) == {uri: published.versions[uri] + 1}


def test_a_table_without_a_target_has_no_position(tmp_path: Path) -> None:
    record = TableRecord(7, "shop.orders", f"{tmp_path}/none", 20, 1, "streaming")

    assert open_part(record.target, 7) is None
    assert with_target_position(record, 20) == record
    assert parked_upto(record, keeps_history=True) == 20
