"""Copies that are told to rest or to end in each of their states: nothing more is read, and what follows is exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any, LiteralString

import pytest

from cdc.catalog import Catalog
from cdc.log_row import Operation
from cdc.postgres.connection import connect
from cdc.snapshot.backfill_documents import BACKFILL, BackfillAction, BackfillRequest
from cdc.snapshot.reader_commands import CHECK_TABLES
from cdc.table import TableState
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import PATIENCE
from tests.snapshot.reader_with_backfills import Running, read_rows
from tests.snapshot.window_hooks import Moments

IN_CHUNKS = "snapshot: {beside: 0, chunk_rows: 10, parallel: 1}\n"
# no place for that in their blocks: no part reads the rows again, and the stream does not send all of them
PASSED_BY: LiteralString = "UPDATE t SET v = repeat('w', 700) WHERE id % 2 = 0"
PARTS = 3


class Halted(Moments):
    """Lets rows be passed by when the first part is read, and holds one of the windows open until it is told."""

    def __init__(self, dsn: str, number: int) -> None:
        """number: of the window, counted from 1; the first is that of the version which the copy begins with."""
        super().__init__(opened=self._window)
        self._dsn, self._number, self.windows = dsn, number, 0
        self.arrived, self.release = Event(), Event()

    def _window(self) -> None:
        self.windows += 1
        if self.windows == 2:
            run_sql(self._dsn, PASSED_BY)
        if self.windows == self._number:
            self.arrived.set()
            assert self.release.wait(PATIENCE)


WINDOWS = {"first part": 2, "last part": 1 + PARTS, "re-reading": 2 + PARTS, "end": 3 + PARTS}


def some(quick: set[str]) -> list[Any]:
    """All states, but those in the default run alone that are named."""
    return [pytest.param(state, marks=() if state in quick else pytest.mark.slow) for state in WINDOWS]


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text, long text)",
        "ALTER TABLE t ALTER long SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT i, repeat('v', 600), repeat('x', 3000) || i FROM generate_series(1, 30) i",
    )
    assert rows_of(database, "SELECT pg_relation_size('t') / 8192") == [(PARTS,)]
    held = Captured(tmp_path, database)
    with held.path.open("a") as definition:
        definition.write(IN_CHUNKS)
    held.copy()
    return held


def say(running: Running, verb: BackfillAction, job: int) -> int:
    return running.catalog.commands.post("held", verb.kind, {"id": job})


def is_exact(held: Captured) -> bool:
    """Whether the log tells all rows of the source, and says so, once."""
    (schema,) = held.log.schemas().values()
    assert [row["op"] for row in held.rows()].count(Operation.GENERATION.value) == 1
    true = sorted(tuple(row) for row in rows_of(held.dsn, "SELECT id::text, v, long FROM t"))
    return schema.state is TableState.LIVE and held.folded("t") == true


def job_of(running: Running) -> int:
    return int(running.until(lambda: running.catalog.commands.ls("held", BACKFILL))[0].id)


def told(running: Running, halted: Halted, verb: BackfillAction, shows: Callable[[int], object]) -> int:
    """Say it while the window is held open, and let it go when it was heard; gives the job."""
    running.until(halted.arrived.is_set)
    job = job_of(running)
    say(running, verb, job)
    try:
        running.until(lambda: shows(job))
    finally:
        halted.release.set()
    return job


@pytest.mark.parametrize("state", some({"last part"}))
def test_a_pause_rests_behind_the_chunk_on_its_way_and_goes_on_from_there(held: Captured, state: str) -> None:
    halted = Halted(held.dsn, WINDOWS[state])
    with Running(held, halted) as running:
        job = told(running, halted, BackfillAction.PAUSE, lambda job: running.state(job) == "paused" or state == "end")
        if state != "end":
            Event().wait(1.0)  # time enough to be wrong in
            assert (halted.windows, running.state(job)) == (WINDOWS[state], "paused")
            say(running, BackfillAction.RESUME, job)
        assert running.ended(job).state == "done"
        running.caught_up()
    assert is_exact(held)
    assert halted.windows == WINDOWS["end"]


@pytest.mark.parametrize("state", some({"re-reading"}))
def test_a_cancelled_copy_reads_nothing_more_and_a_resync_makes_it_whole(held: Captured, state: str) -> None:
    halted = Halted(held.dsn, WINDOWS[state])
    with Running(held, halted) as running:
        job = told(
            running,
            halted,
            BackfillAction.CANCEL,
            lambda _: not pending(running, BackfillAction.CANCEL) or state == "end",
        )
        ended = running.ended(job)
        if state == "end":
            assert ended.state == "done"
        else:
            assert (ended.state, (ended.result or {})["state"]) == ("failed", "cancelled")
            assert halted.windows == WINDOWS[state]
            (schema,) = held.log.schemas().values()
            assert schema.state is TableState.SNAPSHOTTING
            run_sql(held.dsn, "DELETE FROM t WHERE id % 3 = 0")
            assert running.ended(running.ask(BackfillRequest(("public.t",), resync=True))).state == "done"
        running.caught_up()
    assert is_exact(held)


def pending(running: Running, verb: BackfillAction) -> list[object]:
    return list(running.catalog.commands.pending("held", verb.kind))


@pytest.mark.parametrize("verb", [BackfillAction.PAUSE, pytest.param(BackfillAction.CANCEL, marks=pytest.mark.slow)])
def test_a_queued_copy_hears_what_is_said_before_it_reads_anything(held: Captured, verb: BackfillAction) -> None:
    with Catalog.open(held.definition.catalog.url) as catalog:
        job = catalog.commands.post("held", BACKFILL, BackfillRequest(("public.t",), resync=True, epoch=0).to_json())
        catalog.commands.post("held", verb.kind, {"id": job})
    with Running(held) as running:
        running.until(lambda: running.state(job) in {"paused", "cancelled"})
        running.ended(running.catalog.commands.post("held", CHECK_TABLES, {}))
        assert not read_rows(held)
        if verb is BackfillAction.PAUSE:
            say(running, BackfillAction.RESUME, job)
        else:
            job = running.ask(BackfillRequest(("public.t",), resync=True))
        assert running.ended(job).state == "done"
        running.caught_up()
    assert is_exact(held)


@pytest.mark.slow
@pytest.mark.parametrize("verb", list(BackfillAction))
def test_what_is_said_of_a_copy_that_ended_changes_nothing_for_it_nor_for_the_next(
    held: Captured, verb: BackfillAction
) -> None:
    with Running(held) as running:
        job = job_of(running)
        before = running.ended(job)
        say(running, verb, job)
        other = running.ask(BackfillRequest(("public.t",), first=("1",), last=("10",)))
        assert running.ended(other).state == "done"
        assert running.catalog.commands.get(job) == before
        running.caught_up()
    assert is_exact(held)


def test_a_copy_without_a_right_says_which_one_and_continues_by_itself_once_it_is_granted(held: Captured) -> None:
    role: LiteralString = f"r_{held.dsn.rpartition('/')[2]}"  # type: ignore[assignment]
    run_sql(
        held.dsn,
        f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'secret'",
        f"ALTER PUBLICATION cdc_held_pub OWNER TO {role}",
    )
    try:
        text = held.path.read_text()
        held.path.write_text(text.replace("://postgres@", f"://{role}@").replace("user=postgres", f"user={role}"))
        with Running(held) as running:
            running.jobs.retry_refused_every = 0.5
            job = running.ask(BackfillRequest(("public.t",), resync=True))
            error = (running.ended(job).result or {})["error"]
            assert (error["code"], "permission denied for table t" in error["message"]) == ("CDC-2002", True)
            assert error["suggestion"] == f'GRANT SELECT ON "public"."t" TO "{role}";'
            run_sql(held.dsn, error["suggestion"])
            running.until(lambda: running.state(job) == "done", "the copy to continue")
            assert [command.id for command in running.catalog.commands.ls("held", BACKFILL)] == [job]
            running.caught_up()
        assert is_exact(held)
    finally:
        run_sql(held.dsn, f"REASSIGN OWNED BY {role} TO CURRENT_USER", f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_a_reader_that_ends_ends_a_backfill_that_waits_for_the_source(held: Captured) -> None:
    waiting: LiteralString = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'cdc backfill' AND wait_event_type = 'Lock'"
    )
    with Running(held) as running:
        running.caught_up()
        with connect(held.dsn) as conn, conn.transaction():
            conn.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            running.ask(BackfillRequest(("public.t",), resync=True))
            running.until(lambda: rows_of(held.dsn, waiting) != [(0,)], "the backfill to wait for a lock")
            running.stop.set()
            running.jobs.end(PATIENCE)
            assert not running.jobs.is_alive()
