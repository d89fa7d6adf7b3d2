"""kill -9 of the reader in the middle of a backfill: it goes on behind what was recorded, and the log is exact."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from cdc.catalog import Catalog
from cdc.catalog.commands import Command
from cdc.config.source import Snapshot
from cdc.log.reader import LogReader
from cdc.log_row import Operation
from cdc.position import Position
from cdc.snapshot.backfill_documents import BACKFILL
from cdc.snapshot.chunk_copier import CHUNKS_AHEAD
from tests.cli.command import spawn
from tests.faults.capture import fold
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import rows_of, run_sql

ROWS, CHUNK_ROWS = 6_000, 200


@pytest.mark.parametrize(
    "failpoint",
    [
        "chunk_read:3",
        pytest.param("chunk_durable:1", marks=pytest.mark.slow),
        pytest.param("chunk_read:1", marks=pytest.mark.slow),
        pytest.param("chunk_durable:3", marks=pytest.mark.slow),
    ],
)
def test_a_reader_killed_in_a_resync_reads_again_only_what_was_on_its_way(pipeline: Pipeline, failpoint: str) -> None:
    run_sql(
        pipeline.dsn,
        "CREATE SCHEMA shop",
        "CREATE TABLE shop.t (id int PRIMARY KEY, v text)",
        f"INSERT INTO shop.t SELECT i, 'v' || i FROM generate_series(1, {ROWS}) i",
    )
    pipeline.write()
    with pipeline.definition.open("a") as definition:
        definition.write(f"snapshot: {{chunk_rows: {CHUNK_ROWS}}}\n")
    first = pipeline.reader()
    pipeline.wait(lambda: pipeline.durable() > 0, "the copy")
    first.terminate()
    assert first.wait(30) == 0
    run_sql(pipeline.dsn, "DELETE FROM shop.t WHERE id % 10 = 0", "UPDATE shop.t SET v = 'new' WHERE id % 7 = 0")
    killed = pipeline.reader(failpoint=failpoint)
    asked = spawn("tables", "resync", "shop.t", "-c", pipeline.definition, environment={"CDC_TEST_DSN": pipeline.dsn})
    assert asked.status == 0, asked.errors
    assert killed.wait(60) == -signal.SIGKILL
    pipeline.reader()
    pipeline.wait(lambda: job(pipeline).state != "pending", "the end of the resync")
    assert job(pipeline).state == "done", job(pipeline).result
    pipeline.settle()
    log = LogReader(pipeline.log)
    (relation,) = log.schemas()
    found = {(image[1], image[2]) for image in fold(log, relation)}
    assert found == set(rows_of(pipeline.dsn, "SELECT id::text, v FROM shop.t"))
    read = Counter(
        row["key"][0]
        for batch in log.rows(Position(0), log.durable or Position(0))
        for row in batch.select(["op", "key"]).to_pylist()
        if row["op"] == Operation.READ.value
    )
    again = sum(times - 2 for times in read.values() if times > 2)  # once by the copy, once by the resync
    assert again <= (CHUNKS_AHEAD + Snapshot().parallel) * CHUNK_ROWS


def job(pipeline: Pipeline) -> Command:
    with Catalog.open(f"sqlite:///{pipeline.folder}/catalog.db") as catalog:
        return catalog.commands.ls(pipeline.name, BACKFILL)[0]
