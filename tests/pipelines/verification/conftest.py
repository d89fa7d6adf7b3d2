"""A source with one table of every type, whose apply process is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.log.disk_format import CommitInfo, LogIdentity
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from tests.fixtures.catalog import put_catalog
from tests.fixtures.postgres import fresh_database
from tests.pipelines.verification.table_of_every_type import ROWS, TABLE, VerifiedPipeline


@pytest.fixture(name="source", scope="session")
def _source(postgres: EmbeddedPostgres) -> Iterator[str]:
    """DSN of the source of all tests that leave its table as it is."""
    for dsn in fresh_database(postgres):
        fill(dsn)
        yield dsn


@pytest.fixture(name="pipeline")
def _pipeline(tmp_path: Path, source: str) -> Iterator[VerifiedPipeline]:
    """Rows at the source; no target is written yet."""
    yield from made(tmp_path, source)


@pytest.fixture(name="own")
def _own(tmp_path: Path, database: str) -> Iterator[VerifiedPipeline]:
    """The same with a source that the test may change."""
    fill(database)
    yield from made(tmp_path, database)


def fill(dsn: str) -> None:
    """Create the table and its rows."""
    with connect(dsn) as conn:
        conn.execute(TABLE)
        conn.execute(ROWS)


def made(folder: Path, dsn: str) -> Iterator[VerifiedPipeline]:
    """A pipeline in the folder, with an empty log and a catalog."""
    identity = LogIdentity(system_id="1", database="kinds")
    writer = LogWriter.open(folder / "log", identity, SegmentLimits(size=1 << 20, age=60.0))
    writer.commit([], CommitInfo(last=Position(1), committed_at=0, timeline=1))
    put_catalog(folder)
    with Catalog.open(f"sqlite:///{folder}/catalog.db") as catalog:
        yield VerifiedPipeline(catalog, folder, dsn)
