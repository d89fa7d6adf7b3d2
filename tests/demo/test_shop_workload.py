"""The workload writes the same rows for the same seed; its SQL files name each statement once, and all are used."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from psycopg import sql

from cdc.demo.shop_workload import Workload, WorkloadCounters, make_shop, named_statements, script, script_text
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from tests.fixtures.postgres import fresh_database, rows_of

TABLES = ("carts", "customers", "events", "notes", "order_items", "orders", "products")
VARYING = ("joined_at", "placed_at", "changed_at", "edited_at", "recorded_at", "at")


@pytest.fixture(name="other_database")
def _other_database(postgres: EmbeddedPostgres) -> Iterator[str]:
    yield from fresh_database(postgres)


def contents(dsn: str) -> dict[str, list[str]]:
    """Rows of the shop as JSON without times, by table."""
    query = "SELECT (to_jsonb(t) - %s::text[])::text FROM shop.{} t ORDER BY 1"
    with connect(dsn) as conn:
        return {
            table: [row for (row,) in conn.execute(sql.SQL(query).format(sql.Identifier(table)), [list(VARYING)])]
            for table in TABLES
        }


def run(dsn: str, transactions: int, seed: int) -> WorkloadCounters:
    workload = Workload(dsn, seed=seed)
    workload.run(transactions)
    return workload.stop()


def test_the_same_seed_writes_the_same_rows(database: str, other_database: str) -> None:
    for dsn in (database, other_database):
        make_shop(dsn)

    assert run(database, 30, seed=3) == run(other_database, 30, seed=3)
    assert contents(database) == contents(other_database)


def test_the_schema_change_adds_a_column_to_the_orders(database: str) -> None:
    make_shop(database)
    workload = Workload(database)
    workload.alter()
    written = workload.stop()

    assert (written.transactions, written.altered) == (1, True)
    column = "SELECT count(*) FROM pg_attribute WHERE attrelid = 'shop.orders'::regclass AND attname = 'gift_note'"
    assert rows_of(database, column) == [(1,)]


def test_every_statement_of_the_workload_is_used_by_it() -> None:
    used = set(re.findall(r'_do\(\s*"(\w+)"', script_text("shop_workload.py")))

    assert used == set(named_statements("workload"))


def test_every_statement_of_the_closing_is_used_by_it() -> None:
    used = set(re.findall(r'_run\(\s*"(\w+)"', script_text("sink_steps.py")))

    assert used == set(named_statements("closing"))


def test_names_are_unique_and_statements_are_not_empty() -> None:
    assert len(named_statements("workload")) == script_text("workload.sql").count("-- name:")
    assert all(named_statements("workload").values())


@pytest.mark.parametrize("name", ["shop", "seed", "workload", "closing"])
def test_a_file_begins_with_a_line_of_its_purpose(name: str) -> None:
    assert re.match(rb"-- [A-Z][^\n]{20,}\n", script(name))
