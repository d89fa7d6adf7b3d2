"""`cdc slots`: what it shows, what it refuses to do unasked, and what it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.capture.resume_checks import lsn_to_confirm
from cdc.catalog import Catalog
from cdc.postgres.connection import connect
from cdc.postgres.replication import ReplicationStream, StreamOptions
from cdc.postgres.slot import slot_status
from tests.cli.command import run
from tests.faults.capture import Captured, capture_table


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    return capture_table(tmp_path, database)


def test_slots_are_shown_with_their_limits_and_with_what_mends_it_when_ours_is_dropped(
    tmp_path: Path, any_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = capture_table(tmp_path, any_database)
    found = run(capsys, "slots", "ls", "-c", held.path, "--json").envelope
    (ours,) = (slot for slot in found["result"]["slots"] if slot["ours"])
    assert (ours["name"], ours["plugin"], found["result"]["problem"]) == (held.slot, "pgoutput", None)
    assert "max_slot_wal_keep_size" in found["result"]["limits"]
    assert {"safe_wal_size", "invalidation_reason", "failover", "retained_bytes", "wal_status"} <= set(ours)
    people = run(capsys, "slots", "ls", "-c", held.path).output
    assert held.slot in people
    assert "✓" in people

    # drop drops once, and that is audited
    first = run(capsys, "slots", "drop", "-c", held.path, "--yes", "--json").envelope
    second = run(capsys, "slots", "drop", "-c", held.path, "--yes", "--json").envelope
    assert (first["result"]["dropped"], second["result"]["dropped"]) == (True, False)
    with connect(held.dsn) as conn:
        assert slot_status(conn, held.slot) is None
    with Catalog.open(held.definition.catalog.url) as catalog:
        assert [line.action for line in catalog.audit.ls()] == ["slots.drop"]

    found = run(capsys, "slots", "ls", "-c", held.path, "--json").envelope
    assert found["result"]["problem"]["code"] == "CDC-2102"
    assert "--new-epoch" in run(capsys, "slots", "ls", "-c", held.path).output


UNCLEAR = [
    ("recover",),
    ("recover", "--new-epoch", "--skip-to", "0/1", "--resync", "*", "--yes"),
    ("recover", "--skip-to", "0/1", "--yes"),
    ("recover", "--skip-to", "nonsense", "--resync", "*", "--yes"),
    ("recover", "--new-epoch"),
    ("drop",),
]


def test_what_is_not_said_clearly_is_a_usage_error_and_changes_nothing(
    held: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in UNCLEAR:
        outcome = run(capsys, "slots", *options, "-c", held.path)
        assert (outcome.status, "→" in outcome.errors) == (2, True), options
        with connect(held.dsn) as conn:
            assert slot_status(conn, held.slot) is not None, options


def test_a_slot_that_somebody_streams_from_is_left_alone(
    tmp_path: Path, any_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = capture_table(tmp_path, any_database)
    stream = StreamOptions(slot=held.slot, publication="cdc_held_pub", start=lsn_to_confirm(0))
    with ReplicationStream.open(held.dsn, stream):
        for options in (("recover", "--new-epoch", "--yes"), ("drop", "--yes")):
            outcome = run(capsys, "slots", *options, "-c", held.path)
            assert outcome.status != 0
            assert "CDC-2101" in outcome.errors
    assert held.log.last_commit is not None
    assert held.log.last_commit.last.epoch == 0
