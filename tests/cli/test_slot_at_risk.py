"""A slot that is about to be lost: every command that a person looks at says what is left and for how long."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from cdc.catalog import Catalog
from cdc.postgres.connection import connect
from tests.cli.command import run
from tests.faults.capture import Captured, capture_table
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until
from tests.service.metrics_scrape import write_wal
from tests.service.running import serving

LIMIT = "ALTER SYSTEM SET max_slot_wal_keep_size = '64MB'"
NO_LIMIT = "ALTER SYSTEM RESET max_slot_wal_keep_size"
FORECAST = "the slot is lost after .* more, in about .* at the present rate"


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    return capture_table(tmp_path, database)


@pytest.fixture(name="limited")
def _limited(held: Captured) -> Iterator[psycopg.Connection]:
    """A connection to a server that gives slots up after 64 MB."""
    run_sql(held.dsn, LIMIT, "SELECT pg_reload_conf()")
    with connect(held.dsn) as conn:
        until(lambda: conn.execute("SHOW max_slot_wal_keep_size").fetchone() == ("64MB",), "the setting")
        yield conn
    run_sql(held.dsn, NO_LIMIT, "SELECT pg_reload_conf()")


def outcomes(capsys: pytest.CaptureFixture[str], held: Captured) -> dict[str, tuple[int, bool]]:
    """Exit status of each command, and whether it says that the slot will be lost."""
    commands = {"status": ("status", "--exit-code"), "doctor": ("doctor",), "slots ls": ("slots", "ls")}
    found = {name: run(capsys, *command, "-c", held.path) for name, command in commands.items()}
    said = {name: f"the server retains {one.output.partition('the server retains ')[2]}" for name, one in found.items()}
    return {
        name: (one.status, re.search("the slot is lost after .* MB more", said[name]) is not None)
        for name, one in found.items()
    }


def test_every_command_says_what_is_left_before_the_slot_is_lost_and_exits_with_a_finding(
    held: Captured, limited: psycopg.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    with Catalog.open(held.definition.catalog.url):
        pass
    before = outcomes(capsys, held)
    assert (before["doctor"][0], before["slots ls"][0]) == (0, 0)
    write_wal(limited, 50)
    after = outcomes(capsys, held)
    assert {name: status for name, (status, _) in after.items()} == {"status": 4, "doctor": 4, "slots ls": 4}
    assert all(said for _, said in after.values())
    found = run(capsys, "slots", "ls", "-c", held.path, "--json").envelope
    assert (found["ok"], found["result"]["at_risk"]) == (False, True)
    assert "the slot is lost after" in found["result"]["forecast"]


def test_the_page_says_what_is_left_and_for_how_long_at_the_present_rate(
    held: Captured, limited: psycopg.Connection
) -> None:
    with serving(held.definition) as client:
        until(lambda: client.get("/api/v1/status").json()["source"]["slot_forecast"], "the first figures")
        write_wal(limited, 50)
        until(lambda: re.search(FORECAST, client.get("/").text) is not None, "the sentence on the page")
        assert "lost after " in client.get("/").text
        status = client.get("/api/v1/status").json()
        assert status["source"]["slot_seconds_left"] > 0
        assert any(problem["subject"] == f"slot {held.slot}" for problem in status["problems"])
