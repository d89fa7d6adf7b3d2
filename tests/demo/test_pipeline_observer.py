"""Freshness: the median over batches, each counted once, without the first copy."""

from __future__ import annotations

from cdc.demo.pipeline_observer import LAKE, SEARCH, Freshness, PipelineSnapshot
from cdc.position import Position


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
