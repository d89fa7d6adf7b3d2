"""A source with one table of every type, whose apply process is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.config import load_definition
from cdc.log.disk_format import CommitInfo, LogIdentity
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.position import Position
from cdc.postgres.connection import connect
from tests.pipelines.verification.table_of_every_type import ROWS, TABLE, VerifiedPipeline


@pytest.fixture
def pipeline(tmp_path: Path, database: str) -> Iterator[VerifiedPipeline]:
    """Rows at the source; the target is not written yet."""
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        f"name: kinds\nsource: {{dsn: '{database}'}}\ntables: [{{match: 'public.*'}}]\n"
        f"log: {{path: '{tmp_path}/log'}}\n"
        f"sinks: [{{type: delta, name: lake, path: '{tmp_path}/lake/{{schema}}/{{table}}'}}]\n"
    )
    definition = load_definition(path)
    with connect(database) as conn:
        conn.execute(TABLE)
        conn.execute(ROWS)
    identity = LogIdentity(system_id="1", database="kinds")
    writer = LogWriter.open(Path(definition.log.path), identity, SegmentLimits(size=1 << 20, age=60.0))
    writer.commit([], CommitInfo(last=Position(1), committed_at=0, timeline=1))
    with Catalog.open(definition.catalog.url) as catalog:
        yield VerifiedPipeline(definition, catalog, tmp_path / "lake" / "public" / "kinds", database)
