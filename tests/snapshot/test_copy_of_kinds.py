"""First copies of every kind of table, changed meanwhile: what is copied is what the stream would have sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, LiteralString

import pytest
from psycopg import sql

from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.tables import TableName
from cdc.snapshot.backfill_documents import BACKFILL, BackfillRequest
from cdc.table import TableState
from tests.faults.capture import Captured
from tests.fixtures.postgres import fresh_database, rows_of, run_sql
from tests.fixtures.postgres_programs import needs_version
from tests.snapshot.reader_with_backfills import Running, read_rows
from tests.snapshot.table_kinds import KEY, KINDS, ODD_KEYS, Kind
from tests.snapshot.window_hooks import Moments, Script

IN_CHUNKS: Final = "snapshot: {{beside: {}, chunk_rows: {}, parallel: {}}}\n"
COLUMNS: LiteralString = """
    SELECT a.attname, c.relkind = 'p' FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
    JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
    ORDER BY a.attnum
"""


QUICK: Final = {"filtered, some columns"}
"""Rows that move between leaves, and into a filter; postgres/test_chunk_queries.py reads tables with children."""


@pytest.fixture(name="oldest")
def _oldest(postgres_15: EmbeddedPostgres) -> Iterator[str]:
    """DSN of a fresh database on 15, which has ICU's collations."""
    yield from fresh_database(postgres_15)


def chunked(folder: Path, dsn: str, kind: Kind, beside: str = "0") -> Captured:
    """The definition by which it is copied in chunks, if it is larger than that."""
    run_sql(dsn, *kind.setup)
    held = Captured(folder, dsn, tables=kind.tables)
    with held.path.open("a") as definition:
        definition.write(IN_CHUNKS.format(beside, kind.rows, kind.parallel))
    return held


def told_again(dsn: str, table: TableName) -> None:
    """Empty the table and insert what was in it: the stream says all of it."""
    name = sql.Identifier(*table)
    with connect(dsn) as conn, conn.transaction():
        found = conn.execute(COLUMNS, table).fetchall()
        columns = sql.SQL(", ").join(sql.Identifier(column) for column, _ in found)
        only = sql.SQL("" if found[0][1] else "ONLY ")
        for statement in (
            "CREATE TEMP TABLE again ON COMMIT DROP AS SELECT {columns} FROM {only}{name}",
            "TRUNCATE {only}{name}",
            "INSERT INTO {name} ({columns}) SELECT {columns} FROM again",
        ):
            conn.execute(sql.SQL(statement).format(columns=columns, only=only, name=name))


def copied(running: Running) -> None:
    """Wait for the end of the first copy."""
    (command,) = running.until(
        lambda: (found := running.catalog.commands.ls("held", BACKFILL)) and found[0].state != "pending" and found
    )
    assert command.state == "done", command.result


def folded(held: Captured, table: TableName) -> list[tuple[str | None, ...]]:
    """As the log tells it; it has to be whole."""
    (state,) = {s.state for s in held.log.schemas().values() if (s.schema, s.name) == table}
    assert state is TableState.LIVE
    return held.folded(table.name)


def is_as_streamed(folder: Path, dsn: str, kind: Kind) -> None:
    """Copy it beside its writers, then let the stream say all of it again: the log has to tell the same."""
    held = chunked(folder, dsn, kind)
    script = Script(dsn, kind.during)
    with Running(held, Moments(opened=script, in_hand=lambda _: script())) as running:
        copied(running)
        assert script.done == len(kind.during)
        running.caught_up()
        assert len({row["position"] for row in read_rows(held)}) >= kind.chunks
        for table in kind.names:
            found = folded(held, TableName(*table))
            told_again(dsn, TableName(*table))
            running.caught_up()
            assert bool(found) is any(kind.setup[2:] or kind.during)
            assert found == held.folded(table[1])
        assert ("public", "unlogged") not in {(s.schema, s.name) for s in held.log.schemas().values()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in KINDS]
)
def test_a_copy_beside_writers_is_what_the_stream_sends(tmp_path: Path, database: str, name: str) -> None:
    is_as_streamed(tmp_path, database, KINDS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS.keys() - {"computed, and sent"})
def test_a_copy_of_an_old_server_is_what_it_streams(tmp_path: Path, oldest: str, name: str) -> None:
    is_as_streamed(tmp_path, oldest, KINDS[name])


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        pytest.param("filtered, some columns", "0", marks=pytest.mark.slow),
        ("filtered, some columns", "1GiB"),
        pytest.param("computed, and sent", "0", marks=needs_version(18)),
        pytest.param("computed, and sent", "1GiB", marks=[pytest.mark.slow, needs_version(18)]),
    ],
)
def test_a_copy_of_a_quiet_table_has_the_columns_that_the_stream_sends(
    tmp_path: Path, database: str, name: str, beside: str
) -> None:
    kind = KINDS[name]
    held = chunked(tmp_path, database, kind, beside)
    held.copy()
    with Running(held) as running:
        running.until(lambda: [s.state for s in held.log.schemas().values()] == [TableState.LIVE])
        found = folded(held, TableName("public", "t"))
        told_again(database, TableName("public", "t"))
        running.caught_up()
    assert found
    assert found == held.folded("t")


@pytest.mark.parametrize(
    ("first", "last"),
    [(30, 150), *(pytest.param(*ends, marks=pytest.mark.slow) for ends in ((None, 77), (77, None), (5, 5)))],
)
def test_a_range_of_odd_keys_is_read_whole_with_both_its_ends(
    tmp_path: Path, oldest: str, first: int | None, last: int | None
) -> None:
    run_sql(oldest, *ODD_KEYS)
    held = Captured(tmp_path, oldest)
    with held.path.open("a") as definition:
        definition.write("snapshot: {mode: no_data, chunk_rows: 7}\n")
    held.copy()
    keys = [tuple(row) for row in rows_of(oldest, f"SELECT {KEY} FROM t ORDER BY name, n, u, d")]
    ends = None if first is None else keys[first], None if last is None else keys[last]
    script = Script(oldest, ("UPDATE t SET v = 'short' WHERE d <> 'infinity'", "DELETE FROM t WHERE name = 'Z'"))
    with Running(held, Moments(opened=script, in_hand=lambda _: script())) as running:
        job = running.ended(running.ask(BackfillRequest(("public.t",), first=ends[0], last=ends[1])))
        assert job.state == "done", job.result
        running.caught_up()
    meant = set(keys[first : None if last is None else last + 1])
    read = {tuple(row["key"]) for row in read_rows(held)}
    true = {tuple(row) for row in rows_of(oldest, f"SELECT {KEY}, v, long FROM t")}
    assert read <= meant
    told = {(row[2], row[5], row[3], row[0], row[1], row[4]) for row in held.folded("t")}
    assert {row for row in told if row[:4] in meant} == {row for row in true if row[:4] in meant}
