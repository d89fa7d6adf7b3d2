"""The catalog in a real Postgres: the same revisions and the same stores as in SQLite."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect

from cdc.catalog import Catalog, DeadLetter, SinkProgress, revision
from cdc.catalog.models import CatalogModel


@pytest.fixture
def url(database: str) -> str:
    """Of a fresh database, as SQLAlchemy writes it."""
    return database.replace("postgresql://", "postgresql+psycopg://", 1)


@pytest.fixture
def catalogs(url: str) -> Iterator[list[Catalog]]:
    """Four that were opened at the same moment on an empty database."""
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: Catalog.open(url), range(4)))
    yield opened
    for catalog in opened:
        catalog.close()


def test_those_who_come_together_make_exactly_the_models(catalogs: list[Catalog]) -> None:
    assert [revision.current(catalog.database) for catalog in catalogs] == [revision.HEAD] * 4
    with catalogs[0].database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert list(compare_metadata(context, CatalogModel.metadata)) == []


def test_back_leaves_nothing(catalogs: list[Catalog]) -> None:
    revision.down(catalogs[0].database, "base")
    assert set(inspect(catalogs[0].database.engine).get_table_names()) <= {"alembic_version"}
    assert revision.current(catalogs[0].database) is None


def test_what_is_kept_again_replaces_what_was(catalogs: list[Catalog]) -> None:
    now = datetime.now(UTC)
    for number, catalog in enumerate(catalogs):
        catalog.pipelines.put("shop", f"definition {number}")
        catalog.sinks.record("shop", SinkProgress("lake", 2**63 - 1 - number, now, 0.5, "streaming"))
    assert [pipeline.definition for pipeline in catalogs[0].pipelines.ls()] == ["definition 3"]
    assert [(sink.position, sink.committed_at) for sink in catalogs[0].sinks.ls("shop")] == [(2**63 - 4, now)]


def test_a_dead_letter_that_comes_twice_at_once_is_kept_once(catalogs: list[Catalog]) -> None:
    letter = DeadLetter(sink="lake", topic="shop.t", key=("1",), position=10, ordinal=0, code="CDC-3001",
                        message="too large", added_at=datetime(2026, 1, 2, tzinfo=UTC))  # fmt: skip
    catalogs[0].dead_letters.mirror("shop", "lake", [letter, letter])
    assert catalogs[1].dead_letters.ls("shop") == [letter]


def test_one_of_many_gets_a_lease_and_no_command_is_lost(catalogs: list[Catalog]) -> None:
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda n: catalogs[n % 4].leases.acquire("apply", f"h{n}", 60), range(16)))
        list(pool.map(lambda n: catalogs[n % 4].commands.post("shop", "stop", {"n": n}), range(16)))
    assert taken.count(True) == 1
    assert len(catalogs[0].commands.pending("shop", "stop")) == 16
