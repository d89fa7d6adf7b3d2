"""Continuous verification: ranges of keys one after the other, recorded in the catalog, and continued after a stop."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread

import pytest
from deltalake import DeltaTable

from cdc.catalog import Catalog
from cdc.errors import CatalogUnavailable
from cdc.postgres.connection import connect
from cdc.verify_and_replay_options import VerifyMode
from pipelines.__main__ import main
from pipelines.verification.continuous import (
    ContinuousVerification,
    PassStart,
    RangeResult,
    VerificationSchedule,
    next_range,
)
from pipelines.verification.verify import VerifyOptions
from tests.catalog.test_verified_ranges import range_of
from tests.faults.capture import Captured
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until
from tests.pipelines.apply_thread import ApplyThread, capture_with_sinks, run_verify
from tests.snapshot.reader_with_backfills import Running

HOURLY = VerificationSchedule(every=3600, range_rows=1000)
ALWAYS_DUE = VerificationSchedule(every=0.001, range_rows=1000)


@pytest.fixture(name="captured")
def _captured(tmp_path: Path, database: str) -> Captured:
    """A table of three ranges and one without any order that both sides share."""
    return capture_rows(tmp_path, database, 3000)


@pytest.fixture(name="small")
def _small(tmp_path: Path, database: str) -> Captured:
    """The same with one range."""
    return capture_rows(tmp_path, database, 100)


def capture_rows(folder: Path, database: str, rows: int) -> Captured:
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE TABLE u (place float8 PRIMARY KEY, v text)",
        "INSERT INTO u SELECT i / 10.0, 'v' || i FROM generate_series(1, 100) i",
    )
    with connect(database) as conn:
        conn.execute("INSERT INTO t SELECT i, 'v' || i FROM generate_series(1, %s) i", [rows])
    return capture_with_sinks(folder, database)


def continuous(
    captured: Captured,
    schedule: VerificationSchedule,
    report: Callable[[RangeResult], None],
    mode: VerifyMode = VerifyMode.ROWS,
) -> ContinuousVerification:
    options = VerifyOptions(sinks=("lake",), timeout=30.0, mode=mode)
    return ContinuousVerification(captured.definition, options, schedule, report)


def ranges(results: list[RangeResult], topic: str = "public.t") -> list[tuple[int, str | None, str | None, bool]]:
    """(number, first, ended, equal) of the results for a table."""
    return [
        (one.found.number, one.found.first, one.found.ended, one.verdict.equal)
        for one in results
        if one.found is not None and one.verdict is not None and one.found.topic == topic
    ]


WHOLE = [(0, None, "1001", True), (1, "1001", "2001", True), (2, "2001", None, True)]


@pytest.mark.slow
def test_a_pass_continues_after_a_stop_and_mismatches_are_found_reported_and_repaired(captured: Captured) -> None:
    results: list[RangeResult] = []

    def stop_after_two_ranges(result: RangeResult) -> None:
        results.append(result)
        if result.found is not None and result.found.ended == "2001":
            os.kill(os.getpid(), signal.SIGTERM)

    with Running(captured), ApplyThread(captured) as applying, Catalog.open(captured.definition.catalog.url) as catalog:
        until(lambda: _streams(captured), "both tables in the lake")
        continuous(captured, HOURLY, stop_after_two_ranges).run()
        assert ranges(results) == WHOLE[:2]
        (begun, *_) = [one for one in catalog.verified.ls("held") if one.topic == "public.t"]
        assert (begun.through, begun.ranges, begun.ended) == (None, 2, False)
        verification = continuous(captured, HOURLY, results.append, VerifyMode.CHECKSUM)
        verification.round(catalog)
        assert ranges(results) == WHOLE
        assert ranges(results, "public.u") == [(0, None, None, True)]
        assert len({one.found.began for one in results if one.found and one.found.topic == "public.t"}) == 1
        assert not verification.wrong
        results.clear()
        verification.round(catalog)
        assert results == []  # nothing is due for an hour
        with applying.resting():
            _spoil(captured)
        verification = continuous(captured, ALWAYS_DUE, results.append, VerifyMode.CHECKSUM)
        verification.round(catalog)
        assert [equal for *_, equal in ranges(results)] == [True, False, False]
        assert {one.topic: one.mismatched for one in catalog.verified.ls("held")} == {"public.t": 3, "public.u": 1}
        assert verification.wrong == {("lake", "public.t"), ("lake", "public.u")}
        results.clear()
        repairing = VerificationSchedule(every=0.001, repair=True, range_rows=1000)
        verification = continuous(captured, repairing, results.append)

        def repaired() -> bool:
            verification.round(catalog)
            return not verification.wrong

        until(repaired, "all of it equal")
        assert (1, "1001", "2001", True) in ranges(results)
        known = {one.topic: (one.mismatched, one.through == one.equal_at) for one in catalog.verified.ls("held")}
    assert known == {"public.t": (0, True), "public.u": (0, True)}


def _streams(captured: Captured) -> bool:
    folder = captured.folder / "lake" / "public"
    return all(DeltaTable.is_deltatable(str(folder / name)) for name in "tu")


def _spoil(captured: Captured) -> None:
    folder = captured.folder / "lake" / "public"
    DeltaTable(str(folder / "t")).delete("id = 1500 OR id = 2500")
    DeltaTable(str(folder / "t")).update(updates={"v": "'bad'"}, predicate="id = 3000")
    DeltaTable(str(folder / "u")).update(updates={"v": "'bad'"}, predicate="place < 0.15")


def test_the_command_runs_until_a_signal_and_prints_each_range(
    small: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    with Running(small), ApplyThread(small), Catalog.open(small.definition.catalog.url) as catalog:
        until(lambda: _streams(small), "both tables in the lake")

        def end_when_done() -> None:
            try:
                until(lambda: len([one for one in catalog.verified.ls("held") if one.ended]) == 4, "a pass over all")
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        ending = Thread(target=end_when_done)
        ending.start()
        status = main(["verify", "--every", "1h", "--rate", "100000", "--json", "-c", str(small.path)])
        ending.join()
        results = [json.loads(one) for one in capsys.readouterr().out.splitlines() if one.startswith('{"command"')]
        assert status == 0
        assert {(one["ok"], one["result"]["sink"]) for one in results} == {(True, "lake"), (True, "find")}
        assert run_verify(small, capsys)[0] == 0


def test_a_signal_ends_it_even_if_the_cut_cannot_be_released(small: Captured) -> None:
    """The error of the cleanup once replaced the exception of the signal, so the process never ended."""
    errors: list[CatalogUnavailable] = []
    file = small.definition.catalog.url.removeprefix("sqlite:///")
    with (
        Running(small),
        ApplyThread(small) as applying,
        closing(sqlite3.connect(file)) as broken,
        ExitStack() as rest,
    ):
        until(lambda: _streams(small), "both tables in the lake")

        def stop_with_broken_catalog(result: RangeResult) -> None:
            if result.error is None:
                rest.enter_context(applying.resting())
                broken.execute("ALTER TABLE commands RENAME TO hidden")
                os.kill(os.getpid(), signal.SIGTERM)
            elif isinstance(result.error, CatalogUnavailable):
                errors.append(result.error)
                broken.execute("ALTER TABLE hidden RENAME TO commands")
                rest.close()

        continuous(small, HOURLY, stop_with_broken_catalog).run()
    assert len(errors) == 1


NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_the_next_range_follows_the_last_one_of_the_running_pass_and_a_new_pass_waits_until_it_is_due() -> None:
    assert next_range([], NOW, 60) == PassStart(NOW)
    earlier = NOW - timedelta(seconds=59)
    running = [range_of(began=earlier, number=0, ended="5"), range_of(began=earlier, number=1, first="5", ended="9")]
    assert next_range([running], NOW, 60) == PassStart(earlier, 2, "9")
    done = [*running, range_of(began=earlier, number=2, first="9")]
    assert next_range([done], NOW, 60) is None
    assert next_range([done], NOW, 59) == PassStart(NOW)
