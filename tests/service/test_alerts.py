"""The shipped alerts: a Prometheus that scrapes the real `/metrics` fires each when its case is there, and then not."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from cdc.catalog import Catalog
from cdc.catalog.verification_state import VerificationRecord, VerificationState
from cdc.log import consumers
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.service.api.app import create_app
from cdc.service.source_sampler import SourceSampler
from tests.cli.trimmed import HOUR_US, Folder
from tests.faults.proxy import Proxy
from tests.fixtures.postgres import fresh_database, run_sql
from tests.fixtures.waiting import until
from tests.service.pipeline import NAME, definition
from tests.service.prometheus_pipeline import PROMETHEUS, PROMTOOL, RULES, Pipeline, Prometheus, reported, shipped
from tests.service.running import answering

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="no Prometheus on this machine: apt-get install prometheus"
)
SOON = 60.0
Situation = Callable[[Pipeline], AbstractContextManager[None]]


@pytest.fixture(name="pipeline", scope="module")
def _pipeline(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    folder, ahead = tmp_path_factory.mktemp("alarmed"), [0.0]
    with ExitStack() as stack:
        dsn = stack.enter_context(contextmanager(fresh_database)(postgres))
        run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION cdc_shop_pub FOR ALL TABLES")
        source = stack.enter_context(Proxy(postgres.port))
        wanted = definition(folder, source.dsn(dsn))
        catalog = stack.enter_context(Catalog.open(wanted.catalog.url))
        app = create_app(catalog, wanted, wanted.log.path)
        app.state.sampler.source = SourceSampler(wanted, lambda: time.monotonic() + ahead[0], every=0.2)
        reports = reported(catalog)
        stack.callback(reports.end)
        served = stack.enter_context(answering(app))
        server = stack.enter_context(Proxy(int(served.rpartition(":")[2])))
        names = wanted.source.slot.name, wanted.source.publication.name
        found = Pipeline(catalog, app.state.sampler, dsn, *names, reports, source, server, folder, ahead)
        found.look_at(Folder.half(folder).root)
        found.follow()
        put_verification(found, VerificationState.WAITING)
        stack.callback(found.end)
        yield found


@pytest.fixture(name="prometheus", scope="module")
def _prometheus(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with Prometheus(tmp_path_factory.mktemp("prometheus"), pipeline.server.port) as started:
        until(lambda: started.is_up, "Prometheus to start")
        yield started


def reporting(figure: str, value: float | str) -> Situation:
    """The processes report so."""

    @contextmanager
    def situation(pipeline: Pipeline) -> Iterator[None]:
        before = getattr(pipeline.reports, figure)
        setattr(pipeline.reports, figure, value)
        yield
        setattr(pipeline.reports, figure, before)

    return situation


@contextmanager
def silent_processes(pipeline: Pipeline) -> Iterator[None]:
    pipeline.reports.silent.set()
    yield
    pipeline.reports.silent.clear()


def counting(figure: str) -> Situation:
    """The processes count so many more within a moment."""

    @contextmanager
    def situation(pipeline: Pipeline) -> Iterator[None]:
        setattr(pipeline.reports, figure, getattr(pipeline.reports, figure) + 30)
        yield

    return situation


@contextmanager
def server_away(pipeline: Pipeline) -> Iterator[None]:
    pipeline.server.down()
    yield
    pipeline.server.up()


@contextmanager
def source_frozen(pipeline: Pipeline) -> Iterator[None]:
    pipeline.source.frozen.set()
    yield
    pipeline.source.heal()
    pipeline.source.reset()


@contextmanager
def hung_reader(pipeline: Pipeline, seconds: float) -> Iterator[None]:
    pipeline.follower.hung.set()
    pipeline.write_wal(1)

    def is_seen() -> bool:
        found = pipeline.sampler.source.refresh()
        return found is not None and bool(found.unconfirmed_seconds)

    until(is_seen, "WAL that is not confirmed")
    pipeline.ahead[0] += seconds
    yield
    pipeline.follower.hung.clear()


@contextmanager
def stopped_reader(pipeline: Pipeline, limit: int | None = None, megabytes: int = 0) -> Iterator[None]:
    pipeline.follower.end()
    pipeline.limit(limit)
    pipeline.write_wal(megabytes)
    yield
    pipeline.limit(None)
    if limit is not None and megabytes > limit:
        run_sql(pipeline.dsn, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active")
    pipeline.follow()
    pipeline.release()


def verified(**found: int) -> Situation:
    """A table was compared with the source, and this came of it."""

    @contextmanager
    def situation(pipeline: Pipeline) -> Iterator[None]:
        pipeline.verified(**found)
        yield
        pipeline.verified()

    return situation


@contextmanager
def failing_verification(pipeline: Pipeline) -> Iterator[None]:
    put_verification(pipeline, VerificationState.FAILING)
    yield
    put_verification(pipeline, VerificationState.WAITING)


def put_verification(pipeline: Pipeline, state: VerificationState) -> None:
    pipeline.catalog.verification.put(NAME, VerificationRecord(state=state, every=86400.0))


@contextmanager
def late_consumer(pipeline: Pipeline) -> Iterator[None]:
    log = Folder(pipeline.folder / "late")
    log.compacted(160)
    log.compacted(170, floor=120)
    log.trimmed()
    log.consumer("slow", 110)
    pipeline.look_at(log.root)
    yield
    consumers.forget(log.root, "slow")


@contextmanager
def silent_consumer(pipeline: Pipeline) -> Iterator[None]:
    log = Folder.half(pipeline.folder / "silent")
    log.consumer("slow", 160, age=2)
    pipeline.look_at(log.root)
    yield
    log.consumer("slow", 160)


@contextmanager
def old_horizon(pipeline: Pipeline) -> Iterator[None]:
    log = Folder.half(pipeline.folder / "horizon")
    log.append(300, committed_at=1_700_000_000_000_000 + 5 * HOUR_US)
    pipeline.look_at(log.root)
    yield
    log.compacted(300)


@contextmanager
def no_horizon(pipeline: Pipeline) -> Iterator[None]:
    log = Folder(pipeline.folder / "single")
    for position in (210, 220, 230):
        log.append(position)
    pipeline.look_at(log.root)
    yield
    log.compacted(230)


SITUATIONS: dict[str, Situation] = {
    "CdcServerDown": server_away,
    "CdcMetricsAbsent": server_away,
    "CdcProcessDown": silent_processes,
    "CdcFeedbackLate": partial(hung_reader, seconds=100.0),
    "CdcSourceUnreachable": source_frozen,
    "CdcSlotInactive": stopped_reader,
    "CdcSlotStalled": partial(hung_reader, seconds=400.0),
    "CdcSlotAtRisk": partial(stopped_reader, limit=64, megabytes=50),
    "CdcSlotTimeShort": partial(stopped_reader, limit=64, megabytes=5),
    "CdcSlotLost": partial(stopped_reader, limit=16, megabytes=60),
    "CdcLogBlocked": reporting("blocked", 1.0),
    "CdcSlotRetainsMuch": partial(stopped_reader, megabytes=40),
    "CdcSourceBehind": reporting("source_lag", 100.0),
    "CdcSinkBehind": reporting("sink_lag", 100.0),
    "CdcRowsParked": reporting("parked", 2.0),
    "CdcConsumerLate": late_consumer,
    "CdcConsumerSilent": silent_consumer,
    "CdcHorizonStands": old_horizon,
    "CdcLogNotCompacted": no_horizon,
    "CdcTableNotStreaming": reporting("table_state", "failed"),
    "CdcTableRefused": reporting("table_state", "refused"),
    "CdcVerifyMismatch": verified(mismatched=3),
    "CdcVerifyStale": verified(days_ago=4),
    "CdcVerifyStopped": failing_verification,
    "CdcReaderFlaps": counting("reconnects"),
    "CdcTransactionsLost": counting("lost"),
    "CdcErrors": counting("errors"),
}


QUICK = {"CdcErrors", "CdcSlotAtRisk"}
"""A rate of what the processes count, and a forecast from two figures of the source."""


@pytest.mark.parametrize(
    "alert",
    [pytest.param(rule["alert"], marks=() if rule["alert"] in QUICK else pytest.mark.slow) for rule in shipped()],
)
def test_an_alert_fires_while_its_situation_lasts_and_ends_with_it(
    alert: str, pipeline: Pipeline, prometheus: Prometheus
) -> None:
    until(lambda: alert not in prometheus.firing(), f"{alert} to be quiet before", seconds=SOON)
    until(lambda: prometheus.has_sample("cdc_errors_total"), "a first value of each counter", seconds=SOON)
    with SITUATIONS[alert](pipeline):
        until(lambda: alert in prometheus.firing(), f"{alert} to fire", seconds=SOON)
    until(lambda: alert not in prometheus.firing(), f"{alert} to end", seconds=SOON)


def test_a_healthy_pipeline_has_no_alert(pipeline: Pipeline, prometheus: Prometheus) -> None:
    until(lambda: pipeline.catalog and not prometheus.firing(), "no alert", seconds=SOON)


def test_promtool_accepts_the_shipped_rules() -> None:
    assert PROMTOOL is not None
    checked = subprocess.run([PROMTOOL, "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(SITUATIONS)} rules found" in checked.stdout


@pytest.mark.parametrize("rule", shipped(), ids=lambda rule: str(rule["alert"]))
def test_the_runbook_has_the_section_that_an_alert_names(rule: dict[str, Any]) -> None:
    _, _, section = rule["annotations"]["runbook"].partition("#")
    text = (RULES.parents[1] / "RUNBOOK.md").read_text(encoding="utf-8")
    titles = {_anchor(line) for line in text.splitlines() if line.startswith("#")}
    assert not section or any(title.startswith(section) for title in titles)


def _anchor(title: str) -> str:
    """As a page's link to it is written."""
    kept = "".join(letter for letter in title.lstrip("# ").lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")
