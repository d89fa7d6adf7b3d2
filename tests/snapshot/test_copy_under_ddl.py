"""First copies of tables that are altered meanwhile: exact in the end, or marked, and never falsified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

import pytest
from psycopg import sql

from cdc.postgres.connection import connect
from cdc.snapshot.backfill_documents import BACKFILL, BackfillAction, BackfillRequest
from cdc.table import TableSchema, TableState
from tests.faults.capture import Captured, fold
from tests.fixtures.postgres import run_sql
from tests.snapshot.reader_with_backfills import Running

SLOWLY = "snapshot: {beside: 0, chunk_rows: 50, parallel: 2, max_source_load: {bytes_per_second: %s}}\n"
QUICK = {"renamed, another in its place"}
"""test_chunk_plan copies a rewritten table again, postgres/test_column_identity.py exchanges names of columns."""
PLAIN: tuple[LiteralString, ...] = (
    "CREATE TABLE t (id int PRIMARY KEY, a text, b text, n int, pad text)",
    "INSERT INTO t SELECT i, 'a' || i, 'b' || i, i, repeat('p', 1000) FROM generate_series(1, 250) i",
)
TOUCH: LiteralString = "UPDATE t SET n = n + 1 WHERE id % 100 = 0"


TABLE: LiteralString = """
    SELECT n.nspname, c.relname, c.relkind FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE c.oid = %s
"""
COLUMNS: LiteralString = """
    SELECT attnum, attname FROM pg_attribute
    WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
"""


@dataclass(frozen=True)
class Case:
    """What is there, and what happens while half of it is copied."""

    setup: tuple[LiteralString, ...]
    during: tuple[LiteralString, ...]


CASES = {
    "add column": Case(PLAIN, ("ALTER TABLE t ADD c text", "UPDATE t SET c = 'c' WHERE id % 50 = 0")),
    "add column with default": Case(PLAIN, ("ALTER TABLE t ADD c text DEFAULT 'd'", TOUCH)),
    "add column, silent": Case(PLAIN, ("ALTER TABLE t ADD c text DEFAULT 'd'",)),
    "drop column": Case(PLAIN, ("ALTER TABLE t DROP b", TOUCH)),
    "drop column, silent": Case(PLAIN, ("ALTER TABLE t DROP b",)),
    "rename column": Case(PLAIN, ("ALTER TABLE t RENAME b TO c", TOUCH)),
    "rename column, silent": Case(PLAIN, ("ALTER TABLE t RENAME b TO c",)),
    "names of columns exchanged": Case(
        PLAIN, ("BEGIN; ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b; COMMIT",)
    ),
    "names of columns exchanged, then written": Case(
        PLAIN,
        (
            "BEGIN; ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b; COMMIT",
            TOUCH,
        ),
    ),
    "column made anew": Case(PLAIN, ("BEGIN; ALTER TABLE t DROP b; ALTER TABLE t ADD b text; COMMIT",)),
    "column made anew, then written": Case(
        PLAIN, ("BEGIN; ALTER TABLE t DROP b; ALTER TABLE t ADD b text; COMMIT", TOUCH)
    ),
    "type rewritten": Case(
        PLAIN, ("ALTER TABLE t ALTER n TYPE text USING 'n' || n", "UPDATE t SET n = 'x' WHERE id = 7")
    ),
    "type rewritten, silent": Case(PLAIN, ("ALTER TABLE t ALTER n TYPE text USING 'n' || n",)),
    "value rewritten": Case(PLAIN, ("ALTER TABLE t ALTER n TYPE int USING n + 1000",)),
    "vacuum full": Case(PLAIN, ("DELETE FROM t WHERE id % 3 = 0", "VACUUM FULL t", TOUCH)),
    "cluster": Case(PLAIN, ("UPDATE t SET id = 1000 - id", "CLUSTER t USING t_pkey", TOUCH)),
    "truncate": Case(PLAIN, ("TRUNCATE t",)),
    "truncate, then filled": Case(PLAIN, ("TRUNCATE t", PLAIN[1], "DELETE FROM t WHERE id > 200")),
    "truncate twice": Case(PLAIN, ("BEGIN; TRUNCATE t; INSERT INTO t VALUES (1); TRUNCATE t; COMMIT", PLAIN[1])),
    "dropped": Case(PLAIN, ("DROP TABLE t",)),
    "dropped and made anew": Case(PLAIN, ("DROP TABLE t", *PLAIN)),
    "renamed": Case(PLAIN, ("ALTER TABLE t RENAME TO u",)),
    "renamed, another in its place": Case(
        (*PLAIN, "CREATE TABLE z (LIKE t INCLUDING ALL)", "INSERT INTO z SELECT id, 'wrong', 'wrong' FROM t"),
        ("BEGIN; ALTER TABLE t RENAME TO u; ALTER TABLE z RENAME TO t; COMMIT",),
    ),
    "moved to another schema": Case(PLAIN, ("CREATE SCHEMA other", "ALTER TABLE t SET SCHEMA other")),
    "key changed to another column": Case(
        PLAIN,
        ("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (n)", "UPDATE t SET n = n + 1000 WHERE id % 100 = 0"),
    ),
}


class Slow:
    """A database whose tables are copied no faster than one can interfere."""

    def __init__(self, folder: Path, dsn: str, setup: tuple[LiteralString, ...], rate: int = 125_000) -> None:
        run_sql(dsn, *setup)
        self.held = Captured(folder, dsn)
        with self.held.path.open("a") as definition:
            definition.write(SLOWLY % rate)

    def halfway(self, running: Running, *during: LiteralString) -> int:
        """Do it in the middle of the copy; gives the job."""
        job = running.until(lambda: begun(running))
        running.catalog.commands.post("held", BackfillAction.PAUSE.kind, {"id": job})
        running.until(lambda: running.state(job) == "paused")
        run_sql(self.held.dsn, *during)
        running.catalog.commands.post("held", BackfillAction.RESUME.kind, {"id": job})
        return job

    def schemas(self) -> list[TableSchema]:
        """Of the log, those that are not dropped."""
        return [s for s in self.held.log.schemas().values() if s.state is not TableState.DROPPED]

    def wrong(self) -> dict[str, Any]:
        """What of the log, of tables that are not marked, is not as at the source: (state, missing, surplus)."""
        found = {}
        for schema in self.schemas():
            if schema.state is TableState.NEEDS_RESYNC:
                continue
            told, truth = self.told_and_true(schema)
            if schema.state is not TableState.LIVE or told != truth:
                found[schema.topic] = schema.state.value, without(truth, told)[:2], without(told, truth)[:2]
        return found

    def told_and_true(self, schema: TableSchema) -> tuple[list[tuple[str | None, ...]], list[tuple[str | None, ...]]]:
        """Rows as the log tells them and as they are, columns that both have, whatever table and columns are called."""
        with connect(self.held.dsn) as conn:
            names: dict[int, str] = dict(conn.execute(COLUMNS, [schema.oid]).fetchall())
            both = [column for column in schema.columns if column.id in names]
            table = conn.execute(TABLE, [schema.oid]).fetchone()
            images = fold(self.held.log, schema.relation)
            told = [tuple(image.get(column.id, column.missing) for column in both) for image in images]
            if table is None:
                return told, []
            only = sql.SQL("" if table[2] == "p" else "ONLY ")
            columns = sql.SQL(", ").join([sql.SQL("{}::text").format(sql.Identifier(names[c.id])) for c in both])
            query = sql.SQL("SELECT {} FROM {}{}").format(columns, only, sql.Identifier(*table[:2]))
            return sorted(told, key=repr), sorted(conn.execute(query), key=repr)


def without(some: list[Any], others: list[Any]) -> list[Any]:
    """Those that are not among the others."""
    return [row for row in some if row not in others]


def begun(running: Running) -> int | None:
    """The first copy's job, once it has placed rows."""
    for command in running.catalog.commands.ls("held", BACKFILL):
        tables = (command.result or {}).get("tables", {})
        assert command.state == "pending", command.result
        if any(table["rows"] for table in tables.values()):
            return command.id
    return None


