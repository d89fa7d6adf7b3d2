"""Migrate: a log that an older version wrote is read as it is, written once its format is raised, and loses nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cdc.bucket_files import Root
from cdc.delta_protocol.commits import commit_file
from cdc.errors import LogError, LogFenced, LogFormatUnknown
from cdc.log.audit.delta_tables import parse_commit
from cdc.log.audit.verify import verify
from cdc.log.compacted_table import CompactedWriter, read_compacted_state
from cdc.log.disk_format import CHANGES, COMPACTED, FORMAT, LogIdentity, format_of
from cdc.log.format_upgrade import STEPS, MigrationResult, describe, migrate_log
from cdc.log.reader import LogReader
from cdc.log.table_io import open_table
from cdc.log.trim_plan import Retention
from cdc.log.vacuum import vacuum
from cdc.log.writer import LogWriter
from cdc.log_row import LOG_SCHEMA, Operation
from cdc.logical_message import LogicalMessage
from cdc.lsn import Lsn
from cdc.position import Position
from tests.cli.command import spawn
from tests.log.rows import IDENTITY, LIMITS, info, message_row, row, table

DATA = Path(__file__).parent / "data"
"""Each log was written by the last version that wrote its format: compacted up to 0/6E and trimmed there, up to 0/82.

Format 1 has no checksums. Format 2 has a transactional message at 0/78 and another one at 0/7D.
"""
REMOVED_FILES = {1: 3, 2: 2}
"""Files that the version removed from the log, but not from the disk."""


@pytest.fixture(name="older", params=range(1, FORMAT))
def _older(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(name="root")
def _root(tmp_path: Path, older: int) -> Path:
    return Path(shutil.copytree(DATA / f"format-{older}", tmp_path / "log"))


def readable_state(root: Root) -> tuple[Any, ...]:
    """All that readers go by."""
    log, compacted = LogReader(root), read_compacted_state(root)
    assert compacted is not None
    rows = [row for batch in log.rows(Position(0), log.durable or Position(0)) for row in batch.to_pylist()]
    return log.durable, log.oldest, log.last_commit, compacted.horizon, compacted.floor, log.schema_history(), rows


def formats(root: Path) -> list[int]:
    return [format_of(open_table(root / name).metadata().description) for name in (CHANGES, COMPACTED)]


def test_every_older_format_has_its_step():
    assert sorted(STEPS) == list(range(1, FORMAT))


def test_an_older_log_is_read_as_it_is(root: Path):
    durable, oldest, *_, rows = readable_state(root)
    assert (durable, oldest) == (130, 110)
    assert {(r["position"], r["key"][0]) for r in rows if r["key"]} >= {(120, "7"), (130, "8")}


def test_what_an_older_version_let_go_of_is_swept(root: Path, older: int):
    """The notes of format 1 do not say how large the files are."""
    assert vacuum(root, Retention(max_age=0.0, grace=0.0)).files == REMOVED_FILES[older]
    assert not list((root / "_leaving").glob("*.json"))


def test_an_older_log_is_not_written_and_the_error_says_what_to_do(root: Path, older: int):
    with pytest.raises(LogFormatUnknown, match=f"has format {older}") as refused:
        LogWriter(root, LIMITS)
    assert "cdc migrate log" in refused.value.fix
    with pytest.raises(LogFormatUnknown, match=f"has format {older}"):
        CompactedWriter(root, LogReader(root).log_id)


def test_migration_keeps_every_position_and_every_row(root: Path, older: int):
    before = readable_state(root)
    assert migrate_log(root) == MigrationResult(older, FORMAT)
    assert readable_state(root) == before
    assert formats(root) == [FORMAT, FORMAT]
    assert verify(root).is_sound


def test_the_commit_that_says_so_carries_the_position_as_every_other_does(root: Path):
    """So of two that write at once one is refused."""
    migrate_log(root)
    for name, position in ((CHANGES, 130), (COMPACTED, 110)):
        said = parse_commit(
            commit_file(root / name, open_table(root / name).version()).read_text(), LogReader(root).log_id
        )
        assert (said.position, said.added) == (position, {})


@pytest.mark.parametrize("older", [2], indirect=True)
def test_messages_of_format_2_stay_without_a_prefix_next_to_new_ones_with_one(root: Path):
    migrate_log(root)
    writer = LogWriter(root, LIMITS)
    writer.commit(writer.stage(table(message_row(140, prefix="orders.created"))), info(140))
    rows = pa.Table.from_batches(LogReader(root).rows(Position(110), Position(140)), LOG_SCHEMA)
    found = [LogicalMessage.from_row(row) for row in rows.to_pylist() if row["op"] == Operation.MESSAGE]
    assert [(message.prefix, message.transactional, message.lsn, message.content) for message in found] == [
        (None, None, None, b'{"id": 7}'),
        (None, None, None, b"\xff\0"),
        ("orders.created", True, Lsn(139), b"hello"),
    ]
    assert verify(root).is_sound


def test_a_migrated_log_is_written_and_compacted_on(root: Path):
    migrate_log(root)
    writer = LogWriter(root, LIMITS)
    writer.commit(writer.stage(table(row(140))), info(140))
    compactor = CompactedWriter.open(root, IDENTITY, writer.log_id)
    compactor.commit([], horizon=Position(120), floor=Position(0))
    assert (LogReader(root).durable, compactor.horizon) == (140, 120)
    assert verify(root).is_sound


def test_migrating_again_changes_nothing(root: Path):
    migrate_log(root)
    versions = [open_table(root / name).version() for name in (CHANGES, COMPACTED)]
    assert migrate_log(root) == MigrationResult(FORMAT, FORMAT)
    assert [open_table(root / name).version() for name in (CHANGES, COMPACTED)] == versions


@pytest.mark.parametrize(
    ("point", "left"),
    [
        ("migrate_compacted", [FORMAT - 1, FORMAT]),
        pytest.param("migrate_changes", [FORMAT, FORMAT], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("older", [FORMAT - 1], indirect=True)
def test_killed_on_its_way_a_migration_is_run_again(tmp_path: Path, root: Path, point: str, left: list[int]):
    definition = tmp_path / "pipeline.yaml"
    definition.write_text(
        f"name: shop\nsource: {{dsn: 'postgresql://localhost/shop'}}\ntables: [{{match: 'shop.*'}}]\n"
        f"log: {{path: '{root}'}}\n"
    )
    before = readable_state(root)
    killed = spawn("migrate", "log", "-c", definition, environment={"CDC_FAILPOINT": point})
    assert killed.status == -9
    assert formats(root) == left
    assert readable_state(root) == before
    migrate_log(root)
    assert readable_state(root) == before
    assert formats(root) == [FORMAT, FORMAT]


def test_a_writer_that_runs_while_the_format_is_raised_is_fenced(tmp_path: Path):
    writer = LogWriter.open(tmp_path, IDENTITY, LIMITS)
    writer.commit([], info(10))
    describe(tmp_path / CHANGES, writer.log_id, IDENTITY.to_description())
    with pytest.raises(LogFenced):
        writer.commit([], info(20))
    assert LogReader(tmp_path).last_commit == info(10)


def test_a_new_log_is_of_this_format(tmp_path: Path):
    LogWriter.open(tmp_path, IDENTITY, LIMITS)
    assert migrate_log(tmp_path) == MigrationResult(FORMAT, FORMAT)


@pytest.mark.parametrize("name", [CHANGES, COMPACTED])
@pytest.mark.parametrize("older", [FORMAT - 1], indirect=True)
def test_a_newer_table_is_refused_by_every_reader_and_writer_and_left_alone(root: Path, name: str):
    migrate_log(root)
    log_id = LogReader(root).log_id
    newer = LogIdentity.to_description(IDENTITY).replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}')
    describe(root / name, log_id, newer)
    users = [lambda: LogReader(root), lambda: migrate_log(root), lambda: verify(root)]
    if name == CHANGES:
        users.append(lambda: LogWriter(root, LIMITS))
    else:
        users += [lambda: CompactedWriter(root, log_id), lambda: read_compacted_state(root, log_id)]
    for use in users:
        with pytest.raises(LogFormatUnknown, match=f"but the log has format {FORMAT + 1}"):
            use()


def test_without_a_log_there_is_nothing_to_migrate(tmp_path: Path):
    with pytest.raises(LogError, match="no change log"):
        migrate_log(tmp_path)
