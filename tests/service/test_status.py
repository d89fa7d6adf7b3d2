"""What status says of a pipeline, by what its processes said and how long ago."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cdc.catalog import AWAITS_SPARK, REPORT_MAX_AGE, Catalog, ProcessReport, SinkProgress, TableProgress
from cdc.metrics import (
    COMPACTION_CHANGES,
    COMPACTION_SECONDS,
    COMPILING,
    LOG_HORIZON,
    LOG_POSITION,
    SPARK_STARTED,
    Metrics,
)
from cdc.position import Position
from cdc.service.defined_pipeline import DefinedPipeline
from cdc.service.log_status_records import Compaction, LogState, LogStatus
from cdc.service.machine_load import MachineLoad
from cdc.service.page.document import PageContext, render
from cdc.service.position_history import PositionHistory
from cdc.service.problem import Problem
from cdc.service.slot_risk import SourceObservation
from cdc.service.status import pipeline_status, with_delays, with_source
from tests.service.pipeline import LOG_END, NAME, fill, new_catalog

DEFINED = DefinedPipeline(NAME, frozenset({"lake", "find"}), frozenset(), runs_deliveries=False, file="shop.yaml")


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with new_catalog(tmp_path) as opened:
        yield opened


def later(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def test_a_pipeline_nobody_reported_is_down_and_says_how_to_start_it(catalog: Catalog) -> None:
    status = pipeline_status(catalog, NAME, later(0))
    assert status.state == "down"
    assert {p.state for p in status.processes} == {"missing"}
    assert all("cdc run" in problem.remedy for problem in status.problems)


def test_a_pipeline_that_reports_is_running_without_problems(catalog: Catalog) -> None:
    fill(catalog)
    status = pipeline_status(catalog, NAME, later(0))
    assert (status.state, status.problems) == ("running", ())
    assert {s.name: s.lag_bytes for s in status.sinks} == {"lake": 52_000, "find": 800}


def test_a_silent_process_is_stale_and_the_pipeline_down(catalog: Catalog) -> None:
    fill(catalog)
    status = pipeline_status(catalog, NAME, later(REPORT_MAX_AGE + 1))
    assert status.state == "down"
    assert {p.process: p.state for p in status.processes} == {"reader": "stale", "apply": "stale"}
    assert all(sink.state == "stale" for sink in status.sinks)


@pytest.mark.parametrize(("value", "started"), [(None, None), (0, False), (1, True)])
def test_an_apply_process_says_whether_it_has_started_spark(
    catalog: Catalog, value: float | None, started: bool | None
) -> None:
    figures = Metrics()
    if value is not None:
        figures.set(SPARK_STARTED, value, NAME)
    catalog.processes.report(ProcessReport(NAME, "apply", 1, "running", None, figures.to_json()))
    status = pipeline_status(catalog, NAME, later(0))
    assert {p.process: p.has_spark for p in status.processes} == {"reader": None, "apply": started}


def test_lags_grow_while_their_process_is_silent(catalog: Catalog) -> None:
    fill(catalog)
    status = pipeline_status(catalog, NAME, later(100))
    assert status.source.lag_seconds == pytest.approx(100, abs=1)
    assert all(sink.lag_seconds == pytest.approx(100, abs=2) for sink in status.sinks)


def test_a_process_that_stopped_on_purpose_is_stopped_however_long_ago(catalog: Catalog) -> None:
    fill(catalog)
    catalog.processes.report(ProcessReport(NAME, "apply", 1, "stopped"))
    status = pipeline_status(catalog, NAME, later(1000))
    assert {p.process: p.state for p in status.processes}["apply"] == "stopped"


def test_a_reader_that_was_there_for_the_copy_alone_is_copied_and_nothing_is_wrong(catalog: Catalog) -> None:
    fill(catalog)
    catalog.processes.report(ProcessReport(NAME, "reader", 1, "copied"))
    status = pipeline_status(catalog, NAME, later(REPORT_MAX_AGE - 1))
    assert ({p.process: p.state for p in status.processes}["reader"], status.state) == ("copied", "running")
    assert status.problems == ()
    assert {p.process: p.state for p in pipeline_status(catalog, NAME, later(1000)).processes}["reader"] == "copied"


def test_an_error_is_shown_with_code_and_remedy(catalog: Catalog) -> None:
    fill(catalog)
    error = {"code": "CDC-2104", "message": "slot is ahead", "suggestion": "drop it"}
    catalog.processes.report(ProcessReport(NAME, "reader", 1, "failed", error))
    status = pipeline_status(catalog, NAME, later(0))
    assert [(p.subject, p.code, p.remedy) for p in status.problems] == [("reader", "CDC-2104", "drop it")]
    assert status.state == "down"


def test_a_failed_table_degrades_the_pipeline_and_names_the_way_out(catalog: Catalog) -> None:
    fill(catalog)
    reason = "CDC-3001 a value does not fit → give the column the policy text"
    catalog.tables.record(NAME, [TableProgress("lake", "shop.orders", "failed", reason, 7, 1, 3)])
    status = pipeline_status(catalog, NAME, later(0))
    assert status.state == "degraded"
    (problem,) = status.problems
    assert (problem.subject, problem.code) == ("table shop.orders in lake", "CDC-3001")
    assert (problem.message, problem.remedy) == ("a value does not fit", "give the column the policy text")


@pytest.mark.parametrize(
    ("told", "command"),
    [
        (
            "CDC-3010 no column 'a' → mend it, then 'cdc replay SINK --tables TABLE'",
            "cdc replay lake --tables shop.orders",
        ),
        ("CDC-3005 'shop.orders' is needs_resync", "cdc replay lake --tables shop.orders"),
        ("CDC-3005 it is not exact → 'cdc tables resync TABLE'", "cdc tables resync shop.orders"),
    ],
)
def test_the_next_command_names_sink_table_and_definition(catalog: Catalog, told: str, command: str) -> None:
    fill(catalog)
    catalog.tables.record(NAME, [TableProgress("lake", "shop.orders", "failed", told, 7, 1, 3)])
    (problem,) = pipeline_status(catalog, NAME, later(0), defined=DEFINED).problems
    assert f"'{command} -c shop.yaml'" in problem.remedy


def test_a_table_that_is_not_exact_at_the_source_is_to_be_copied_again(catalog: Catalog) -> None:
    fill(catalog)
    catalog.tables.record(NAME, [TableProgress("", "shop.orders", "needs_resync", "a type changed", 7, None, 3)])
    (problem,) = pipeline_status(catalog, NAME, later(0), defined=DEFINED).problems
    assert problem.remedy == "copy the table again: 'cdc tables resync shop.orders -c shop.yaml'"


def test_nobody_vouches_for_a_sink_whose_process_has_ended_but_why_it_failed_stays(catalog: Catalog) -> None:
    fill(catalog)
    catalog.processes.report(ProcessReport(NAME, "apply", 1, "stopped"))
    before = {sink.name: sink.lag_seconds or 0.0 for sink in pipeline_status(catalog, NAME, later(0)).sinks}
    catalog.sinks.record(NAME, SinkProgress("find", 7, None, 3.0, "failed", "CDC-3003 no answer"))
    sinks = {sink.name: sink for sink in pipeline_status(catalog, NAME, later(60)).sinks}
    assert (sinks["lake"].state, sinks["find"].state) == ("stale", "failed")
    assert (sinks["lake"].lag_seconds or 0.0) > before["lake"] + 55


def test_a_failed_sink_is_a_problem(catalog: Catalog) -> None:
    fill(catalog)
    catalog.sinks.record(NAME, SinkProgress("lake", 7, None, 3.0, "failed", "CDC-3003 no answer"))
    status = pipeline_status(catalog, NAME, later(0))
    assert [(p.code, p.message) for p in status.problems] == [("CDC-3003", "no answer")]


def test_a_sink_that_does_not_move_falls_behind_though_its_process_repeats_the_lag_of_its_last_batch(
    catalog: Catalog,
) -> None:
    fill(catalog)
    log = PositionHistory()
    log.add(900.0, LOG_END - 800)
    log.add(960.0, LOG_END)
    status = with_delays(pipeline_status(catalog, NAME, later(0)), log, 1000.0)
    assert {sink.name: sink.lag_seconds for sink in status.sinks} == {"lake": 100.0, "find": 40.0}


def test_a_sink_that_moves_has_the_lag_that_it_reports(catalog: Catalog) -> None:
    fill(catalog)
    log = PositionHistory()
    log.add(900.0, LOG_END - 52_000)
    log.add(999.0, LOG_END)
    reported = pipeline_status(catalog, NAME, later(0))
    assert with_delays(reported, log, 1000.0).sinks == reported.sinks


def test_the_lag_of_a_reader_that_confirms_nothing_grows_though_it_reports(catalog: Catalog) -> None:
    fill(catalog)
    reported = pipeline_status(catalog, NAME, later(0))
    lags = {
        seconds: with_source(
            reported, SourceObservation(slot="s", up=True, wal_end=LOG_END + 7, unconfirmed_seconds=seconds), 10.0
        ).source.lag_seconds
        for seconds in (15.0, 300.0)
    }
    assert lags[15.0] == reported.source.lag_seconds
    assert lags[300.0] == 300.0


def test_without_an_answer_of_the_source_nothing_is_said_of_its_slot(catalog: Catalog) -> None:
    fill(catalog)
    unanswered = SourceObservation(slot="s", up=False, error="CDC-2001 refused")
    status = with_source(pipeline_status(catalog, NAME, later(0)), unanswered, 10.0)
    assert (status.source.slot_retained_bytes, status.source.lag_bytes) == (None, None)
    assert status.state == "running"


def test_a_source_that_answers_neither_reader_nor_server_is_down_on_the_page(catalog: Catalog) -> None:
    fill(catalog)
    unanswered = SourceObservation(slot="s", up=False, error="CDC-2001 refused")
    error = {"code": "CDC-2001", "message": "refused", "suggestion": "start it"}
    catalog.processes.report(ProcessReport(NAME, "reader", 1, "waiting", error, []))
    status = with_source(pipeline_status(catalog, NAME, later(0)), unanswered, 10.0)
    shown = render(status, SURROUNDINGS, {"rates": {}, "lags": {}})
    assert status.state == "down"
    assert "down</span>" in shown["flow"].partition("Log")[0]
    assert "the source does not answer" in shown["totals"]


def test_a_reader_that_compiles_says_so_until_it_is_silent(catalog: Catalog) -> None:
    figures = Metrics()
    figures.set(COMPILING, 1, NAME)
    catalog.processes.report(ProcessReport(NAME, "reader", 1, "running", None, figures.to_json()))
    told = [pipeline_status(catalog, NAME, later(seconds)).source.activity for seconds in (0, REPORT_MAX_AGE + 1)]
    assert told == ["compiles its decoder, once per machine", None]


def test_the_page_shows_no_lag_that_was_measured_before_a_stall(catalog: Catalog) -> None:
    fill(catalog)
    log = PositionHistory()
    log.add(974.0, LOG_END)
    reported = pipeline_status(catalog, NAME, later(0))
    shown = {}
    for reason in (None, AWAITS_SPARK):
        sinks = tuple(replace(sink, lag_seconds=30.66, reason=reason) for sink in reported.sinks)
        status = with_delays(replace(reported, sinks=sinks), log, 1000.0)
        shown[reason] = render(status, SURROUNDINGS, {"rates": {}, "lags": {}})["flow"]
    assert "no new value for 26 s" in shown[None]
    assert AWAITS_SPARK in shown[AWAITS_SPARK]
    assert all("lag</span>" not in flow.partition("branches")[2] for flow in shown.values())


def test_the_page_says_when_this_machine_is_the_reason_of_a_lag(catalog: Catalog) -> None:
    fill(catalog)
    reported = pipeline_status(catalog, NAME, later(0))
    late = tuple(replace(sink, lag_seconds=1.8) for sink in reported.sinks)
    status = replace(reported, sinks=late, load=MachineLoad(2.0, 1.83, 1.0))
    assert (
        "too slow for the present rate of changes: the pipeline uses 1.8 of 2 cores"
        in render(status, SURROUNDINGS, {"rates": {}, "lags": {}})["totals"]
    )


SURROUNDINGS = PageContext(source="db/shop", log="log", sink_types={}, definition="shop.yaml", may_change=False)
ABSENT = LogStatus(
    at="2026-11-20T12:00:00+00:00",
    state=LogState.ABSENT,
    problems=(Problem("log", "CDC-4000", "no change log", "look"),),
)


def test_a_log_that_is_not_there_is_a_problem_once_the_reader_has_written_to_it(catalog: Catalog) -> None:
    before = pipeline_status(catalog, NAME, later(0), ABSENT)
    assert "log" not in {problem.subject for problem in before.problems}
    fill(catalog)
    status = pipeline_status(catalog, NAME, later(0), ABSENT)
    assert (status.state != "running", "log" in {problem.subject for problem in status.problems}) == (True, True)


def test_what_apply_says_of_a_compaction_is_told_of_the_one_that_it_made_alone(catalog: Catalog) -> None:
    figures = Metrics()
    for metric, value in ((LOG_HORIZON, 0xAA), (COMPACTION_CHANGES, 22), (COMPACTION_SECONDS, 1.5)):
        figures.set(metric, value, NAME)
    catalog.processes.report(ProcessReport(NAME, "apply", 1, "running", None, figures.to_json()))
    made = Compaction(at="2026-11-20T12:00:00+00:00", rows=3)
    for horizon, told in (("0/AA", (22, 1.5)), ("0/AB", (None, None))):
        log = LogStatus(at=made.at, state=LogState.READ, horizon=horizon, compaction=made)
        shown = pipeline_status(catalog, NAME, later(0), log).log
        assert shown is not None
        assert shown.compaction is not None
        assert (shown.compaction.changes, shown.compaction.seconds, shown.compaction.rows) == (*told, 3)


def test_a_sink_of_an_earlier_epoch_is_behind_by_nobody_knows_how_many_bytes(catalog: Catalog) -> None:
    end = Position.of(0x5001, epoch=3)
    figures = Metrics()
    figures.set(LOG_POSITION, end, NAME)
    catalog.processes.report(ProcessReport(NAME, "reader", 1, "running", None, figures.to_json()))
    for sink, position in (("lake", Position.of(0x9000)), ("find", Position.of(0x5000, epoch=3))):
        catalog.sinks.record(NAME, SinkProgress(sink, position, None, 0.1, "running"))
    status = pipeline_status(catalog, NAME, later(0))
    assert status.source.position == "3:0/5001"
    assert {sink.name: sink.lag_bytes for sink in status.sinks} == {"lake": None, "find": 1}
