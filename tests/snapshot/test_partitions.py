"""Partitions come, go and move: every table is exact in the log, or marked, and a resync repairs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import LiteralString

import pytest

from cdc.snapshot.backfill_documents import BACKFILL, BackfillRequest
from cdc.snapshot.reader_commands import CHECK_TABLES
from cdc.table import TableSchema, TableState
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql
from tests.snapshot.reader_with_backfills import Running

COLUMNS: LiteralString = "(id int, r int, v text, PRIMARY KEY (id, r))"
TABLES: tuple[LiteralString, ...] = (
    f"CREATE TABLE t {COLUMNS} PARTITION BY LIST (r)",
    "CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1)",
    "CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2, 3) PARTITION BY LIST (r)",
    "CREATE TABLE t2a PARTITION OF t2 FOR VALUES IN (2)",
    "CREATE TABLE t2b PARTITION OF t2 FOR VALUES IN (3)",
    f"CREATE TABLE u {COLUMNS} PARTITION BY LIST (r)",
    "CREATE TABLE u7 PARTITION OF u FOR VALUES IN (7)",
    f"CREATE TABLE alone {COLUMNS}",
    f"CREATE TABLE tree {COLUMNS} PARTITION BY LIST (r)",
    "CREATE TABLE tree5 PARTITION OF tree FOR VALUES IN (5)",
    "INSERT INTO t SELECT i, 1 + i % 3, 'old' FROM generate_series(1, 9) i",
    "INSERT INTO u VALUES (70, 7, 'old')",
    "INSERT INTO alone VALUES (40, 4, 'old'), (41, 4, 'old'), (45, 4, 'old')",
    "INSERT INTO tree VALUES (50, 5, 'old'), (51, 5, 'old'), (52, 5, 'old')",
)


@dataclass(frozen=True, slots=True)
class Move:
    """Statements, the tables that they leave marked, those that are partitions then, and those that are new.

    Seen between are those that may be met in the stream as tables of their own.
    """

    run: tuple[LiteralString, ...]
    marked: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    new: frozenset[str] = frozenset()
    seen_between: frozenset[str] = frozenset()


MOVES = {
    "a captured table is attached": Move(
        (
            "ALTER TABLE t ATTACH PARTITION alone FOR VALUES IN (4)",
            "INSERT INTO t VALUES (42, 4, 'new')",
            "UPDATE t SET v = 'set' WHERE id = 40",
            "DELETE FROM t WHERE id = 41",
        ),
        marked=frozenset({"t"}),
        gone=frozenset({"alone"}),
    ),
    "a captured tree is attached": Move(
        (
            "ALTER TABLE t ATTACH PARTITION tree FOR VALUES IN (5, 6)",
            "UPDATE t SET v = 'set' WHERE id = 50",
            "DELETE FROM t WHERE id = 51",
        ),
        marked=frozenset({"t"}),
        gone=frozenset({"tree"}),
    ),
    "a leaf is detached": Move(
        ("ALTER TABLE t DETACH PARTITION t1", "INSERT INTO t1 VALUES (60, 1, 'new')"),
        marked=frozenset({"t"}),
        new=frozenset({"t1"}),
    ),
    "a tree is detached": Move(
        ("ALTER TABLE t DETACH PARTITION t2", "INSERT INTO t2 VALUES (60, 2, 'new')"),
        marked=frozenset({"t"}),
        new=frozenset({"t2"}),
    ),
    "a leaf is dropped": Move(("DROP TABLE t1",), marked=frozenset({"t"})),
    "a leaf of a tree is dropped": Move(("DROP TABLE t2a",), marked=frozenset({"t"})),
    "a leaf of a tree is truncated": Move(("TRUNCATE t2b",), marked=frozenset({"t"})),
    "a leaf is detached, loaded and attached again": Move(
        (
            "ALTER TABLE t DETACH PARTITION t1",
            "INSERT INTO t1 VALUES (60, 1, 'loaded')",
            "ALTER TABLE t ATTACH PARTITION t1 FOR VALUES IN (1)",
        ),
        marked=frozenset({"t"}),
        seen_between=frozenset({"t1"}),
    ),
    "a tree is detached, loaded and attached again": Move(
        (
            "ALTER TABLE t DETACH PARTITION t2",
            "DELETE FROM t2 WHERE r = 3",
            "ALTER TABLE t ATTACH PARTITION t2 FOR VALUES IN (2, 3)",
        ),
        marked=frozenset({"t"}),
        seen_between=frozenset({"t2"}),
    ),
    "a leaf moves to another root": Move(
        (
            "ALTER TABLE t DETACH PARTITION t1",
            "ALTER TABLE u ATTACH PARTITION t1 FOR VALUES IN (1)",
            "UPDATE u SET v = 'set' WHERE r = 1 AND id <> 9",
        ),
        marked=frozenset({"t", "u"}),
    ),
    "a leaf moves to another root, and all its rows are written there": Move(
        (
            "ALTER TABLE t DETACH PARTITION t1",
            "ALTER TABLE u ATTACH PARTITION t1 FOR VALUES IN (1)",
            "UPDATE u SET v = 'set' WHERE r = 1 AND id <> 9",
            "DELETE FROM u WHERE id = 9",
        ),
        marked=frozenset({"t"}),
    ),
    "a leaf moves down the tree": Move(
        (
            "ALTER TABLE t2 DETACH PARTITION t2a",
            "ALTER TABLE tree ATTACH PARTITION t2a FOR VALUES IN (2)",
            "DELETE FROM tree WHERE r = 2 AND id > 1",
        ),
        marked=frozenset({"t", "tree"}),
    ),
    "an empty tree is added": Move(
        (
            "CREATE TABLE t8 PARTITION OF t FOR VALUES IN (8, 9) PARTITION BY LIST (r)",
            "CREATE TABLE t8a PARTITION OF t8 FOR VALUES IN (8)",
            "INSERT INTO t VALUES (80, 8, 'new')",
        ),
    ),
}
PUBLICATIONS: dict[str, LiteralString | None] = {
    "created by the reader": None,
    "all tables": "CREATE PUBLICATION own FOR ALL TABLES WITH (publish_via_partition_root)",
}
QUICK = {
    "created by the reader": {"a leaf moves to another root"},
    "all tables": {"a leaf of a tree is truncated"},
}
"""Publication → the moves of the default run: a change of the root, and rows that go without a word in the stream.

