"""Every kind of publication passes the same capture, and one that the reader did not create stays as it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import LiteralString

import pytest

from cdc.capture.startup_checks import check_log
from cdc.errors import PreflightFailed, PublicationByPartition
from cdc.postgres.connection import connect
from cdc.postgres.preflight import SourceRequirements, preflight
from cdc.snapshot.reader_commands import CHECK_TABLES
from cdc.table import TableState
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql
from tests.snapshot.reader_with_backfills import Running

TABLES: tuple[LiteralString, ...] = (
    'CREATE SCHEMA "Odd"',
    "CREATE TABLE plain (id int PRIMARY KEY, v text, extra text)",
    'CREATE TABLE "Odd"."T t" (id int PRIMARY KEY, v text)',
    "CREATE TABLE p (id int, r int, v text, PRIMARY KEY (id, r)) PARTITION BY LIST (r)",
    "CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1)",
    "CREATE TABLE p2 PARTITION OF p FOR VALUES IN (2, 3) PARTITION BY LIST (r)",
    "CREATE TABLE p2a PARTITION OF p2 FOR VALUES IN (2)",
    "INSERT INTO plain SELECT i, 'old', 'x' FROM generate_series(1, 9) i",
    "INSERT INTO plain SELECT i, 'old', 'x' FROM generate_series(101, 104) i",
    """INSERT INTO "Odd"."T t" VALUES (1, 'old'), (2, 'old')""",
    "INSERT INTO p SELECT i, 1 + i %% 2, 'old' FROM generate_series(1, 9) i".replace("%%", "%"),
)
CHANGES: tuple[tuple[LiteralString, ...], ...] = (
    (
        "INSERT INTO plain VALUES (10, 'new', 'y'), (110, 'new', 'y')",
        "UPDATE plain SET v = 'set' WHERE id IN (1, 101)",
        "UPDATE plain SET extra = 'unsent' WHERE id = 2",
        "DELETE FROM plain WHERE id IN (3, 102)",
        "BEGIN; UPDATE plain SET id = 105 WHERE id = 5; UPDATE plain SET id = 5, v = 'back' WHERE id = 104; COMMIT",
        """UPDATE "Odd"."T t" SET v = 'set' WHERE id = 1""",
        "INSERT INTO p VALUES (20, 1, 'new'), (21, 2, 'new')",
        "INSERT INTO p1 VALUES (22, 1, 'by its leaf')",
        "UPDATE p SET r = 2 WHERE id = 2",
        "DELETE FROM p WHERE id = 4",
    ),
    (
        'TRUNCATE "Odd"."T t"',
        """INSERT INTO "Odd"."T t" VALUES (7, 'later')""",
        "CREATE TABLE p2b PARTITION OF p2 FOR VALUES IN (3)",
        "UPDATE p SET r = 3, v = 'moved' WHERE id = 6",
        "INSERT INTO p VALUES (30, 3, 'new')",
        "UPDATE plain SET v = NULL WHERE id = 9",
    ),
)

EVERY: LiteralString = "SELECT id::text, v, extra FROM plain"


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to publish: what makes it, and what it sends of `plain`."""

    made: LiteralString | None
    plain: LiteralString = EVERY
    partitioned: bool = True


KINDS = {
    "created by the reader": Kind(None),
    "all tables": Kind("CREATE PUBLICATION own FOR ALL TABLES WITH (publish_via_partition_root)"),
    "all tables by leaf": Kind("CREATE PUBLICATION own FOR ALL TABLES", partitioned=False),
    "schemas": Kind(
        'CREATE PUBLICATION own FOR TABLES IN SCHEMA public, "Odd" WITH (publish_via_partition_root)',
    ),
    "schemas by leaf": Kind('CREATE PUBLICATION own FOR TABLES IN SCHEMA public, "Odd"', partitioned=False),
    "listed": Kind('CREATE PUBLICATION own FOR TABLE plain, p, "Odd"."T t" WITH (publish_via_partition_root)'),
    "listed by leaf": Kind('CREATE PUBLICATION own FOR TABLE plain, p1, p2, "Odd"."T t"', partitioned=False),
    "row filters": Kind(
        'CREATE PUBLICATION own FOR TABLE plain WHERE (id < 100), p, "Odd"."T t" WITH (publish_via_partition_root)',
        "SELECT id::text, v, extra FROM plain WHERE id < 100",
    ),
    "column lists": Kind(
        'CREATE PUBLICATION own FOR TABLE plain (id, v), p, "Odd"."T t" (id, v) WITH (publish_via_partition_root)',
        "SELECT id::text, v FROM plain",
    ),
}
SERVERS = ("postgres", pytest.param("postgres_16", marks=pytest.mark.slow))


@pytest.fixture(params=SERVERS, name="source")
def _source(request: pytest.FixtureRequest) -> str:
    dsn: str = request.getfixturevalue("database" if request.param == "postgres" else "database_16")
    run_sql(dsn, *TABLES)
    return dsn


