"""Backfills by list of keys: the rows that are there, a deletion of each that is not, and nothing of the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from cdc.catalog import Catalog
from cdc.errors import ConfigError
from cdc.log_row import Operation
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.snapshot.backfill_documents import BACKFILL, KEYS, BackfillRequest, check_request
from cdc.snapshot.chunk_plan import LIST_KEYS
from cdc.table import TableState
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql
from tests.snapshot.reader_with_backfills import Running

FEW, ROWS = 300, 1_500


@pytest.fixture(name="rows")
def _rows() -> int:
    return FEW


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str, rows: int) -> Captured:
    """A table of two key columns and a long one, copied."""
    run_sql(
        database,
        "CREATE TABLE t (v text, a int, long text, b char(4), PRIMARY KEY (b, a))",
        "ALTER TABLE t ALTER long SET STORAGE EXTERNAL",
        f"INSERT INTO t SELECT 'v' || i, i, repeat('x', 3000) || i, 'k' || i % 10 FROM generate_series(1, {rows}) i",
        "CREATE TABLE u (id int PRIMARY KEY)",
    )
    held = Captured(tmp_path, database)
    held.copy()
    return held


@pytest.fixture(name="running")
def _running(held: Captured) -> Iterator[Running]:
    """Its first copies have ended."""
    with Running(held) as running:
        running.until(lambda: all(s.state is TableState.LIVE for s in held.log.schemas().values()))
        running.until(lambda: not running.catalog.commands.pending("held", BACKFILL))
        yield running


def placed(held: Captured, after: Position) -> list[dict[str, Any]]:
    """Rows behind a position."""
    log = held.log
    return [row for batch in log.rows(after, log.durable or Position(0)) for row in batch.to_pylist()]


def durable(held: Captured) -> Position:
    return held.log.durable or Position(0)


REFUSED = [
    (BackfillRequest(("public.*",), keys=(("1",),)), "the key of table 'public.t' has the columns"),
    (BackfillRequest(("public.t", "public.u"), keys=()), "exactly one table: got 2: public.t, public.u"),
    (BackfillRequest(("public.u",), keys=(("1",), ("1", "2"))), r"has the columns \(id\): got 2 values"),
    (BackfillRequest(("public.u",), keys=()), "the list of keys is empty"),
    (BackfillRequest(("public.u",), keys=(("1",),) * (KEYS + 1)), "one request cannot contain"),
    (BackfillRequest(("public.u",), keys=(("1",),), where="true"), "cannot be combined with a key range"),
    (BackfillRequest(("public.u",), keys=(("1",),), first=("1",)), "cannot be combined with a key range"),
    (BackfillRequest(("public.u",), keys=(("1",),), resync=True), "cannot be combined with a key range"),
]


def test_a_listed_key_is_read_a_key_without_a_row_is_a_deletion_and_a_text_that_is_no_key_is_an_error(
    running: Running,
) -> None:
    running.caught_up()
    held, before = running.held, durable(running.held)
    asked = BackfillRequest(
        ("public.t",), keys=(("k7", "007"), ("k7  ", "17"), ("k7", "8"), ("zz", " 5"), ("zz", "05"))
    )
    ended = running.ended(running.ask(asked))
    assert ended.state == "done", ended.result
    rows = placed(held, before)
    found = {(row["op"], *row["key"]) for row in rows}
    assert found == {("r", "k7  ", "7"), ("r", "k7  ", "17"), ("d", "k7  ", "8"), ("d", "zz  ", "5")}
    assert len(rows) == 4
    # columns 2 and 4 are the key's, in the order of the table
    assert {row["before"][0] for row in rows if row["op"] == "d"} == {(2, "8"), (2, "5")}
    assert {row["before"][1][0] for row in rows if row["op"] == "d"} == {4}
    assert ended.result is not None
    assert ended.result["tables"]["public.t"]["rows"] == 4

    before = durable(held)
    ended = running.ended(running.ask(BackfillRequest(("public.t",), keys=(("k7", "7"), ("k8", "eight")))))
    assert ended.state == "failed"
    assert ended.result is not None
    assert ended.result["error"]["code"] == ConfigError.code
    assert "invalid key 'k8,eight' of table 'public.t'" in ended.result["error"]["message"]
    assert placed(held, before) == []

    for request, says in REFUSED:
        with pytest.raises(ConfigError, match=says):
            check_request(request, held.log.schemas(), {})
        assert BackfillRequest.from_json(request.to_json()) == request


@pytest.mark.parametrize("rows", [FEW, pytest.param(ROWS, marks=pytest.mark.slow)])
def test_a_list_beside_writers_that_take_and_bring_its_keys_leaves_the_log_in_the_sources_state(
    running: Running, rows: int
) -> None:
    held, done = running.held, Event()
    before, behind = durable(held), 7 * (rows // 30)

    def write() -> None:
        number = 0
        with connect(held.dsn) as conn:
            while not done.wait(0.01):
                number += 1
                a = number * 7 % rows
                conn.execute("DELETE FROM t WHERE a = %s", [a])
                conn.execute("INSERT INTO t VALUES ('again', %s, repeat('y', 3000), 'new')", [a - 70])
                conn.execute("UPDATE t SET b = 'k' || a %% 10 WHERE a = %s", [a - behind])
                conn.execute("UPDATE t SET v = %s WHERE a = %s", [f"{number}", a - 2 * behind])
                conn.execute("DELETE FROM t WHERE a < 0")

    writer = Thread(target=write)
    writer.start()
    keys = tuple((b, str(a)) for a in range(rows) for b in (f"k{a % 10}", "new", "no", "gone"))
    try:
        ended = running.ended(running.ask(BackfillRequest(("public.t",), keys=keys)))
        assert ended.state == "done", ended.result
    finally:
        done.set()
        writer.join()
    running.caught_up()
    found = placed(held, before)
    assert len({row["position"] for row in found if row["op"] == Operation.READ.value}) > len(keys) // LIST_KEYS
    source = rows_of(held.dsn, "SELECT v, a::text, long, rpad(b::text, 4) FROM t")
    assert held.folded("t") == sorted(tuple(row) for row in source)


def test_a_list_that_a_killed_reader_left_is_read_from_its_beginning(held: Captured) -> None:
    run_sql(held.dsn, "INSERT INTO u VALUES (1), (2)")
    with Catalog.open(held.definition.catalog.url) as catalog:
        request = BackfillRequest(("public.u",), keys=(("1",), ("2",), ("3",)))
        job = catalog.commands.post("held", BACKFILL, request.to_json())
        catalog.commands.record(job, {"tables": {"public.u": {"state": "snapshotting", "rows": 2}}})
    with Running(held) as running:
        ended = running.ended(job)
    assert ended.result is not None
    assert ended.result["tables"]["public.u"]["rows"] == 3
    found = [(row["op"], row["key"]) for row in placed(held, Position(0)) if row["op"] in "rd" and row["key"]]
    assert sorted(row for row in found if len(row[1]) == 1) == [("d", ["3"]), ("r", ["1"]), ("r", ["2"])]
