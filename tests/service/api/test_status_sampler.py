"""StatusSampler: rates and lags of the last minutes, and one rendering per sample."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.service.api.status_sampler import (
    SAMPLE_INTERVAL,
    UNWATCHED_INTERVAL,
    RateHistory,
    StatusSampler,
    describe_dsn,
)
from cdc.service.status import PipelineStatus, SourceStatus
from tests.service.pipeline import definition, fill

START = datetime(2026, 11, 20, tzinfo=UTC)


def status(rows: float, lag: float | None) -> PipelineStatus:
    source = SourceStatus(position=None, lag_seconds=lag, lag_bytes=None, rows=rows, slot_retained_bytes=None)
    return PipelineStatus("shop", "running", START.isoformat(), (), source, (), ())


def history(samples: list[tuple[float, float | None]]) -> RateHistory:
    found = RateHistory()
    for second, (rows, lag) in enumerate(samples):
        found.add(status(rows, lag), START + timedelta(seconds=second))
    return found


def test_no_samples_give_no_rates() -> None:
    assert RateHistory().to_json() == {"rates": {}, "lags": {}}


def test_the_rate_is_the_climb_over_the_time() -> None:
    assert history([(0, 0), (10, 0), (40, 0)]).rates() == {"source": 20.0}


def test_a_restarted_counter_never_gives_a_negative_rate() -> None:
    assert history([(1000, 0), (0, 0), (10, 0)]).rates() == {"source": 5.0}


def test_a_rate_forgets_what_is_long_ago() -> None:
    assert history([(0, 0), (10_000, 0), *[(10_000, 0)] * 12]).rates() == {"source": 0.0}


def test_a_spike_survives_thinning() -> None:
    lags = history([(0, 90.0 if second == 77 else 0.1) for second in range(600)]).to_json()["lags"]["source"]
    assert len(lags) == 120
    assert max(lags) == pytest.approx(90.0)


def test_an_unknown_lag_leaves_a_gap_and_no_number() -> None:
    assert history([(0, None), (0, 1.0)]).lags() == {"source": [1.0]}


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://reader:canary@db.internal:5432/shop", "db.internal:5432/shop"),
        ("host=db.internal port=5432 dbname=shop password='canary host=x'", "db.internal:5432/shop"),
        ("dbname=shop", "local socket/shop"),
        ("postgresql:///shop", "local socket/shop"),
    ],
)
def test_a_source_is_shown_without_its_password(dsn: str, shown: str) -> None:
    assert describe_dsn(dsn) == shown


def test_sections_are_rendered_once_per_sample(tmp_path: Path) -> None:
    shop = definition(tmp_path)
    with Catalog.open(shop.catalog.url) as catalog:
        fill(catalog)
        sampler = StatusSampler(catalog, shop, "log")
        sampler.sample()
        first = sampler.sections()
        assert sampler.sections() is first
        sampler.sample()
        assert sampler.sections() is not first
        sampler.report_stopped()


def test_samples_are_taken_each_second_only_while_somebody_watches(tmp_path: Path) -> None:
    shop = definition(tmp_path)
    with Catalog.open(shop.catalog.url) as catalog:
        sampler = StatusSampler(catalog, shop, "log")
        before = time.monotonic()
        sampler.sample()
        after = time.monotonic()
        assert not sampler.is_due(before + SAMPLE_INTERVAL)
        assert sampler.is_due(after + UNWATCHED_INTERVAL)
        sampler.streams = 1
        assert sampler.is_due(after + SAMPLE_INTERVAL)
        assert not sampler.is_due(before)
        sampler.report_stopped()
