"""compare_tables: which differences between a new cluster and the log are found, and which tables are not compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import LiteralString, NoReturn

import pytest

from cdc.capture.source_move import open_new_cluster
from cdc.postgres.embedded_server import EmbeddedPostgres
from pipelines.verification.moved_tables import MovedTable, compare_tables
from tests.fixtures.moving_source import CHANGES, ROWS, SCHEMA, MovingSource
from tests.fixtures.postgres import fresh_database, run_sql


@pytest.fixture(name="new")
def _new(another_cluster: EmbeddedPostgres) -> Iterator[str]:
    """Another cluster."""
    yield from fresh_database(another_cluster)


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> MovingSource:
    held = MovingSource(tmp_path, database)
    held.begin()
    return held


def no_spark() -> NoReturn:
    raise AssertionError("small tables are folded without Spark")


def compared(held: MovingSource, new: str) -> dict[str, MovedTable]:
    """By name of the table."""
    moved = held.definition.model_copy(update={"source": held.definition.source.moved_to(new)})
    with open_new_cluster(moved, held.log, check=True) as cluster:
        return {table.topic.partition(".")[2]: table for table in compare_tables(cluster, held.log, no_spark)}


def test_equal_rows_are_equal_in_any_order_of_columns(held: MovingSource, new: str) -> None:
    run_sql(new, "CREATE TABLE t (seen timestamptz, v text, id int PRIMARY KEY, part numeric(8,2))", *SCHEMA[1:])
    run_sql(new, ROWS[0].replace("INTO t", "INTO t (id, v, part)"), *ROWS[1:], *CHANGES)  # type: ignore[arg-type]
    found = compared(held, new)
    assert {name for name, table in found.items() if table.equal} == {"t", "bag", "quiet"}
    assert {name: table.rows for name, table in found.items()} == {"t": 258, "bag": 28, "quiet": 9}


DIFFERENCES: tuple[tuple[LiteralString, str, str], ...] = (
    (
        "UPDATE t SET part = part + 0.01 WHERE id = 11",
        "t",
        "0 rows are only on the new server, 0 only in the log, and 1",
    ),
    ("UPDATE t SET id = -11 WHERE id = 11", "t", "1 rows are only on the new server, 1 only in the log, and 0"),
    ("INSERT INTO bag SELECT * FROM bag LIMIT 1", "bag", "1 rows are only on the new server, 0 only"),
    ("ALTER TABLE t DROP COLUMN seen", "t", "the log has columns"),
    ("ALTER TABLE quiet ADD COLUMN x int", "quiet", "the log has columns"),
    ("ALTER TABLE t DROP CONSTRAINT t_pkey, REPLICA IDENTITY FULL", "t", "the new server has another key"),
    ("DROP TABLE quiet", "quiet", "the new server does not have the table"),
)


def test_each_difference_is_found(held: MovingSource, another_cluster: EmbeddedPostgres) -> None:
    for statement, table, says in DIFFERENCES:
        for new in fresh_database(another_cluster):
            run_sql(new, *SCHEMA, *ROWS, *CHANGES, statement)
            found = compared(held, new)
            assert says in found[table].reason
            assert [name for name, one in found.items() if one.compared and not one.equal] == [table], statement


def test_a_value_that_older_rows_have_only_at_the_former_server_is_a_difference(held: MovingSource, new: str) -> None:
    run_sql(held.dsn, "ALTER TABLE quiet ADD note text DEFAULT 'old'", "INSERT INTO quiet VALUES (10, 'new')")
    held.stream()
    run_sql(new, *SCHEMA[:-1], "CREATE TABLE quiet (id int PRIMARY KEY, note text DEFAULT 'old')", *ROWS, *CHANGES)
    run_sql(new, "INSERT INTO quiet VALUES (10, 'new')")
    assert "does not know the value of columns ['note'] in older rows" in compared(held, new)["quiet"].reason

    run_sql(new, "DROP TABLE quiet", SCHEMA[-1], ROWS[-1], "ALTER TABLE quiet ADD note text DEFAULT 'old'")
    run_sql(new, "INSERT INTO quiet VALUES (10, 'new')")
    assert compared(held, new)["quiet"].equal
