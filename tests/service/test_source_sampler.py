"""SourceWatch: what the server process reads at the source itself, whatever the reader reports, and when it cannot."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cdc.catalog import Catalog
from cdc.postgres.connection import connect
from cdc.postgres.replication import ReplicationStream, StreamOptions
from cdc.service.api.app import create_app
from cdc.service.source_sampler import MAX_AGE, SourceSampler
from tests.faults.capture import Captured, capture_table
from tests.faults.proxy import Proxy
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until
from tests.service.metrics_scrape import metric_values, write_wal
from tests.service.running import answering, client_of, serving

SOON = 30.0


class Clock:
    """Monotonic seconds that a test moves forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@contextmanager
def hung_reader(held: Captured) -> Iterator[ReplicationStream]:
    """A connection that streams and then neither receives nor reports, as a stopped process."""
    options = StreamOptions(slot=held.slot, publication="cdc_held_pub", start=held.wal_end())
    with ReplicationStream.open(held.dsn, options) as stream:
        yield stream


@pytest.fixture(name="held")
def _held(tmp_path: Path, either_database: str) -> Captured:
    return capture_table(tmp_path, either_database)


@pytest.fixture(name="client")
def _client(held: Captured) -> Iterator[httpx.Client]:
    with serving(held.definition) as client:
        yield client


def test_the_wal_kept_for_a_hung_reader_grows_in_the_metrics_though_nobody_reports(
    held: Captured, client: httpx.Client
) -> None:
    with hung_reader(held), connect(held.dsn) as conn:
        before = until(lambda: metric_values(client).get("cdc_slot_retained_bytes"), "the first figure", seconds=SOON)
        write_wal(conn, 20)
        until(lambda: metric_values(client)["cdc_slot_retained_bytes"] > before + 20e6, "20 MB more", seconds=SOON)
        found = metric_values(client)
        assert (found["cdc_source_up"], found["cdc_slot_active"]) == (1, 1)
        assert found["cdc_source_wal_bytes_per_second"] > 0
        until(lambda: metric_values(client)["cdc_slot_unconfirmed_seconds"] > 3, "the age of what is not confirmed")
        until(lambda: metric_values(client)["cdc_feedback_age_seconds"] > 3, "the age of the last status update")


def test_the_age_of_the_last_status_update_grows_by_the_clock_and_ends_with_the_next_one(held: Captured) -> None:
    clock = Clock()
    watch = SourceSampler(held.definition, clock, every=0.0)

    def age() -> float:
        return watch.wait(SOON).feedback_age_seconds or 0.0

    with hung_reader(held) as stream:
        assert age() < SOON
        clock.ahead = 100.0
        assert 100 <= age() < 100 + SOON
        stream.confirm(held.wal_end())
        until(lambda: stream.receive(0.01) or age() < SOON, "the update at the server", seconds=SOON)


def test_between_two_answers_ages_grow_and_old_answers_are_not_shown(held: Captured) -> None:
    clock = Clock()
    watch = SourceSampler(held.definition, clock, every=1000.0)
    with hung_reader(held):
        first = watch.wait(SOON)
        clock.ahead = MAX_AGE / 2
        later = watch.refresh()
        assert later is not None
        assert (later.feedback_age_seconds or 0) - (first.feedback_age_seconds or 0) >= MAX_AGE / 2
        clock.ahead = MAX_AGE + 1
        late = watch.refresh()
        assert late is not None
        assert (late.up, late.retained_bytes, late.feedback_age_seconds) == (False, None, None)


def test_a_slot_that_nobody_streams_from_is_not_active(held: Captured) -> None:
    found = SourceSampler(held.definition).wait(SOON)
    assert (found.up, found.slot_exists, found.slot_active) == (True, True, False)


def test_a_slot_that_is_not_there_has_no_figures(held: Captured) -> None:
    run_sql(held.dsn, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active")
    found = SourceSampler(held.definition).wait(SOON)
    assert (found.up, found.slot_exists, found.slot_active, found.retained_bytes) == (True, False, None, None)


def test_a_source_that_does_not_answer_takes_its_figures_away_and_the_metrics_answer(
    held: Captured, tmp_path: Path
) -> None:
    with Proxy(int(held.dsn.rpartition(":")[2].partition("/")[0])) as proxy:
        away = Captured(tmp_path, proxy.dsn(held.dsn), slot=held.slot).definition
        with (
            Catalog.open(away.catalog.url) as catalog,
            answering(create_app(catalog, away, away.log.path)) as url,
            client_of(url, timeout=5.0) as client,
        ):
            until(lambda: "cdc_slot_retained_bytes" in metric_values(client), "the first figure", seconds=SOON)
            proxy.frozen.set()
            until(lambda: metric_values(client)["cdc_source_up"] == 0, "the silence to be noticed", seconds=SOON)
            assert {name for name in metric_values(client) if name.startswith(("cdc_slot", "cdc_feedback"))} == set()
            assert client.get("/api/v1/status").json()["source"]["slot_retained_bytes"] is None
            assert "the source does not answer" in client.get("/").text
            proxy.heal()
            until(lambda: metric_values(client)["cdc_source_up"] == 1, "the source to answer again", seconds=SOON)
            assert "cdc_slot_retained_bytes" in metric_values(client)
