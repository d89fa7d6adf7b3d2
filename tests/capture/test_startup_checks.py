"""Checks: a source that cannot be captured is refused with everything that is wrong, before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.capture.startup_checks import check_log
from cdc.errors import ExitCode, PreflightFailed, SourceUnreachable
from tests.cli.command import spawn
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql

TWO = r"2 to fix:\n  public\.bare: .*\n  public\.none: "


@pytest.fixture(name="unfit")
def _unfit(tmp_path: Path, database: str) -> Captured:
    """Two tables of which updates would fail once they are published."""
    run_sql(
        database,
        "CREATE TABLE bare (v text)",
        "CREATE TABLE none (id int PRIMARY KEY)",
        "ALTER TABLE none REPLICA IDENTITY NOTHING",
    )
    return Captured(tmp_path, database)


def test_a_first_start_names_everything_that_is_to_mend(unfit: Captured) -> None:
    with pytest.raises(PreflightFailed, match=TWO):
        check_log(unfit.definition)


def test_a_refused_first_start_leaves_neither_log_nor_slot_nor_publication(unfit: Captured) -> None:
    ended = spawn("reader", "-c", unfit.path)

    assert ended.status == ExitCode.ENVIRONMENT
    assert "public.bare" in ended.errors
    assert "public.none" in ended.errors
    assert not (unfit.folder / "log").exists()
    left = "SELECT count(*) FROM (SELECT FROM pg_publication UNION ALL SELECT FROM pg_replication_slots"
    assert rows_of(unfit.dsn, f"{left} WHERE database = current_database())") == [(0,)]


def test_a_mended_source_starts(unfit: Captured) -> None:
    run_sql(unfit.dsn, "ALTER TABLE bare REPLICA IDENTITY FULL", "ALTER TABLE none REPLICA IDENTITY DEFAULT")
    check_log(unfit.definition)
    assert unfit.copy() > 0


def test_a_source_that_is_away_is_no_preflight_problem_but_waited_for(tmp_path: Path) -> None:
    away = Captured(tmp_path, "postgresql://nobody@127.0.0.1:1/nothing", slot="s_away")
    with pytest.raises(SourceUnreachable):
        check_log(away.definition)
