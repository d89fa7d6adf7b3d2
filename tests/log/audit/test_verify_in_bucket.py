"""Verify, on an object store: the same findings, whatever the files lie on."""

from __future__ import annotations

from pathlib import Path

from cdc.log.audit.finding import DamageKind
from cdc.log.audit.verify import verify
from cdc.log.disk_format import FORMAT
from cdc.log.export import export_range, write_parquet
from cdc.log.format_upgrade import MigrationResult, migrate_log
from cdc.log.reader import LogReader
from cdc.log.vacuum import remove_orphan_files
from cdc.log.writer import LogWriter
from tests.fixtures.s3 import S3, Relay
from tests.log.rows import IDENTITY, row
from tests.log.sample_log import ORDERS, SEGMENT_PER_FILE, commit_rows, schema_row, schema_version


def test_a_log_in_a_bucket_is_verified_like_one_in_a_directory(s3: S3, tmp_path: Path) -> None:
    root = s3.root()
    writer = LogWriter.open(root, IDENTITY, SEGMENT_PER_FILE)
    commit_rows(writer, schema_row(100, 0, schema_version(ORDERS, "name")), row(100, 1))
    commit_rows(writer, row(110))
    assert verify(root).findings == ()
    assert migrate_log(root) == MigrationResult(FORMAT, FORMAT)
    assert write_parquet(LogReader(root), export_range(LogReader(root), None, None), tmp_path / "out").rows == 3
    first, second = (next(iter((root / "changes" / f"segment={number}").glob("*.parquet"))) for number in (1, 2))
    content = bytearray(first.read_bytes())
    content[len(content) - 6] ^= 1
    first.write_bytes(bytes(content))
    second.unlink()
    (root / "changes" / "segment=7" / "stray.parquet").write_bytes(b"x")
    found = {(finding.damage, finding.file, finding.first) for finding in verify(root).findings}
    assert found == {
        (DamageKind.UNREADABLE, f"changes/segment=1/{first.name}", 100),
        (DamageKind.MISSING, f"changes/segment=2/{second.name}", 110),
    }
    assert remove_orphan_files(root, 0.0).files == 0


def test_sizes_are_listed_and_not_asked_for_file_by_file(s3: S3, relay: Relay) -> None:
    root = s3.root(port=relay.port)
    writer = LogWriter.open(root, IDENTITY, SEGMENT_PER_FILE)
    commit_rows(writer, schema_row(100, 0, schema_version(ORDERS, "name")), row(100, 1))
    for position in range(110, 160, 10):
        commit_rows(writer, row(position))
    relay.seen.clear()
    assert verify(root).findings == ()
    heads = [request for request in relay.seen if request.startswith("HEAD") and "segment" in request]
    assert len(heads) == 1, heads  # of the schema rows, which are read before anything is listed

    relay.unlisted = "segment=3/"
    assert verify(root).findings == ()
