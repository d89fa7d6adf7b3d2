"""A partition that was attached with rows is told from one that was empty then, by the transactions of its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cdc.postgres.connection import connect
from cdc.postgres.tables import read_schema
from cdc.postgres.unreplicated_changes import check_attached, find_divergence, read_catalog_states
from tests.fixtures.postgres import run_sql

ROOT = "CREATE TABLE root (id int, r int, v text, PRIMARY KEY (id, r)) PARTITION BY LIST (r)"
LEAF = "CREATE TABLE leaf (LIKE root INCLUDING ALL)"
ATTACH = "ALTER TABLE root ATTACH PARTITION leaf FOR VALUES IN (1)"
SUBTREE = "CREATE TABLE part (LIKE root INCLUDING ALL) PARTITION BY LIST (r)"
ATTACH_TO_PART = "ALTER TABLE part ATTACH PARTITION leaf FOR VALUES IN (1)"
ATTACH_PART = "ALTER TABLE root ATTACH PARTITION part FOR VALUES IN (1)"
INTO_LEAF = "INSERT INTO leaf VALUES (1, 1, 'old')"
INTO_ROOT = "INSERT INTO root VALUES (2, 1, 'new'), (3, 1, 'new')"

EMPTY: dict[str, tuple[str, ...]] = {
    "one statement after the other": (LEAF, ATTACH, INTO_ROOT),
    "an altered table": (
        "CREATE TABLE leaf (v text, x int, r int NOT NULL, id int NOT NULL)",
        "ALTER TABLE leaf DROP COLUMN x",
        ATTACH,
        INTO_ROOT,
        "INSERT INTO leaf (id, r) VALUES (4, 1)",
    ),
    "created and attached in one transaction": (f"BEGIN; {LEAF}; {ATTACH}; COMMIT", INTO_ROOT),
    "created, attached and filled in one transaction": (f"BEGIN; {LEAF}; {ATTACH}; {INTO_ROOT}; COMMIT",),
    "in a subtransaction, as a routine that catches errors": (
        f"BEGIN; SAVEPOINT s; {LEAF}; {ATTACH}; RELEASE s; COMMIT",
        INTO_ROOT,
    ),
    "filled in a subtransaction": (LEAF, ATTACH, f"BEGIN; SAVEPOINT s; {INTO_ROOT}; RELEASE s; COMMIT"),
    "emptied before": (LEAF, INTO_LEAF, "DELETE FROM leaf", ATTACH, INTO_ROOT),
    "all older rows written since": (LEAF, INTO_LEAF, ATTACH, "UPDATE root SET v = 'in the stream'"),
    "a subtree": (SUBTREE, LEAF, ATTACH_TO_PART, ATTACH_PART, INTO_ROOT),
    "a row that moved": (
        "CREATE TABLE other PARTITION OF root FOR VALUES IN (2)",
        "INSERT INTO root VALUES (5, 2, 'moves')",
        LEAF,
        ATTACH,
        "UPDATE root SET r = 1 WHERE id = 5",
    ),
}
FILLED: dict[str, tuple[str, ...]] = {
    "one statement after the other": (LEAF, INTO_LEAF, ATTACH),
    "and filled later too": (LEAF, INTO_LEAF, ATTACH, INTO_ROOT),
    "created, filled and attached in one transaction": (f"BEGIN; {LEAF}; {INTO_LEAF}; {ATTACH}; COMMIT", INTO_ROOT),
    "filled in a subtransaction": (f"BEGIN; {LEAF}; SAVEPOINT s; {INTO_LEAF}; RELEASE s; {ATTACH}; COMMIT",),
    "filled in a subtransaction of the one that attaches": (
        LEAF,
        f"BEGIN; SAVEPOINT s; {INTO_LEAF}; RELEASE s; {ATTACH}; COMMIT",
    ),
    "copied with frozen rows": (f"BEGIN; {LEAF}; {INTO_LEAF}; {ATTACH}; COMMIT", "VACUUM FREEZE leaf", INTO_ROOT),
    "a subtree that was filled": (SUBTREE, LEAF, ATTACH_TO_PART, "INSERT INTO part VALUES (1, 1)", ATTACH_PART),
    "a leaf of a subtree": (SUBTREE, LEAF, INTO_LEAF, ATTACH_TO_PART, ATTACH_PART, INTO_ROOT),
}


def divergence(dsn: str, work: Callable[[], None]) -> str | None:
    """What a look at the catalogue says of the partitioned table `root` after the work."""
    with connect(dsn) as conn:
        row = conn.execute("SELECT 'root'::regclass::oid::bigint").fetchone()
        assert row is not None
        oid: int = row[0]
        known = read_schema(conn, oid)
        assert known is not None
        work()
        return find_divergence(known, check_attached(conn, known, read_catalog_states(conn, [oid], None)[oid]))


@pytest.mark.parametrize("name", EMPTY)
def test_a_partition_that_was_attached_empty_and_filled_later_is_no_difference(any_database: str, name: str) -> None:
    run_sql(any_database, ROOT)
    assert divergence(any_database, lambda: run_sql(any_database, *EMPTY[name])) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FILLED)
def test_a_partition_that_was_attached_with_rows_is_a_difference(any_database: str, name: str) -> None:
    run_sql(any_database, ROOT)
    found = divergence(any_database, lambda: run_sql(any_database, *FILLED[name]))  # type: ignore[arg-type]
    assert "attached with rows" in (found or "")


def test_rows_that_the_role_cannot_read_prove_nothing(database: str) -> None:
    run_sql(database, ROOT, "DROP ROLE IF EXISTS reads_root", "CREATE ROLE reads_root LOGIN")
    weak = database.replace("postgres@", "reads_root@")
    found = divergence(weak, lambda: run_sql(database, LEAF, ATTACH, INTO_ROOT))
    assert "attached with rows" in (found or "")
    run_sql(database, "GRANT SELECT ON leaf TO reads_root", "ALTER TABLE leaf ENABLE ROW LEVEL SECURITY")
    run_sql(database, "CREATE TABLE late (LIKE root INCLUDING ALL)", "INSERT INTO late VALUES (7, 7)")
    run_sql(database, "GRANT SELECT ON late TO reads_root", "ALTER TABLE late ENABLE ROW LEVEL SECURITY")
    hidden = divergence(weak, lambda: run_sql(database, "ALTER TABLE root ATTACH PARTITION late FOR VALUES IN (7)"))
    run_sql(database, "DROP OWNED BY reads_root", "DROP ROLE reads_root")
    assert "attached with rows" in (hidden or "")


@dataclass
class History:
    """Two sessions that write to a table, one of which attaches it; it is locked from its creation or ATTACH on."""

    sessions: list[psycopg.Connection[Any]]
    locked_by: int | None
    """The session in whose open transaction the table was created or attached; the other one would wait for its end."""
    attached: bool = False
    rows: int = 0
    written: list[int] = field(default_factory=lambda: [0, 0])
    """How many rows the open transaction of each session has inserted."""
    older: int = 0
    """How many rows were inserted before the ATTACH."""

    def act(self, session: int, action: str) -> None:
        conn = self.sessions[session]
        if action == "commit":
            conn.commit()
            self.written[session] = 0
            self.locked_by = None if self.locked_by == session else self.locked_by
        elif action == "insert elsewhere":
            conn.execute("INSERT INTO elsewhere VALUES (1)")
        elif self.locked_by not in {None, session}:
            return
        elif action == "insert":
            self._insert(session)
        elif action == "insert in a subtransaction":
            conn.execute("SAVEPOINT s")
            self._insert(session)
            conn.execute("RELEASE s")
        elif not self.attached and not self.written[1 - session]:
            conn.execute(ATTACH.encode())
            self.attached, self.locked_by = True, session

    def _insert(self, session: int) -> None:
        self.rows += 1
        target = "root" if self.attached and self.rows % 2 else "leaf"
        self.sessions[session].execute(f"INSERT INTO {target} VALUES ({self.rows}, 1)".encode())
        self.written[session] += 1
        self.older += not self.attached


ACTIONS = ("insert", "insert elsewhere", "insert in a subtransaction", "attach", "commit")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(created_first=st.booleans(), steps=st.lists(st.tuples(st.integers(0, 1), st.sampled_from(ACTIONS)), max_size=12))
@example(  # the transaction of the ATTACH is older than that of the row
    created_first=True,
    steps=[(0, "insert elsewhere"), (1, "insert"), (1, "commit"), (0, "attach"), (0, "commit")],
)
def test_no_row_from_before_the_attachment_is_taken_for_a_newer_one(
    database: str, created_first: bool, steps: list[tuple[int, str]]
) -> None:
    run_sql(database, "DROP TABLE IF EXISTS root, leaf, elsewhere", ROOT, "CREATE TABLE elsewhere (id int)")
    if created_first:
        run_sql(database, LEAF)
    with connect(database, autocommit=False) as first, connect(database, autocommit=False) as second:
        history = History([first, second], None if created_first else 0)

        def work() -> None:
            if not created_first:
                first.execute(LEAF)
            for session, action in [*steps, (0, "commit"), (1, "commit")]:
                history.act(session, action)

        found = divergence(database, work)
    if history.attached and history.older:
        assert "attached with rows" in (found or "")
