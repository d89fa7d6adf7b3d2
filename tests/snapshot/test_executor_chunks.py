"""What one executor makes of one task, on a real server: a file that is the rows, or the reason for none."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from cdc.config.source import Undecodable
from cdc.errors import SnapshotInvalidated, SourceUnreachable
from cdc.log.encoded_chunk import EncodedChunk
from cdc.postgres.chunk_queries import BlockRange, StoredTable, stored_tables
from cdc.postgres.connection import connect, server_start
from cdc.postgres.tables import read_schemas
from cdc.postgres.visibility import Visibility
from cdc.snapshot.executor_chunks import (
    CHUNKS,
    ChunkTask,
    ExecutorAccess,
    StagedChunk,
    StagedOutcome,
    stage_chunk,
)
from tests.fixtures.postgres import run_sql

ROWS = 300


@pytest.fixture(name="access")
def _access(tmp_path: Path, database: str) -> ExecutorAccess:
    return ExecutorAccess(database, tmp_path, Undecodable.FAIL)


@pytest.fixture(name="task")
def _task(database: str) -> ChunkTask:
    """All of a table of several blocks."""
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        f"INSERT INTO t SELECT i, repeat('v', 100) || i FROM generate_series(1, {ROWS}) i",
    )
    with connect(database) as conn:
        (oid,) = conn.execute("SELECT 't'::regclass::oid::bigint").fetchone() or (0,)
        leaves = stored_tables(conn, oid)
        assert leaves is not None
        return ChunkTask(
            schema=read_schemas(conn, [oid])[oid],
            span=BlockRange(leaves[0], 0, leaves[0].blocks),
            publication="none",
            server=server_start(conn),
            limit=None,
        )


def leaf_of(task: ChunkTask) -> StoredTable:
    return task.span.leaf


def test_the_file_of_a_task_has_the_rows_of_its_range_and_its_snapshot(task: ChunkTask, access: ExecutorAccess) -> None:
    staged = stage_chunk(task, access)

    content = (access.root / CHUNKS / str(staged.file)).read_bytes()
    chunk = EncodedChunk.parse(content, task.schema.relation)
    rows = chunk.table(range(len(chunk.group_rows))).to_pylist()
    assert [row["after"][1][1] for row in rows] == ["v" * 100 + str(n) for n in range(1, ROWS + 1)]
    assert {(row["op"], row["topic"], row["position"]) for row in rows} == {("r", "public.t", 0)}
    assert (staged.outcome, staged.rows, staged.checksum) == (StagedOutcome.STAGED, ROWS, zlib.crc32(content))
    assert str(Visibility.parse(staged.snapshot)) == staged.snapshot
    assert Path(str(access.folder)).stat().st_mode & 0o777 == 0o700


def test_each_attempt_of_a_task_writes_a_file_of_its_own(task: ChunkTask, access: ExecutorAccess) -> None:
    assert stage_chunk(task, access).file != stage_chunk(task, access).file


def test_a_range_without_rows_has_no_file(task: ChunkTask, access: ExecutorAccess) -> None:
    beyond = replace(task, span=replace(task.span, first=leaf_of(task).blocks, end=leaf_of(task).blocks + 1))
    staged = stage_chunk(beyond, access)

    assert (staged.outcome, staged.file, staged.rows) == (StagedOutcome.STAGED, None, 0)
    assert staged.snapshot


def test_what_prevents_reading_is_an_outcome_or_an_error(task: ChunkTask, access: ExecutorAccess) -> None:
    assert stage_chunk(replace(task, limit=1_000), access).outcome is StagedOutcome.TOO_LARGE
    with pytest.raises(SourceUnreachable, match="different servers"):
        stage_chunk(replace(task, server="2001-01-01 00:00:00+00"), access)
    run_sql(access.dsn, "ALTER TABLE t RENAME v TO w")
    assert stage_chunk(task, access).outcome is StagedOutcome.OTHER_COLUMNS
    run_sql(access.dsn, "VACUUM FULL t")
    with pytest.raises(SnapshotInvalidated, match="rewrote the table"):
        stage_chunk(task, access)
    assert list(access.folder.iterdir()) == []


def test_tasks_and_results_survive_the_catalog(task: ChunkTask) -> None:
    block = replace(task, span=replace(task.span, lines=(3, 20)), limit=77)
    for sent in (task, block):
        assert ChunkTask.from_json(json.loads(json.dumps(sent.to_json()))) == sent
    staged = StagedChunk(outcome=StagedOutcome.STAGED, snapshot="7:9:8", file="a.parquet", rows=3, checksum=1)
    assert StagedChunk.from_json(json.loads(json.dumps(staged.to_json()))) == staged


def test_the_password_of_the_source_is_in_no_text_of_an_access() -> None:
    assert "secret" not in repr(ExecutorAccess("postgresql://cdc:secret@h/d", Path("/log"), Undecodable.FAIL))