def captured(folder: Path, source: str, kind: Kind) -> Captured:
    """A pipeline over the publication of that kind, which asks for what it sends."""
    if kind.made is not None:
        run_sql(source, kind.made)
    held = Captured(folder, source)
    own = "" if kind.made is None else "  publication: {name: own}\n"
    rule = "tables: [{match: '*.*'}]" if kind.partitioned else "tables: [{match: '*.*', exclude: [public.p]}]"
    held.write(slot=held.slot, more=own)
    held.path.write_text(held.path.read_text().replace("tables: [{match: 'public.*'}]", rule))
    return held


def sent_and_folded(held: Captured, kind: Kind) -> tuple[dict[str, list[tuple[str | None, ...]]], ...]:
    """The rows that the publication sends of each table, and those of the log."""
    queries: dict[str, LiteralString] = {"plain": kind.plain, "T t": 'SELECT id::text, v FROM "Odd"."T t"'}
    if kind.partitioned:
        queries["p"] = "SELECT id::text, r::text, v FROM p"
    expected: dict[str, list[tuple[str | None, ...]]] = {
        name: sorted(rows_of(held.dsn, query), key=repr) for name, query in queries.items()
    }
    return expected, {name: sorted(held.folded(name), key=repr) for name in queries}


def publications(dsn: str) -> list[tuple[str, ...]]:
    """What an ALTER of one would change."""
    return rows_of(dsn, "SELECT oid::text, xmin::text FROM pg_publication UNION ALL "
                        "SELECT oid::text, xmin::text FROM pg_publication_rel ORDER BY 1, 2")  # fmt: skip


QUICK = {"all tables by leaf", "row filters"}
"""Kinds of the default run; test_partitions has the reader's own publication, test_copy_of_kinds a column list."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in KINDS]
)
def test_every_kind_of_publication_is_captured_exactly(tmp_path: Path, source: str, name: str) -> None:
    kind = KINDS[name]
    held = captured(tmp_path, source, kind)
    before = publications(source)
    held.copy()
    for changes in CHANGES:
        check_log(held.definition)
        with Running(held) as running:
            run_sql(source, *changes)
            done = running.ended(running.catalog.commands.post("held", CHECK_TABLES, {}))
            running.caught_up()
            assert (done.result or {})["refused"] == {}

    expected, found = sent_and_folded(held, kind)
    assert found == expected
    assert {schema.state for schema in held.log.schemas().values()} == {TableState.LIVE}
    assert {schema.name for schema in held.log.schemas().values()} == set(expected)
    assert kind.made is None or publications(source) == before


def test_a_partitioned_table_that_is_published_by_leaf_is_refused_with_the_sql(tmp_path: Path, source: str) -> None:
    for kind in (kind for kind in KINDS.values() if not kind.partitioned):
        run_sql(source, "DROP PUBLICATION IF EXISTS own")
        held = captured(tmp_path, source, kind)
        before = publications(source)
        problems = preflight(source, SourceRequirements("pre", "own", ["public.p", "public.plain"]))
        found = {problem.subject: problem.sql for problem in problems if problem.fatal}
        assert found["public.p"] == 'ALTER PUBLICATION "own" SET (publish_via_partition_root = true);'
        held.path.write_text(held.path.read_text().replace("exclude: [public.p]", "exclude: []"))
        with pytest.raises(PreflightFailed, match=r"public\.p"):
            held.copy()
        assert publications(source) == before


def test_a_publication_that_begins_to_publish_by_leaf_stops_the_reader_and_its_sql_repairs_it(
    tmp_path: Path, source: str
) -> None:
    kind = KINDS["all tables"]
    held = captured(tmp_path, source, kind)
    held.copy()
    run_sql(source, "ALTER PUBLICATION own SET (publish_via_partition_root = false)")
    run_sql(source, "INSERT INTO p VALUES (40, 1, 'by leaf')")
    with pytest.raises(PublicationByPartition, match=r"own.*public\.p ") as stopped:
        check_log(held.definition)
    with connect(source) as conn:
        conn.execute(stopped.value.fix.removeprefix("run ").partition(";")[0])  # type: ignore[arg-type]
    with Running(held) as running:

        def is_marked() -> bool:
            running.caught_up()  # a mark is written with the next transaction
            return {TableState.NEEDS_RESYNC} == {s.state for s in held.log.schemas().values() if s.name == "p"}

        running.until(is_marked, "the mark of what was sent under the names of leaves")


def test_a_publication_of_somebody_else_is_altered_only_if_the_definition_says_so(tmp_path: Path, source: str) -> None:
    run_sql(source, "CREATE PUBLICATION own FOR TABLE plain")
    held = Captured(tmp_path, source)
    slot, before = held.slot, publications(source)
    for manage in ("auto", "never"):
        held.write(slot=slot, more=f"  publication: {{name: own, manage: {manage}}}\n")
        with pytest.raises(PreflightFailed, match="this pipeline may not alter it"):
            held.copy()
        assert publications(source) == before
    held.write(slot=slot, more="  publication: {name: own, manage: always}\n")
    held.copy()
    assert publications(source) != before