def settled(slow: Slow, holds: Callable[[], object]) -> None:
    """Let a new session look at the catalogue, and wait until it holds."""
    with Running(slow.held) as running:

        def moved() -> object:  # what a look finds goes along with the stream
            running.caught_up()
            return holds()

        running.until(moved)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_a_table_altered_while_it_is_copied_ends_exact_or_marked(tmp_path: Path, database: str, name: str) -> None:
    slow = Slow(tmp_path, database, CASES[name].setup)
    with Running(slow.held) as running:
        running.ended(slow.halfway(running, *CASES[name].during))
        running.caught_up()
    settled(slow, lambda: not slow.wrong())


def test_a_column_that_is_no_longer_computed_is_marked_and_a_resync_brings_its_old_values(
    tmp_path: Path, database: str
) -> None:
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, b int, g int GENERATED ALWAYS AS (b * 2) STORED)",
        "INSERT INTO t SELECT i, i FROM generate_series(1, 3) i",
    )
    held = Captured(tmp_path, database)
    held.copy()
    with Running(held) as running:
        run_sql(database, "ALTER TABLE t ALTER g DROP EXPRESSION", "INSERT INTO t VALUES (4, 4, 9)")
        running.caught_up()
        (schema,) = held.log.schemas().values()
        assert (schema.state, "was generated and not sent" in (schema.reason or "")) == (TableState.NEEDS_RESYNC, True)
        assert running.ended(running.ask(BackfillRequest(("public.t",), resync=True))).state == "done"
        running.caught_up()
    assert held.folded("t") == [("1", "1", "2"), ("2", "2", "4"), ("3", "3", "6"), ("4", "4", "9")]
