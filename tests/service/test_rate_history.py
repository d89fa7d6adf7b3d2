"""Rates and curves of the last minutes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from cdc.service.api.status_sampler import RateHistory
from cdc.service.status import PipelineStatus, SourceStatus

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