The last test attaches a captured table and detaches it.
"""


def captured(folder: Path, dsn: str, publication: LiteralString | None) -> Captured:
    run_sql(dsn, *TABLES, *(() if publication is None else (publication,)))
    held = Captured(folder, dsn)
    if publication is not None:
        held.write(slot=held.slot, more="  publication: {name: own}\n")
    held.copy()
    return held


def versions(held: Captured) -> dict[str, TableSchema]:
    """Of each name the table that is captured, else one that was."""
    found = sorted(held.log.schemas().values(), key=lambda schema: schema.state is not TableState.DROPPED)
    return {schema.name: schema for schema in found}


def in_state(held: Captured, state: TableState) -> set[str]:
    return {name for name, schema in versions(held).items() if schema.state is state}


def is_exact(held: Captured, table: str) -> bool:
    return held.folded(table) == sorted(rows_of(held.dsn, f"SELECT id::text, r::text, v FROM {table}"))  # type: ignore[arg-type]


def has_settled(held: Captured, running: Running, move: Move) -> bool:
    """Whether the log says of every table what has become of it; each mark is written with the next transaction."""
    running.caught_up()
    live = {"t", "u", "alone", "tree"} - move.marked - move.gone | move.new
    return (
        in_state(held, TableState.NEEDS_RESYNC) == move.marked
        and in_state(held, TableState.DROPPED) - move.seen_between == move.gone
        and in_state(held, TableState.LIVE) == live
    )


@pytest.mark.parametrize(
    ("publication", "name"),
    [
        (publication, name)
        if name in QUICK.get(publication, ())
        else pytest.param(publication, name, marks=pytest.mark.slow)
        for publication in PUBLICATIONS
        for name in MOVES
    ],
)
@pytest.mark.parametrize("while_it_runs", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_whatever_partitions_do_every_table_is_exact_or_marked_and_a_resync_repairs_it(
    tmp_path: Path, database: str, publication: str, name: str, *, while_it_runs: bool
) -> None:
    move = MOVES[name]
    held = captured(tmp_path, database, PUBLICATIONS[publication])
    if while_it_runs:
        with held.reading() as reading:
            run_sql(database, *move.run)
            reading.caught_up()
    else:
        run_sql(database, *move.run)
    with Running(held) as running:
        running.ended(running.catalog.commands.post("held", CHECK_TABLES, {}))
        running.until(lambda: has_settled(held, running, move), "the marks")
        for table in move.marked:
            assert running.ended(running.ask(BackfillRequest((f"public.{table}",), resync=True))).state == "done"
        running.caught_up()

    assert in_state(held, TableState.NEEDS_RESYNC) == set()
    assert in_state(held, TableState.DROPPED) - move.seen_between == move.gone
    assert {table: is_exact(held, table) for table in in_state(held, TableState.LIVE)} == dict.fromkeys(
        in_state(held, TableState.LIVE), True
    )
    assert all("partition now of public." in (versions(held)[table].reason or "") for table in move.gone)


def test_a_table_that_is_attached_and_detached_again_is_captured_as_a_new_one(tmp_path: Path, database: str) -> None:
    held = captured(tmp_path, database, None)
    run_sql(database, *MOVES["a captured table is attached"].run)
    with Running(held) as running:
        running.until(lambda: has_settled(held, running, MOVES["a captured table is attached"]))
    run_sql(database, "ALTER TABLE t DETACH PARTITION alone", "INSERT INTO alone VALUES (43, 4, 'own')")
    with Running(held) as running:
        running.ended(running.catalog.commands.post("held", CHECK_TABLES, {}))
        running.until(lambda: "alone" in in_state(held, TableState.LIVE))
        assert {command.state for command in running.catalog.commands.ls("held", BACKFILL)} <= {"done"}
        run_sql(database, "UPDATE alone SET v = 'last'")
        running.caught_up()
    assert is_exact(held, "alone")
