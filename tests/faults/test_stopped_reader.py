"""A reader process that is stopped: its figures do not stay at what it last reported."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cdc.postgres.connection import connect
from cdc.service.source_sampler import MAX_AGE
from tests.faults.capture import Captured, ReaderProcess, capture_table
from tests.fixtures.waiting import until
from tests.service.metrics_scrape import health, metric_values, write_wal
from tests.service.running import serving


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    return capture_table(tmp_path, database)


@pytest.fixture(name="client")
def _client(held: Captured) -> Iterator[httpx.Client]:
    with serving(held.definition) as client:
        yield client


@pytest.mark.slow
def test_a_reader_process_that_is_stopped_and_goes_on_is_seen_in_every_figure(
    held: Captured, client: httpx.Client
) -> None:
    with ReaderProcess(held) as reader, connect(held.dsn) as conn:
        conn.execute("INSERT INTO t VALUES (1)")
        until(
            lambda: health(client, "reader") == 1 and metric_values(client).get("cdc_slot_active") == 1, reader.output
        )
        until(lambda: "cdc_source_lag_seconds" in metric_values(client), reader.output)
        assert metric_values(client)["cdc_log_append_duration_seconds_count"] >= 1
        assert metric_values(client)["cdc_source_latency_seconds_count"] >= 1
        before = metric_values(client)["cdc_slot_retained_bytes"]
        reader.child.send_signal(signal.SIGSTOP)
        write_wal(conn, 20)
        until(lambda: health(client, "reader") == 0, "the silence of the reader")
        until(lambda: metric_values(client)["cdc_slot_retained_bytes"] > before + 20e6, "what the server keeps")
        until(lambda: metric_values(client)["cdc_source_lag_seconds"] > MAX_AGE, "the lag")
        until(lambda: metric_values(client)["cdc_feedback_age_seconds"] > MAX_AGE, "the age of the last status update")
        reader.child.send_signal(signal.SIGCONT)
        until(
            lambda: health(client, "reader") == 1 and metric_values(client)["cdc_feedback_age_seconds"] < MAX_AGE,
            "the reader again",
        )
