"""Freshness: the median over batches, each counted once, without the first copy."""

from __future__ import annotations

from pathlib import Path

from cdc.catalog.reported_state import SinkProgress, TableProgress
from cdc.config.definition import LOG_OF_VIEWS
from cdc.demo.pipeline_observer import LAKE, PIPELINE, SEARCH, Freshness, PipelineProbe, PipelineSnapshot
from cdc.demo.workspace import DOCUMENTS, MARTS, Workspace
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.fixtures.catalog import put_catalog
from tests.log.rows import IDENTITY, LIMITS, info


def snapshot(position: int, lag: float, sink: str = LAKE) -> PipelineSnapshot:
    return PipelineSnapshot(
        durable=None,
        sinks={sink: Position(position)},
        lag={sink: lag},
        source_lag=None,
        slot_retained=None,
        versions={},
    )


def test_a_batch_counts_once_however_often_it_is_seen() -> None:
    freshness = Freshness()
    for seen in (snapshot(1, 0.2), snapshot(1, 0.2), snapshot(1, 0.2), snapshot(2, 0.4)):
        freshness.add(seen)

    assert freshness.p50_ms(LAKE) == 300.0


def test_batches_before_the_first_fresh_one_are_the_copy_and_do_not_count() -> None:
    freshness = Freshness()
    for seen in (snapshot(1, 900.0), snapshot(2, 30.0), snapshot(3, 1.0)):
        freshness.add(seen)

    assert freshness.p50_ms(LAKE) == 1000.0


def test_a_slow_batch_after_a_fresh_one_counts() -> None:
    freshness = Freshness()
    for seen in (snapshot(1, 1.0), snapshot(2, 9.0), snapshot(3, 9.0)):
        freshness.add(seen)

    assert freshness.p50_ms(LAKE) == 9000.0


def test_a_sink_without_batches_has_no_freshness() -> None:
    freshness = Freshness()
    freshness.add(snapshot(1, 1.0))

    assert freshness.p50_ms(SEARCH) is None


def test_views_are_late_until_they_are_computed_and_then_until_their_sinks_have_them(tmp_path: Path) -> None:
    put_catalog(tmp_path)
    place = Workspace(tmp_path)
    writer = LogWriter.open(place.log / LOG_OF_VIEWS, IDENTITY, LIMITS)
    writer.commit([], info(21))
    probe, found = PipelineProbe(place), []
    catalog = probe._catalog
    found.append(probe.late_views(Position(20)))
    for view, sink in ((10, 20), (20, 20), (20, 21)):
        catalog.tables.record(PIPELINE, [TableProgress("views", "shop.v", "streaming", None, view, None, 0)])
        for name in (LAKE, DOCUMENTS, MARTS):
            position = 20 if name == LAKE else sink
            catalog.sinks.record(PIPELINE, SinkProgress(name, position, None, 0.1, "running"))
        found.append(probe.late_views(Position(20)))
    probe.close()

    assert found == [["views"], ["shop.v"], [DOCUMENTS, MARTS], []]
