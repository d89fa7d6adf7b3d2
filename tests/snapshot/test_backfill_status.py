"""Progress: what is said of a backfill follows from what the catalog holds of it, and nothing is guessed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from cdc.catalog import Command, CommandState
from cdc.snapshot.backfill_documents import BACKFILL, BackfillRequest, BackfillState, Blocks, TableBackfillState
from cdc.snapshot.backfill_status import BackfillStatus, backfill_status, progress_text, tables_text

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


def told(
    request: BackfillRequest, work: BackfillState | None, state: CommandState = CommandState.PENDING, **more: Any
) -> BackfillStatus:
    result = None if work is None else work.to_json() | more
    ended = None if state is CommandState.PENDING else NOON
    return backfill_status(Command(7, "shop", BACKFILL, request.to_json(), state, result, NOON, ended))


def one(
    table: TableBackfillState, request: BackfillRequest | None = None, state: str = "snapshotting"
) -> BackfillStatus:
    return told(request or BackfillRequest(("shop.orders",)), BackfillState(state, {"shop.orders": table}))


def test_what_has_not_begun_is_queued_and_nothing_is_known_of_it() -> None:
    status = told(BackfillRequest(("shop.*",)), None)
    assert (status.state, status.rows, status.share, status.seconds_left, status.pending) == (
        "queued",
        0,
        None,
        None,
        True,
    )
    assert progress_text(status) == ""


def test_share_pace_and_what_is_left_follow_from_the_rows() -> None:
    status = one(TableBackfillState("snapshotting", rows=25_000, estimate=100_000, seconds=5.0)).tables["shop.orders"]
    assert (status.share, status.rows_per_second, status.seconds_left) == (0.25, 5_000, 15.0)
    assert progress_text(status) == "25,000 rows of about 100,000 · 25% · 5,000 rows/s · 15 s left"


def test_blocks_that_were_read_correct_an_estimate_that_was_wrong() -> None:
    work = TableBackfillState(
        "snapshotting", rows=900, estimate=10, seconds=1.0, blocks=[Blocks(1, 1, 50, 100)], size=100
    )
    status = one(work).tables["shop.orders"]
    assert (status.share, status.estimate) == (0.5, 1800)


@pytest.mark.parametrize("estimate", [0, 10])
def test_rows_beyond_the_estimate_are_no_hundred_percent(estimate: int) -> None:
    status = one(TableBackfillState("snapshotting", rows=900, estimate=estimate, seconds=1.0))
    assert (status.share, status.seconds_left) == (None, None)
    assert "%" not in progress_text(status)


@pytest.mark.parametrize("part", [{"where": "a > 1"}, {"first": ("1",)}, {"last": ("9",)}])
def test_of_a_part_of_a_table_the_size_of_the_table_says_nothing(part: dict[str, Any]) -> None:
    work = TableBackfillState("snapshotting", rows=50, estimate=100_000, seconds=1.0)
    status = one(work, BackfillRequest(("shop.orders",), **part))
    assert (status.estimate, status.share, status.seconds_left, status.rows_per_second) == (None, None, None, 50)


def test_tables_weigh_as_many_rows_as_they_have() -> None:
    tables = {
        "a": TableBackfillState("done", rows=300, estimate=290, seconds=1.0),
        "b": TableBackfillState("snapshotting", rows=100, estimate=200, seconds=1.0),
        "c": TableBackfillState(estimate=300),
    }
    status = told(BackfillRequest(("*",)), BackfillState("snapshotting", tables))
    assert (status.rows, status.estimate, status.share) == (400, 800, 0.5)
    tables["c"] = TableBackfillState()
    assert told(BackfillRequest(("*",)), BackfillState("snapshotting", tables)).share is None


def test_what_rests_has_nothing_left_to_wait_for() -> None:
    work = TableBackfillState("snapshotting", rows=25, estimate=100, seconds=5.0)
    for state in ("paused", "cancelled", "failed"):
        status = one(work, state=state)
        assert (status.state, status.seconds_left, status.tables["shop.orders"].seconds_left) == (state, None, None)
        assert status.share == 0.25


def test_what_is_done_says_how_many_rows_and_no_more() -> None:
    work = BackfillState("done", {"shop.orders": TableBackfillState("done", rows=1_000, estimate=900, seconds=2.0)})
    status = told(BackfillRequest(("shop.orders",)), work, CommandState.DONE)
    assert (status.state, status.share, status.estimate, status.pending) == ("done", 1.0, 1_000, False)
    assert progress_text(status) == "1,000 rows · 500 rows/s"


def test_a_failure_carries_its_error() -> None:
    error = {"code": "CDC-2001", "message": "gone", "suggestion": "come back"}
    status = told(BackfillRequest(("shop.orders",)), BackfillState("snapshotting"), CommandState.FAILED, error=error)
    assert (status.state, status.error) == ("failed", error)


def test_many_tables_are_said_in_a_few_words() -> None:
    assert tables_text(BackfillRequest(("a", "b"))) == "a, b"
    assert tables_text(BackfillRequest(tuple("abcdefg"))) == "a, b, c, d and 3 more"


def test_the_command_asks_for_the_same_in_a_shell() -> None:
    request = BackfillRequest(("shop.*", "a b"), where="x > 'y'", first=("1", "b"), sink="lake", rate=10)
    assert told(request, None).command == (
        """cdc backfill 'shop.*' 'a b' --where 'x > '"'"'y'"'"'' --keys 1,b.. --sink lake --rate 10 -c FILE"""
    )
    assert told(BackfillRequest(("t",), resync=True), None).command == "cdc tables resync t -c FILE"
